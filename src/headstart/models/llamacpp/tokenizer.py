"""Text to tokens and back as llama.cpp does it, from the vocabulary in the GGUF file. The same door as `models.tokenizer`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.errors import BadInput
from headstart.models.llamacpp.native import LlamaFile

BYTE_PAIRS = 2  # LLAMA_VOCAB_TYPE_BPE
CONTROL = 1 << 3  # LLAMA_TOKEN_ATTR_CONTROL
INT32 = ctypes.POINTER(ctypes.c_int32)


class Pieces(dict[int, bytes]):
    """Token -> what it spells, asked once. Special tokens spell nothing unless `special`."""

    def __init__(self, file: LlamaFile, special: bool) -> None:
        self._file, self._special = file, special

    def __missing__(self, token: int) -> bytes:
        lib, size = self._file.lib, 64
        room = ctypes.create_string_buffer(size)
        count = lib.llama_token_to_piece(self._file.vocab, token, room, size, 0, self._special)
        if count < 0:
            room = ctypes.create_string_buffer(-count)
            count = lib.llama_token_to_piece(self._file.vocab, token, room, -count, 0, self._special)
        self[token] = room.raw[:count]
        return self[token]


class LlamaTokenizer:
    def __init__(self, file: LlamaFile) -> None:
        self._file, self._lib, self._vocab = file, file.lib, file.vocab

    def encode(self, text: str, special: bool = True) -> list[int]:
        """`special` adds what the model wants around a text; the names of special tokens are read as such either way."""
        data = text.encode("utf-8", errors="replace")
        room = np.empty(len(data) + 8, np.int32)
        count = self._tokenize(data, room, special)
        if count < 0:
            room = np.empty(-count, np.int32)
            count = self._tokenize(data, room, special)
        return room[:count].tolist()

    def _tokenize(self, data: bytes, room: np.ndarray, special: bool) -> int:
        return self._lib.llama_tokenize(
            self._vocab, data, len(data), room.ctypes.data_as(INT32), len(room), special, True
        )

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self._spelled:
            pieces = self._shown if skip_special else self._all
            return b"".join([pieces[t] for t in ids]).decode("utf-8", errors="replace")
        tokens = np.array(list(ids), np.int32)
        room = ctypes.create_string_buffer(8 * len(tokens) + 64)
        count = self._detokenize(tokens, room, skip_special)
        if count < 0:
            room = ctypes.create_string_buffer(-count)
            count = self._detokenize(tokens, room, skip_special)
        return room.raw[:count].decode("utf-8", errors="replace")

    @functools.cached_property
    def _spelled(self) -> bool:
        """A text is what its tokens spell, one after the other. Other kinds of vocabulary drop spaces at a text's start."""
        return self._lib.llama_vocab_type(self._vocab) == BYTE_PAIRS

    @functools.cached_property
    def _all(self) -> Pieces:
        return Pieces(self._file, True)

    @functools.cached_property
    def _shown(self) -> Pieces:
        return Pieces(self._file, False)

    def _detokenize(self, tokens: np.ndarray, room: Any, skip_special: bool) -> int:
        pointer = tokens.ctypes.data_as(INT32)
        return self._lib.llama_detokenize(self._vocab, pointer, len(tokens), room, len(room), False, not skip_special)

    def chat(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if not self.has_chat_template():
            raise BadInput(
                "This GGUF file has no chat template: give a plain prompt instead (generate, or completions)."
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = {f"{which}_token": self._name(which) for which in ("bos", "eos", "pad")}
        options: dict[str, Any] = {"tools": tools, "chat_template": self._template, "add_generation_prompt": True}
        try:
            text = render_jinja_template([list(messages)], **options, **names)[0][0]
        except Exception as error:  # templates raise what their authors chose
            raise BadInput(f"The chat template cannot format these messages: {error}") from error
        return self.encode(text, special=False)

    @functools.cached_property
    def _template(self) -> str | None:
        return self._file.meta("tokenizer.chat_template")

    def has_chat_template(self) -> bool:
        return bool(self._template)

    def _name(self, which: str) -> str:
        token = getattr(self._lib, f"llama_vocab_{which}")(self._vocab)
        return "" if token < 0 else self._text(token)

    def _text(self, token: int) -> str:
        return (self._lib.llama_vocab_get_text(self._vocab, token) or b"").decode("utf-8", errors="replace")

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a text."""
        return frozenset(t for t in range(self._file.vocab_size) if self._lib.llama_vocab_is_eog(self._vocab, t))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        attr = self._lib.llama_vocab_get_attr
        return frozenset(t for t in range(self._file.vocab_size) if attr(self._vocab, t) & CONTROL)

    def pieces(self) -> dict[int, str]:
        """Token id -> its own string in the vocabulary."""
        return {t: self._text(t) for t in range(self._file.vocab_size)}
