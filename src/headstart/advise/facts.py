"""What can be known of a model without its weights: its config, its tokenizer, and the headers of its files.

Nothing here raises over a model that is broken: what is wrong is written down among its `problems`, so that a report can tell
all of it at once. A name that stands for no model at all is a mistake of the user's, and is said.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import ModelError
from headstart.models import files, gguf
from headstart.models.heads.at_hand import is_head
from headstart.models.heads.store import PICKLES
from headstart.models.load import folder_of, gguf_file

SAFETENSORS, GGUF, PICKLE = "safetensors", "gguf", "pickle"
PACKED = ("I8", "U8", "I16", "U16", "I32", "U32", "I64")  # numbers that hold several weights, where they are quantised
EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")  # have a window in all layers, where they have one
GGUF_WINDOWS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}  # one of so many layers looks at all
PARTS = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
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
    tied: bool = False  # the output matrix is that of the input
    window: int | None = None  # tokens that some layers look back, and no further,
    windowed: int = 0  # and how many layers those are
    latent: int = 0  # numbers of a token that a layer keeps in place of keys and values (MLA)
    chat_template: bool = False
    needs_code: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def bits(self) -> float:
        """Of a weight, on average."""
        return 8 * self.weight_bytes / self.parameters if self.parameters else 0.0

    def kv_bytes(self, bits: float = 16.0, layers: int | None = None) -> float:
        """Of keys and values, for one token, in all layers or in so many."""
        each = self.latent or 2 * self.kv_heads * self.head_dim
        return (self.layers if layers is None else layers) * each * bits / 8

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
        with gguf.quickly():  # every file is read once
            return _of_gguf(name, file)
    return _of_folder(name, folder_of(name, fetch=False))


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
    inner = inner if isinstance(inner, dict) else config.get("transformer_layer_config")  # a head's
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
    out.config = config
    named = config.get("architectures")
    out.architecture = str(named[0] if isinstance(named, list) and named else config.get("model_type") or "")
    out.tied = bool(text.get("tie_word_embeddings"))
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
    out.window, out.windowed = _windows(text, out.layers)
    if rank := _number(text.get("kv_lora_rank")):
        out.latent = rank + _number(text.get("qk_rope_head_dim"))


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """How far some layers look back, and how many do. Where that is not sure, none: too much memory is the safer guess."""
    window = _number(text.get("sliding_window")) or None
    if window is None or text.get("use_sliding_window") is False:
        return None, 0
    if isinstance(kinds := text.get("layer_types"), list):
        return window, sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    if every := _number(text.get("sliding_window_pattern")):  # one of so many looks at all
        return window, layers - layers // every
    return window, layers if text.get("model_type") in EVERY_LAYER else 0


def _number(value: Any) -> int:
    """Of a config, which may hold anything; 0 where it is no size."""
    return int(value) if isinstance(value, int | float) and 0 < value < 1 << 40 else 0


def _take_weights(out: Facts) -> None:
    """From the headers alone; every file is held against its real size."""
    try:
        shards = files.shards(out.path)
    except ModelError as error:
        if out.head and (pickles := [out.path / name for name in PICKLES if (out.path / name).is_file()]):
            out.weight_bytes = sum(
                path.stat().st_size for path in pickles
            )  # heads are read from these, without running code
            out.parameters = out.weight_bytes // 2
            return
        out.problems.append(str(error))
        out.form = PICKLE if list(out.path.glob("*.bin")) or list(out.path.glob("*.pt")) else SAFETENSORS
        return
    bytes_by, count, packed = Counter[str](), 0, 0
    for shard in shards:
        try:
            header = files.safetensors_header(shard)
        except (ModelError, OSError) as error:
            out.problems.append(str(error))
            continue
        for tensor in header.values():
            begin, end = tensor["data_offsets"]
            bytes_by[tensor["dtype"]] += end - begin
            if tensor["dtype"] in PACKED and out.quantized:
                packed += end - begin
            else:
                count += math.prod(tensor["shape"])
            if tensor["dtype"] not in files.DTYPE_BYTES:
                out.problems.append(f"{shard} has a tensor of type {tensor['dtype']}, which no loader here can type.")
    out.weight_bytes = sum(bytes_by.values())
    out.dtype = max(bytes_by, key=lambda k: bytes_by[k], default="")
    out.parameters = count + round(8 * packed / _packed_bits(out.config))


def _packed_bits(config: Mapping[str, Any]) -> float:
    """Of one weight among several that share a number, as the config tells it."""
    told = config.get("quantization_config")
    for name in ("bits", "w_bit", "weight_bits"):
        value = told.get(name) if isinstance(told, dict) else None
        if isinstance(value, int | float) and 1 <= value <= 16:
            return float(value)
    return 4.0


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
        parts = _parts(file)
        for part in parts:
            gguf.check(part)
        told = _fields(parts[0])
    except ModelError as error:
        out.problems.append(str(error))
        return out
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        out.problems.append(f"{file} has a header that cannot be read: {error}. Fetch the file again.")
        return out
    kind = str(told.get("general.architecture", ""))
    get = lambda key: _number(told.get(f"{kind}.{key}"))  # noqa: E731
    out.architecture = kind
    out.layers, out.hidden = get("block_count"), get("embedding_length")
    out.heads, out.intermediate = get("attention.head_count"), get("feed_forward_length")
    out.kv_heads = get("attention.head_count_kv") or out.heads
    out.head_dim = get("attention.key_length") or (out.hidden // out.heads if out.heads else 0)
    out.max_len, out.window = get("context_length"), get("attention.sliding_window") or None
    out.windowed = out.layers - out.layers // GGUF_WINDOWS[kind] if out.window and kind in GGUF_WINDOWS else 0
    if rank := get("attention.kv_lora_rank"):
        out.latent = rank + get("rope.dimension_count")
    out.chat_template = "tokenizer.chat_template" in told
    out.config = {key: value for key, value in told.items() if not isinstance(value, list)}
    _take_tensors(out, parts)
    return out


def _parts(file: Path) -> list[Path]:
    """Of a model that is split: all files, the first one first."""
    if (match := PARTS.fullmatch(file.name)) is None:
        return [file]
    stem, _, count = match.groups()
    found = [file.with_name(f"{stem}-{i + 1:05}-of-{count}.gguf") for i in range(min(int(count), 10_000))]
    if missing := [path.name for path in found if not path.is_file()]:
        raise ModelError(f"{file} is one of {int(count)} files, and {missing[0]} is missing: fetch all of them.")
    return found


def _take_tensors(out: Facts, parts: Sequence[Path]) -> None:
    by_type = Counter[str]()
    out.tied = True
    for tensor in (tensor for part in parts for tensor in gguf.open_reader(part).tensors):
        out.tied &= tensor.name != "output.weight"
        out.parameters += int(tensor.n_elements)
        out.weight_bytes += int(tensor.n_bytes)
        by_type[tensor.tensor_type.name] += int(tensor.n_bytes)
        if tensor.name in ("output.weight", "token_embd.weight"):
            out.vocab_size = int(tensor.shape[-1])
    out.dtype = max(by_type, key=lambda k: by_type[k], default="")
    out.quantized = out.dtype if out.dtype not in BITS else None


@functools.lru_cache(4)
def _fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.open_reader(file).fields.items()}


def _gguf_vocabulary(told: Mapping[str, Any]) -> Vocabulary:
    eos = told.get("tokenizer.ggml.eos_token_id")
    kind = GGUF_TYPES.get(str(told["tokenizer.ggml.model"]), str(told["tokenizer.ggml.model"]))
    return Vocabulary(
        kind,
        told["tokenizer.ggml.tokens"],
        told.get("tokenizer.ggml.bos_token_id"),
        (int(eos),) if eos is not None else (),
        bool(told.get("tokenizer.ggml.add_bos_token", kind == "spm")),  # as llama.cpp takes it
        bool(told.get("tokenizer.ggml.add_eos_token")),
    )
