"""Text to tokens and back: a thin wrapper over a transformers tokenizer, with the chat template and the token strings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.errors import BadInput, ModelError


class Tokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self.hf = tokenizer
        self._fast = _backend(tokenizer)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self.hf.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if self._fast is not None:
            return self._fast.decode(ids if isinstance(ids, list) else list(ids), skip_special_tokens=skip_special)
        return self.hf.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer; `more` is for the template to read."""
        if more and (
            taken := sorted({"messages", *inspect.signature(self.hf.apply_chat_template).parameters} & set(more))
        ):
            raise BadInput(f"{taken[0]!r} is not for the chat template to read: leave it out.")
        if not getattr(self.hf, "chat_template", None):
            raise BadInput(
                "This model's tokenizer has no chat template: give a plain prompt instead (generate, or completions)."
            )
        try:
            out = self.hf.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True, **(more or {})
            )
        except Exception as error:  # templates raise what their authors chose
            raise BadInput(f"The chat template cannot format these messages: {error}") from error
        return list(out["input_ids"])

    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset() if self.hf.eos_token_id is None else frozenset([int(self.hf.eos_token_id)])

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.hf.all_special_ids)

    def pieces(self) -> dict[int, str]:
        """Token id -> its own string in the vocabulary."""
        return {i: t for t, i in self.hf.get_vocab().items()}


def _backend(tokenizer: Any) -> Any:
    """The library below, where transformers would do no more than call it: that takes a third of the time, for each token."""
    kind = type(tokenizer)
    names = [getattr(getattr(kind, name, None), "__qualname__", "") for name in ("decode", "_decode")]
    usual = ("TokenizersBackend._decode", "PreTrainedTokenizerFast._decode")
    return tokenizer.backend_tokenizer if names[0] == "PreTrainedTokenizerBase.decode" and names[1] in usual else None


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code))
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise ModelError(f"{folder} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from error
