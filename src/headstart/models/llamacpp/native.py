"""The door to llama.cpp: a GGUF file in memory, and a context that computes over its cells.

The only file that calls llama-cpp-python, and only its low-level functions. Its own classes copy the logits of every token.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstart.errors import ConfigError, ModelError, nearest

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7}  # ggml's numbers
KV_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32,
}  # fmt: skip
MOST_SEQUENCES = 256  # that llama.cpp can be built for


@dataclass(frozen=True)
class LlamaOptions:
    """What a user can set of llama.cpp."""

    gpu_layers: int = -1  # layers on a GPU where llama.cpp was built for one; -1: all
    threads: int | None = None  # None: one for each core
    flash_attention: bool | None = None  # None: where it helps
    kv_type: str = "f16"

    def __post_init__(self) -> None:
        if self.kv_type not in KV_TYPES:
            raise ConfigError(f"kv_type={self.kv_type!r} is not known.{nearest(self.kv_type, KV_TYPES)}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads} is not usable: give 1 or more.")
        if self.gpu_layers < -1:
            raise ConfigError(f"gpu_layers={self.gpu_layers} is not usable: give 0 or more, or -1 for all.")


def available() -> str | None:
    """Why llama.cpp cannot be used here, or None when it can."""
    try:
        _library()
    except ImportError:
        return "llama-cpp-python is not installed (make llamacpp, or pip install 'headstart[llamacpp]')"
    except (OSError, RuntimeError, AttributeError) as error:
        return f"llama-cpp-python does not start ({error})"
    return None


@functools.cache
def _library() -> Any:
    import llama_cpp

    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


_said: list[str] = []  # llama.cpp's latest lines, for error messages


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(level: int, text: bytes, data: Any) -> None:
    if level >= 4:  # GGML_LOG_LEVEL_ERROR, or the rest of such a line
        _said.append(text.decode(errors="replace").strip())
        del _said[:-8]


def _why() -> str:
    return next((line for line in reversed(_said) if len(line) > 1), "no reason was given")


class LlamaFile:
    """Weights and vocabulary of a GGUF file, held by llama.cpp."""

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        lib = self.lib = _library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = options.gpu_layers if options.gpu_layers >= 0 else 1 << 30
        self.path, self.options, self.device = path, options, "cpu"
        self.model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise ModelError(f"llama.cpp cannot load {path}: {_why()}.")
        self._close = weakref.finalize(self, lib.llama_model_free, self.model)
        if lib.llama_model_is_recurrent(self.model) or lib.llama_model_is_hybrid(self.model):
            self.close()
            raise ModelError(
                f"{path.name} has recurrent layers: their state cannot be rolled back after a rejected draft. "
                "Choose a model with attention in each layer."
            )
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.vocab_size = int(lib.llama_vocab_n_tokens(self.vocab))
        self.max_len = int(lib.llama_model_n_ctx_train(self.model))
        self.weight_bytes = int(lib.llama_model_size(self.model))

    @property
    def slot_bytes(self) -> int:
        """Bytes of KV that one token takes."""
        layers, heads = self.lib.llama_model_n_layer(self.model), max(1, self.lib.llama_model_n_head_kv(self.model))
        even = self.lib.llama_model_n_embd(self.model) // max(1, self.lib.llama_model_n_head(self.model))
        arch = self.meta("general.architecture") or ""
        key, value = (int(self.meta(f"{arch}.attention.{k}_length") or even) for k in ("key", "value"))
        return max(1, int(layers * heads * (key + value) * KV_BYTES[self.options.kv_type]))

    def meta(self, key: str) -> str | None:
        """A value of the file's metadata, as text."""
        size = self.lib.llama_model_meta_val_str(self.model, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        self.lib.llama_model_meta_val_str(self.model, key.encode(), buffer, size + 1)
        return buffer.value.decode(errors="replace")

    def describe(self) -> str:
        buffer = ctypes.create_string_buffer(128)
        self.lib.llama_model_desc(self.model, buffer, 128)
        return buffer.value.decode(errors="replace")

    def close(self) -> None:
        self._close()


class LlamaContext:
    """llama.cpp's working memory: cells for KV, rooms for a batch, logits."""

    def __init__(self, file: LlamaFile, cells: int, rows: int, seqs: int, most_paths: int) -> None:
        lib, options = file.lib, file.options
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = cells, rows, rows, seqs
        threads = options.threads or os.cpu_count() or 1
        params.n_threads, params.n_threads_batch = threads, threads
        params.type_k = params.type_v = KV_TYPES[options.kv_type]
        params.flash_attn_type = -1 if options.flash_attention is None else int(options.flash_attention)
        params.kv_unified, params.swa_full, params.no_perf = True, True, True
        self.lib, self.file = lib, file
        self.context = lib.llama_init_from_model(file.model, params)
        if not self.context:
            raise ModelError(f"llama.cpp cannot make a context of {cells} tokens: {_why()}.")
        self._memory = lib.llama_get_memory(self.context)
        self._address = lib.llama_cpp._lib[
            "llama_get_logits"
        ]  # the pointer as a number: an object is made for any other kind
        self._address.argtypes, self._address.restype = [ctypes.c_void_p], ctypes.c_void_p
        self._seen: tuple[int, np.ndarray] = (0, np.empty((0, file.vocab_size), np.float32))
        self._make_batch(rows, most_paths)

    def _make_batch(self, rows: int, most_paths: int) -> None:
        self.tokens, self.positions, self._counts = (np.zeros(rows, np.int32) for _ in range(3))
        self._wanted, self._seqs = np.zeros(rows, np.int8), np.zeros((rows, most_paths), np.int32)
        starts = self._seqs.ctypes.data + np.arange(rows, dtype=np.uintp) * self._seqs.strides[0]
        self._starts = np.ascontiguousarray(starts)
        int32, seq_ids = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
        batch = self._batch = self.lib.llama_batch()
        batch.token, batch.pos = self.tokens.ctypes.data_as(int32), self.positions.ctypes.data_as(int32)
        batch.n_seq_id, batch.seq_id = self._counts.ctypes.data_as(int32), self._starts.ctypes.data_as(seq_ids)
        batch.logits = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def decode(
        self, tokens: np.ndarray, positions: np.ndarray, seqs: Sequence[Sequence[int]], rows: np.ndarray
    ) -> np.ndarray:
        """Compute these tokens, each in its sequences; (R, V) logits of `rows`, which last until the next call."""
        count = len(tokens)
        self.tokens[:count], self.positions[:count] = tokens, positions
        for i, own in enumerate(seqs):
            self._counts[i] = len(own)
            self._seqs[i, : len(own)] = own
        self._wanted[:count] = 0
        self._wanted[rows] = 1
        self._compute(count)
        return self._logits(len(rows))

    def decode_one(self, token: int, position: int, seq: int) -> np.ndarray:
        """The same for one token of one sequence: (V,) logits."""
        self.tokens[0], self.positions[0], self._counts[0], self._seqs[0, 0], self._wanted[0] = (
            token,
            position,
            1,
            seq,
            1,
        )
        self._compute(1)
        return self._logits(1)[0]

    def _compute(self, count: int) -> None:
        self._batch.n_tokens = count
        code = self.lib.llama_decode(self.context, self._batch)
        if code:
            raise RuntimeError(f"llama.cpp could not compute the batch (code {code}: {_why()})")

    def _logits(self, count: int) -> np.ndarray:
        """A view of llama.cpp's own buffer, in which the asked rows stand one after the other."""
        if not count:
            return np.empty((0, self.file.vocab_size), np.float32)
        address = self._address(self.context)  # waits until they are there
        if address != self._seen[0] or count > len(self._seen[1]):
            buffer = (ctypes.c_float * (count * self.file.vocab_size)).from_address(address)
            self._seen = address, np.frombuffer(memoryview(buffer), np.float32).reshape(count, -1)
        return self._seen[1][:count]

    def remove(self, seq: int, start: int, stop: int) -> None:
        self.lib.llama_memory_seq_rm(self._memory, seq, start, stop)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        self.lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def close(self) -> None:
        if self.context:
            self.lib.llama_free(self.context)
            self.context = None
