"""From what a user typed to what the engine takes: a chat through the model's template, or the text as it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from headstart.errors import BadInput

if TYPE_CHECKING:
    from headstart.llm import LLM


def read(prompt: str) -> str:
    """The prompt itself, or standard input for `-` (less the newline that ends it)."""
    text = prompt if prompt != "-" else _standard_input()
    if not text.strip():
        raise BadInput("The prompt is empty: write one, or give - to read it from standard input.")
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"Standard input is not text: {error}.") from error


def as_prompt(llm: LLM, text: str, chat: bool | None = None, system: str | None = None) -> Any:
    """`chat` None: the chat template where the model has one."""
    templated = llm.tokenizer.has_chat_template() if chat is None else chat
    if templated:
        return [*messages(system), {"role": "user", "content": text}]
    if system is not None:
        raise BadInput("--system needs a chat template, and this prompt is sent as it is: put it into the prompt.")
    return text


def messages(system: str | None) -> list[dict[str, str]]:
    """A conversation before its first turn."""
    return [] if system is None else [{"role": "system", "content": system}]
