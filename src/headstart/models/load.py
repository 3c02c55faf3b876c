"""From a name to a model: built-in, folder, GGUF file or hub id; device and dtype by choice or by what the machine has."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import ConfigError, ModelError, nearest
from headstart.models import builtin, files, gguf, ollama
from headstart.models.llamacpp import native
from headstart.models.llamacpp.native import LlamaOptions
from headstart.progress import note, status

if TYPE_CHECKING:
    import torch

    from headstart.models.tokenizer import Tokenizer

RUNNERS = ("auto", "torch", "llamacpp")
DTYPES = ("float32", "bfloat16", "float16")
UNSTEADY = ("longrope", "dynamic")  # kinds of RoPE whose angles depend on the longest position of a forward


@dataclass
class Loaded:
    """A model in memory with its tokenizer."""

    name: str
    model: Any  # a transformers model, or a LlamaFile
    tokenizer: Any  # a Tokenizer or LlamaTokenizer; None where only token ids are used
    eos_ids: frozenset[int]
    max_len: int
    vocab_size: int


def gguf_file(name: str | Path) -> Path | None:
    """The GGUF file that a name stands for: built in, in the Ollama store, a path, or the only one of a folder."""
    text = str(name)
    if text in builtin.BUILTIN:
        return builtin.ensure(builtin.BUILTIN[text])
    if text.startswith(ollama.PREFIX):
        return ollama.find(text)
    path = Path(text).expanduser()
    if path.suffix == ".gguf" or (path.is_file() and path.suffix != ".safetensors"):
        if not path.is_file():
            raise ModelError(f"{path} does not exist.")
        return path
    return gguf.only_file(path) if path.is_dir() and not (path / "config.json").is_file() else None


def resolve(name: str | Path, trust_remote_code: bool = False) -> Path:
    """The folder to load from, with everything in it present and whole."""
    if (file := gguf_file(name)) is not None:
        return gguf.converted(file)
    folder = folder_of(str(name))
    files.check_folder(folder, trust_remote_code)
    return folder


def folder_of(name: str, fetch: bool = True) -> Path:
    """The folder that a name stands for, as it is; of a hub id, the copy in the cache, which is fetched or has to be there."""
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelError(f"{path} is a single weights file: name the folder that holds it and its config.json.")
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"There is no model {name!r}: not built in, not a file or folder, not a hub id (owner/name)."
            f"{nearest(name, builtin.BUILTIN)}"
        )
    return _from_hub(name, fetch)


def _from_hub(repo: str, fetch: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "tokenizer*"]
    try:
        others = ["consolidated*", "original/*"]
        return Path(
            snapshot_download(repo, allow_patterns=patterns, ignore_patterns=others, local_files_only=not fetch)
        )
    except LocalEntryNotFoundError as error:
        if not fetch:
            raise ModelError(f"{repo} is not in the local hub cache: fetch it first, or name a folder.") from error
        why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached"
        raise ModelError(f"{repo} is not in the local hub cache and {why}.") from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelError(f"The hub would not give {repo}: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise ModelError(f"{repo} could not be fetched from the hub: {error}.") from error


def pick_device(device: str | torch.device = "auto") -> torch.device:
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is not a device: use auto, cpu, cuda or cuda:0.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA device here: use cpu or auto.")
    return chosen


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the device computes in it, float16 on older GPUs, float32 on CPUs without bfloat16."""
    import torch

    dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        return torch.bfloat16 if _cpu_has_bf16() else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known.{nearest(dtype, (*DTYPES, 'auto'))}")
    if device.type == "cpu" and dtype != "float32" and not _cpu_has_bf16():
        note(f"This CPU has no arithmetic for {dtype}: float32 would be several times faster.")
    return getattr(torch, dtype)


def _cpu_has_bf16() -> bool:
    """Arithmetic of its own: oneDNN also says yes to CPUs with AVX-512 alone, on which it is slower than float32."""
    import torch

    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def load(
    name: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_len: int | None = None,
    trust_remote_code: bool = False,
    runner: str = "auto",
    llama: LlamaOptions | None = None,
) -> Loaded:
    """Load a model for the engine: with transformers, or a GGUF file with llama.cpp."""
    where = pick_device(device)
    if runner not in RUNNERS:
        raise ConfigError(f"runner={runner!r} is not known.{nearest(runner, RUNNERS)}")
    if (file := _for_llamacpp(name, runner, where, dtype)) is not None:
        return _load_llama(str(name), file, llama or LlamaOptions(), max_len, chosen=runner == "llamacpp")
    if llama is not None and replace(llama, threads=None) != LlamaOptions():
        raise ConfigError(
            "gpu_layers, flash_attention and kv_type are for runner='llamacpp'; this model runs on torch."
        )
    folder = resolve(name, trust_remote_code)
    with status(f"Loading {name} on {where}"):
        model = _load_model(folder, where, pick_dtype(dtype, where), trust_remote_code)
        from headstart.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(folder, trust_remote_code)
    return wrap(str(name), model, tokenizer, max_len)


def _for_llamacpp(name: str | Path, runner: str, device: torch.device, dtype: str | torch.dtype) -> Path | None:
    """The file, where llama.cpp runs this. By itself it takes GGUF files on CPUs, where it is there."""
    if runner == "torch" or (runner == "auto" and (device.type != "cpu" or dtype != "auto")):
        return None
    why_not = native.available()
    if runner == "auto":
        return gguf_file(name) if why_not is None else None
    if why_not is not None:
        raise ConfigError(f"runner='llamacpp' cannot be used: {why_not}.")
    if (file := gguf_file(name)) is None:
        raise ConfigError(f"runner='llamacpp' runs GGUF files, and {name} is none: use runner='torch'.")
    return file


def _load_llama(name: str, path: Path, options: LlamaOptions, max_len: int | None, chosen: bool) -> Loaded:
    from headstart.models.llamacpp.tokenizer import LlamaTokenizer

    try:
        with status(f"Loading {name} with llama.cpp"):
            file = native.LlamaFile(path, options)
    except ModelError:
        gguf.check(path)  # says what is wrong with a damaged file; it takes seconds, so only now
        raise
    if not chosen:
        note(
            f"{name} runs on llama.cpp, in the file's own format ({file.describe()}). runner='torch' takes torch instead."
        )
    tokenizer = LlamaTokenizer(file)
    return Loaded(name, file, tokenizer, tokenizer.eos_ids, _length(name, max_len, file.max_len), file.vocab_size)


def wrap(name: str, model: Any, tokenizer: Tokenizer, max_len: int | None = None) -> Loaded:
    """Give a transformers model that is already in memory the form that the engine takes."""
    length = _length(name, max_len, _position_limit(name, model.config.get_text_config()))
    vocab = int(model.get_output_embeddings().weight.shape[0])
    return Loaded(name, model, tokenizer, eos_ids(model, tokenizer), length, vocab)


def _length(name: str, asked: int | None, limit: int) -> int:
    """Positions that requests may use, as asked."""
    if asked is not None and not 2 <= asked <= limit:
        raise ConfigError(f"max_model_len={asked} is not usable: {name} takes from 2 to at most {limit} positions.")
    return asked or limit


def _position_limit(name: str, config: Any) -> int:
    """Positions that this model serves; says where they are fewer than it was made for."""
    limit, whole = position_limit(config), _whole_length(config)
    if limit < whole:
        kind = next(r["rope_type"] for r in _ropes(config) if r.get("rope_type") in UNSTEADY)
        note(f"{name}: {limit} positions instead of {whole}, since its {kind} RoPE depends on the batch.")
    return limit


def position_limit(config: Any) -> int:
    """Positions that a model serves the same way whoever shares the forward.

    RoPE of the kinds `longrope` and `dynamic` changes all angles once any position of the call passes the original length:
    a long neighbour would change a short request's text. So these models stay within that length.
    """
    limit = _whole_length(config)
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") in UNSTEADY and original:
            limit = min(limit, original)
    return limit


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The model's one kind of RoPE, or one for each kind of its layers."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found, *(v for v in found.values() if isinstance(v, dict))]


def _whole_length(config: Any) -> int:
    return getattr(config, "max_position_embeddings", None) or 1 << 20


def eos_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Every token that ends a text: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), model.config.get_text_config().eos_token_id):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found | tokenizer.eos_ids)


def _load_model(folder: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        refuse_recurrent(config)
        quantised = getattr(config, "quantization_config", None) is not None
        options: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code}
        if quantised:
            options["device_map"] = {"": str(device)}
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **options
        )
        model, info = found
        if info.get("missing_keys"):
            missing = sorted(info["missing_keys"])
            raise ModelError(
                f"{folder} lacks {len(missing)} tensors that {type(model).__name__} needs, {missing[0]!r} first; "
                "running with random weights would produce noise."
            )
        return model if quantised else model.to(device)
    except ImportError as error:
        raise ModelError(f"{folder} needs a package that is not installed: {error}") from error
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise ModelError(f"{folder} could not be loaded: {str(error).strip().splitlines()[0]}") from error


def refuse_recurrent(config: Any) -> None:
    """Say before loading what the probe would find after it."""
    types = set(getattr(config.get_text_config(), "layer_types", None) or [])
    stateful = sorted(types - {"full_attention", "sliding_attention"})
    named = config.model_type in (
        "mamba",
        "mamba2",
        "rwkv",
        "falcon_mamba",
        "recurrent_gemma",
        "jamba",
        "zamba",
        "zamba2",
    )
    if stateful or named:
        raise ModelError(
            f"{config.model_type} has layers that Headstart cannot run ({', '.join(stateful) or 'recurrent'}): recurrent "
            "state cannot be rolled back after a rejected draft. Choose a model with full or sliding attention in each layer."
        )
