"""Calls of tools inside a text, as templates of the Hermes and Qwen families have models write them; and the form that makes a
model write one.

Text before, between and behind calls goes on as text; what could be the beginning of a call is held back until it is clear.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.errors import BadInput
from headstart.server.protocol import new_id
from headstart.text import begun

BEGIN, END = "<tool_call>", "</tool_call>"


def is_known(template: str | None) -> bool:
    """Does this template have models write calls so?"""
    return BEGIN in (template or "")


def form(tools: Sequence[Mapping[str, Any]], several: bool) -> dict[str, Any]:
    """Structured outputs that are calls of some of these tools, and nothing else."""
    bodies = " | ".join(f"%json {json.dumps(_call(tool['function']))}" for tool in tools)
    rest = ' ("\\n" call)*' if several else ""
    grammar = f'start: call{rest}\ncall: "{BEGIN}\\n" body "\\n{END}"\nbody: {bodies}'
    return {"grammar": grammar}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one call; what a tool's own schema refers to moves up with it."""
    schema = dict(function.get("parameters") or {"type": "object"})
    about = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
    return about | {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": schema},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def check(tools: Sequence[Any]) -> None:
    """Says what is wrong with them."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadInput('Each tool should be {"type": "function", "function": {"name": ..., "parameters": {...}}}.')


def usable(tools: Sequence[dict[str, Any]], choice: Any) -> Sequence[dict[str, Any]]:
    """Those that may be called: the one that was chosen, or all."""
    if not isinstance(choice, Mapping):
        return tools
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise BadInput(f"tool_choice names {name!r}, which is none of the tools: {', '.join(names)}.")
    return [tools[names.index(name)]]


@dataclass(frozen=True)
class Call:
    """One call, as OpenAI's clients get it."""

    name: str
    arguments: str  # JSON
    id: str

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolReader:
    """Finds calls in a text that comes piece by piece."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def feed(self, text: str, last: bool = False) -> Iterator[str | Call]:
        """Text that is none of a call, and calls, in order."""
        self._held += text
        while True:
            word = END if self._inside else BEGIN
            at = self._held.find(word)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(word) :]
            yield from self._calls(before) if self._inside else _shown(before.rstrip())
            self._inside = not self._inside
        if last:
            yield from self._calls(self._held) if self._inside else _shown(self._held)
            self._held = ""
        elif not self._inside:
            shown = len(self._held) - begun(self._held, [BEGIN])
            before = self._held[:shown].rstrip()
            if before:
                self._held = self._held[len(before) :]
                yield before

    def _calls(self, text: str) -> Iterator[str | Call]:
        """What stands between the words; it is text, where it is no call."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        arguments = found.get("arguments", {}) if isinstance(found, dict) else None
        if (
            not isinstance(found, dict)
            or not isinstance(arguments, (dict, str))
            or not isinstance(found.get("name"), str)
        ):
            yield BEGIN + text
            return
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield Call(found["name"], written, new_id("call"))


def _shown(text: str) -> list[str]:
    """White space around calls is none of the answer."""
    return [text] if text.strip() else []
