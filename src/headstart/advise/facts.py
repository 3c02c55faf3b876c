"""What can be known of a model without its weights: its config, its tokenizer, and the headers of its files.

Nothing here raises over a model that is broken: what is wrong is written down among its `problems`, so that a report can tell
all of it at once. A name that stands for no model at all is a mistake of the user's, and is said.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import ModelError
from headstart.models import files, gguf
from headstart.models.heads.at_hand import is_head
from headstart.models.load import gguf_file

SAFETENSORS, GGUF, PICKLE = "safetensors", "gguf", "pickle"
QUANTIZED = ("awq", "gptq", "exl2", "exl3", "fp8", "compressed-tensors", "bitsandbytes")  # as configs name them
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8}
TYPES = {"BPE": "bpe", "Unigram": "spm", "WordPiece": "wpm"}  # of tokenizers
GGUF_TYPES = {"gpt2": "bpe", "llama": "spm", "bert": "wpm"}


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer knows, as rules on pairs ask for it."""

    kind: str  # bpe, spm or wpm
    texts: Sequence[str]  # of tokens, by id; "" where an id has none
    bos: int | None = None
    eos: tuple[int, ...] = ()
    adds_bos: bool = False
    adds_eos: bool = False

    def __len__(self) -> int:
        return len(self.texts)


@dataclass
class Facts:
    name: str  # as the user said it
    path: Path
    form: str  # of the weights: safetensors, gguf or pickle
    architecture: str = ""
    head: bool = False  # it drafts for a target, and is no model by itself
    quantized: str | None = None  # how, in the words of its config; GGUF's type of most weights
    parameters: int = 0
    weight_bytes: int = 0
    dtype: str = ""  # of most weights
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    vocab_size: int = 0  # rows of the output matrix: often some more than the tokenizer knows
    max_len: int = 0
    window: int | None = None  # tokens that a layer looks back, where it is not all
    rope: Mapping[str, Any] = field(default_factory=dict)
    chat_template: bool = False
    needs_code: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def bits(self) -> float:
        """Of a weight, on average."""
        return 8 * self.weight_bytes / self.parameters if self.parameters else 0.0

    def kv_bytes(self, bits: float = 16.0) -> float:
        """Of keys and values, for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bits / 8

    @functools.cached_property
    def vocabulary(self) -> Vocabulary | None:
        """None where there is no tokenizer, or none that can be read."""
        try:
            return _gguf_vocabulary(_fields(self.path)) if self.form == GGUF else _folder_vocabulary(self.path)
        except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def look(name: str) -> Facts:
    """At a folder, a GGUF file, a model in the hub's cache or in Ollama's store, or one that is built in."""
    if (file := gguf_file(name)) is not None:
        return _of_gguf(name, file)
    return _of_folder(name, _folder(name))


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"There is no model {name!r}: not built in, not a folder or GGUF file, not a hub id (owner/name)."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelError(f"{name} is not in the local hub cache: fetch it first, or name a folder.") from error


# ------------------------------------------------------------------ folders
def _of_folder(name: str, folder: Path) -> Facts:
    out = Facts(name, folder, SAFETENSORS)
    try:
        config = files.read_json(folder / "config.json")
    except ModelError as error:
        out.problems.append(str(error))
        config = {}
    _take_config(out, config)
    out.head = is_head(folder)
    _take_weights(out)
    out.chat_template = (folder / "chat_template.jinja").is_file() or bool(
        _optional(folder / "tokenizer_config.json").get("chat_template")
    )
    return out


def _take_config(out: Facts, config: Mapping[str, Any]) -> None:
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    out.config = config
    out.architecture = str((config.get("architectures") or [config.get("model_type") or ""])[0])
    out.needs_code = "auto_map" in config
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        out.quantized = str(quantization.get("quant_method") or "unknown")
    numbers = {
        "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
        "intermediate": "intermediate_size", "vocab_size": "vocab_size", "max_len": "max_position_embeddings",
    }  # fmt: skip
    for ours, theirs in numbers.items():
        setattr(out, ours, _number(text.get(theirs)))
    out.kv_heads = _number(text.get("num_key_value_heads")) or out.heads
    out.head_dim = _number(text.get("head_dim")) or (out.hidden // out.heads if out.heads else 0)
    out.window = _number(text.get("sliding_window")) or None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    out.rope = dict(rope) if isinstance(rope, dict) else {}
    if "rope_theta" in text:
        out.rope = {"rope_theta": text["rope_theta"], **out.rope}


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def _take_weights(out: Facts) -> None:
    """From the headers alone; every file is held against its real size."""
    try:
        shards = files.shards(out.path)
    except ModelError as error:
        out.problems.append(str(error))
        out.form = PICKLE if list(out.path.glob("*.bin")) or list(out.path.glob("*.pt")) else SAFETENSORS
        return
    bytes_by, count = Counter[str](), 0
    for shard in shards:
        try:
            header = files.safetensors_header(shard)
        except (ModelError, OSError) as error:
            out.problems.append(str(error))
            continue
        for tensor in header.values():
            begin, end = tensor["data_offsets"]
            bytes_by[tensor["dtype"]] += end - begin
            count += math.prod(tensor["shape"])
            if tensor["dtype"] not in files.DTYPE_BYTES:
                out.problems.append(f"{shard} has a tensor of type {tensor['dtype']}, which no loader here can type.")
    out.weight_bytes = sum(bytes_by.values())
    out.dtype = max(bytes_by, key=lambda k: bytes_by[k], default="")
    out.parameters = _unpacked(out) if out.quantized else count


def _unpacked(out: Facts) -> int:
    """Quantised weights are packed, several to a number: the config tells how many there are."""
    layer = out.hidden * out.head_dim * (2 * out.heads + 2 * out.kv_heads) + 3 * out.hidden * out.intermediate
    return out.layers * layer + 2 * out.vocab_size * out.hidden


def _optional(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path) if path.is_file() else {}
    except ModelError:
        return {}


def _folder_vocabulary(folder: Path) -> Vocabulary:
    data, config = files.read_json(folder / "tokenizer.json"), _optional(folder / "tokenizer_config.json")
    model = data["model"]
    known = (
        {str(text): int(number) for text, number in model["vocab"].items()}
        if isinstance(model["vocab"], dict)
        else {str(pair[0]): i for i, pair in enumerate(model["vocab"])}
    )
    known |= {str(token["content"]): int(token["id"]) for token in data.get("added_tokens") or []}
    texts = [""] * (max(known.values(), default=-1) + 1)
    for text, number in known.items():
        texts[number] = text
    names = {key: _token_text(config.get(f"{key}_token")) for key in ("bos", "eos")}
    told = _optional(folder / "generation_config.json").get("eos_token_id") or _optional(folder / "config.json").get(
        "eos_token_id"
    )
    eos = tuple(told) if isinstance(told, list) else (told,) if isinstance(told, int) else ()
    if not eos and names["eos"] in known:
        eos = (known[names["eos"]],)
    kind = TYPES.get(str(model.get("type")), str(model.get("type")).lower())
    kind = "spm" if kind == "bpe" and model.get("byte_fallback") else kind
    return Vocabulary(
        kind, texts, known.get(names["bos"]), eos, bool(config.get("add_bos_token")), bool(config.get("add_eos_token"))
    )


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value or "")


# ------------------------------------------------------------------ GGUF
def _of_gguf(name: str, file: Path) -> Facts:
    out = Facts(name, file, GGUF)
    try:
        gguf.check(file)
        told = _fields(file)
    except ModelError as error:
        out.problems.append(str(error))
        return out
    kind = str(told.get("general.architecture", ""))
    get = lambda key: _number(told.get(f"{kind}.{key}"))  # noqa: E731
    out.architecture = kind
    out.layers, out.hidden = get("block_count"), get("embedding_length")
    out.heads, out.intermediate = get("attention.head_count"), get("feed_forward_length")
    out.kv_heads = get("attention.head_count_kv") or out.heads
    out.head_dim = get("attention.key_length") or (out.hidden // out.heads if out.heads else 0)
    out.max_len, out.window = get("context_length"), get("attention.sliding_window") or None
    out.rope = {
        key: told[f"{kind}.rope.{key}"]
        for key in ("freq_base", "scaling.type", "scaling.factor")
        if f"{kind}.rope.{key}" in told
    }
    out.chat_template = "tokenizer.chat_template" in told
    out.config = {key: value for key, value in told.items() if not isinstance(value, list)}
    _take_tensors(out, file)
    return out


def _take_tensors(out: Facts, file: Path) -> None:
    by_type = Counter[str]()
    for tensor in gguf.open_quickly(file).tensors:
        out.parameters += int(tensor.n_elements)
        out.weight_bytes += int(tensor.n_bytes)
        by_type[tensor.tensor_type.name] += int(tensor.n_bytes)
        if tensor.name in ("output.weight", "token_embd.weight"):
            out.vocab_size = int(tensor.shape[-1])
    out.dtype = max(by_type, key=lambda k: by_type[k], default="")
    out.quantized = out.dtype if out.dtype not in BITS else None


@functools.lru_cache(4)
def _fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.open_quickly(file).fields.items()}


def _gguf_vocabulary(told: Mapping[str, Any]) -> Vocabulary:
    eos = told.get("tokenizer.ggml.eos_token_id")
    return Vocabulary(
        GGUF_TYPES.get(str(told["tokenizer.ggml.model"]), str(told["tokenizer.ggml.model"])),
        told["tokenizer.ggml.tokens"],
        told.get("tokenizer.ggml.bos_token_id"),
        (int(eos),) if eos is not None else (),
        bool(told.get("tokenizer.ggml.add_bos_token")),
        bool(told.get("tokenizer.ggml.add_eos_token")),
    )
