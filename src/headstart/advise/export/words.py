"""Settings as text: flags of a command, YAML, comments. Whatever a user or a file said stays inside its line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from headstart.advise.export.wish import Setting, Wish

PLAIN = re.compile(r"[A-Za-z_/][\w./+-]*")
WORDS_OF_YAML = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def line(text: str) -> str:
    """In one line, without control characters: a comment must not become a command."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def comments(texts: Iterable[str]) -> str:
    return "".join(f"# {line(text)}\n" for text in texts)


def heading(title: str, wish: Wish, notes: Iterable[str], start: Sequence[str] = ()) -> str:
    """What stands above every file: what it is, how it is started, what it does not say."""
    told = [f"{title} for {wish.target.name}, written by headstart export."]
    if start:
        told.append(f"Start: {shlex.join(start)}")
    return comments([*told, *(f"Note: {note}" for note in notes)])


# ------------------------------------------------------------------ commands
def flags(settings: Iterable[Setting]) -> list[str]:
    """True is a flag alone."""
    return [word for one in settings for word in _flag(one)]


def _flag(one: Setting) -> list[str]:
    if one.value is True:
        return [f"--{one.name}"]
    return [f"--{one.name}", json.dumps(one.value) if isinstance(one.value, dict) else str(one.value)]


def reasons(settings: Iterable[Setting], dashes: str = "--") -> list[str]:
    """A comment for each value."""
    return [
        f"{dashes}{one.name}{'' if one.value is True else f' {_short(one.value)}'}: {one.why}"
        for one in settings
        if one.why
    ]


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def script(start: Sequence[str], settings: Sequence[Setting], above: str) -> str:
    """A shell script: comments, then the command, one flag in a line."""
    parts = [shlex.join(start), *(shlex.join(_flag(one)) for one in settings)]
    return "#!/bin/sh\n" + above + comments(reasons(settings)) + " \\\n  ".join(parts) + "\n"


# ------------------------------------------------------------------ YAML
def yaml(settings: Iterable[Setting], indent: str = "") -> str:
    """A comment above each value says why it is so."""
    out = ""
    for one in settings:
        out += f"{indent}# {line(one.why)}\n" if one.why else ""
        if isinstance(one.value, list) and one.value and all(isinstance(v, Setting) for v in one.value):
            out += f"{indent}{one.name}:\n{yaml(one.value, indent + '  ')}"
        else:
            out += f"{indent}{one.name}: {scalar(one.value)}\n"
    return out


def scalar(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {scalar(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(scalar(v) for v in value) + "]"
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in WORDS_OF_YAML
        return value if plain else '"' + "".join(_escaped(c) for c in value) + '"'
    if isinstance(value, float):
        number, sign, exponent = repr(value).partition("e")
        return (number if "." in number else f"{number}.0") + sign + exponent  # it wants the point
    return json.dumps(value)


def _escaped(letter: str) -> str:
    if letter in '"\\' or not letter.isprintable():
        return f"\\U{ord(letter):08X}"
    return letter


def safe_name(text: str) -> str:
    """Of a folder or a model: letters, digits and few signs."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.") or "model"
