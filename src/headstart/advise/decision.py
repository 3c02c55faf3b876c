"""How to speculate with a target: what `tune` found out and writes, and `export` says in the words of other engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.config import SpeculativeConfig, parse_speculative
from headstart.errors import BadInput, HeadstartError

FORM = "headstart_tuned"  # the key that marks such a file, and the version of its form
VERSION = 1


@dataclass(frozen=True)
class Decision:
    target: str
    speculative: Mapping[str, Any] = field(default_factory=dict)  # with vLLM's names; nothing: plain decoding
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a key of `speculative` has its value
    measured: Mapping[str, Any] = field(default_factory=dict)  # what it rests on, for people

    @property
    def config(self) -> SpeculativeConfig:
        """As Headstart takes it."""
        return parse_speculative(dict(self.speculative) or None)[0]

    def write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({FORM: VERSION, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}.") from error


def read(path: Path) -> Decision:
    """A file of `headstart tune`."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise BadInput(f"{path} is not JSON, as headstart tune writes it: {error}.") from error
    if not isinstance(told, dict) or told.get(FORM) != VERSION:
        raise BadInput(f"{path} is no file of headstart tune: {FORM!r} should be {VERSION}.")
    parts = {name: told.get(name, {}) for name in ("speculative", "reasons", "measured")}
    if not isinstance(told.get("target"), str) or not all(isinstance(part, dict) for part in parts.values()):
        raise BadInput(f"{path} is no file of headstart tune: its target should be text, the rest objects.")
    found = Decision(told["target"], **parts)
    try:
        _ = found.config
    except HeadstartError as error:
        raise BadInput(f"{path}: {error}") from error
    return found
