"""Calls of tools inside a text, in the ways that models write them; and the form that makes a model write one.

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


@dataclass(frozen=True)
class Dialect:
    """How the models of a family write calls."""

    sign: str  # what their chat template has in it
    begin: str  # stands before a call
    end: str  # and behind it; empty: it goes on to the end of the answer
    arguments: str = "arguments"  # what they are called
    bare: bool = False  # an answer that begins with a bracket is a call, whether `begin` stands there or not
    marked: bool = False  # `begin` is a token of its own, that is left out of the text unless one asks for it

    def form(self, tools: Sequence[Mapping[str, Any]], several: bool) -> dict[str, Any]:
        """Structured outputs that are calls of some of these tools, and nothing else."""
        bodies = " | ".join(f"%json {json.dumps(self._call(tool['function']))}" for tool in tools)
        if self.end:
            rest = ' ("\\n" call)*' if several else ""
            rules = f'start: call{rest}\ncall: "{self.begin}\\n" body "\\n{self.end}"'
        elif self.bare:
            rules = 'start: body (";" body)*' if several else "start: body"
        else:  # a list, and nothing has to say so
            rules = 'start: "[" body (", " body)* "]"' if several else 'start: "[" body "]"'
        return {"grammar": f"{rules}\nbody: {bodies}"}

    def _call(self, function: Mapping[str, Any]) -> dict[str, Any]:
        """The schema of one call; what a tool's own schema refers to moves up with it."""
        schema = dict(function.get("parameters") or {"type": "object"})
        about = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
        return about | {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: schema},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def read(self, text: str) -> list[Call] | None:
        """Calls, one behind the other or in a list; None where it is something else."""
        found, at, decoder = [], 0, json.JSONDecoder()
        try:
            while at < len(text):
                one, at = decoder.raw_decode(text, at)
                found += one if isinstance(one, list) else [one]
                at += len(text[at:]) - len(text[at:].lstrip(" \n\r\t;,"))
        except (ValueError, RecursionError):
            return None
        calls = [self._one(call) for call in found]
        return calls if calls and all(calls) else None  # type: ignore[return-value]

    def _one(self, call: Any) -> Call | None:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        given = call.get(self.arguments, {})
        if not isinstance(given, (dict, str)):
            return None
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return Call(call["name"], written, new_id("call"))


@dataclass(frozen=True)
class Call:
    """One call, as OpenAI's clients get it."""

    name: str
    arguments: str  # JSON
    id: str

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


HERMES = Dialect("<tool_call>", "<tool_call>", "</tool_call>")  # Qwen's, too
MISTRAL = Dialect("[TOOL_CALLS]", "[TOOL_CALLS]", "", marked=True)
LLAMA = Dialect('"parameters": dictionary', "<|python_tag|>", "", "parameters", bare=True)
DIALECTS = (HERMES, MISTRAL, LLAMA)


def dialect(template: Any) -> Dialect | None:
    """That of the models that this template is for; templates may be several, by name."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    return next((d for d in DIALECTS if any(d.sign in (text or "") for text in texts)), None)


def check(tools: Sequence[Any]) -> None:
    """Says what is wrong with them."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("parameters") or {}, Mapping)
        ):
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


class ToolReader:
    """Finds calls in a text that comes piece by piece."""

    def __init__(self, dialect: Dialect = HERMES, required: bool = False, hidden: Sequence[str] = ()) -> None:
        """`required`: the answer has the form of a call, from its first letter on. `hidden` words are left out: each comes
        as one token, so never in parts."""
        self._dialect, self._hidden, self._held = dialect, hidden, ""
        self._inside = required and not dialect.end
        self._fresh = True  # nothing was shown yet

    def split(self, text: str, last: bool = False) -> tuple[str, list[Call]]:
        """The text, and the calls."""
        found = list(self.feed(text, last))
        return "".join(one for one in found if isinstance(one, str)), [one for one in found if isinstance(one, Call)]

    def feed(self, text: str, last: bool = False) -> Iterator[str | Call]:
        """Text that is none of a call, and calls, in order."""
        for word in self._hidden:
            text = text.replace(word, "")
        self._held += text
        own = self._dialect
        while not (self._inside and not own.end):
            word = own.end if self._inside else own.begin
            at = self._held.find(word)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(word) :]
            yield from self._calls(before) if self._inside else self._shown(before.rstrip())
            self._inside = not self._inside
        if own.bare and self._fresh and self._held.lstrip()[:1] in ("{", "["):
            self._inside = True
        if last:
            yield from self._calls(self._held) if self._inside else self._shown(self._held)
            self._held = ""
        elif not self._inside:
            shown = len(self._held) - begun(self._held, [own.begin])
            before = self._held[:shown].rstrip()
            if before:
                self._held = self._held[len(before) :]
                yield from self._shown(before)

    def _calls(self, text: str) -> Iterator[str | Call]:
        """What stands between the words; it is text, where it is no call."""
        calls = self._dialect.read(text.strip())
        if calls is None:
            yield from self._shown((self._dialect.begin if self._dialect.end else "") + text)
        else:
            yield from calls

    def _shown(self, text: str) -> list[str]:
        """White space around calls is none of the answer."""
        self._fresh = self._fresh and not text.strip()
        return [text] if text.strip() else []
