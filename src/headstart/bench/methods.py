"""Methods by name, as they are written on the command line: `none`, `ngram:5`, `eagle3:FOLDER`, `draft_model:MODEL:4`, JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.bench.records import BASELINE
from headstart.config import AUTO, parse_speculative
from headstart.errors import BadInput, HeadstartError

OURS = "headstart"  # the engine whose methods can be checked beforehand


@dataclass(frozen=True)
class Method:
    name: str  # as reports say it
    config: Mapping[str, Any] = field(
        default_factory=dict
    )  # of speculation, with vLLM's names; nothing: plain decoding
    engine: str = ""  # whose it is, where that is not the first

    @property
    def tokens(self) -> int | None:
        """How deep a draft reaches, where that is said."""
        return self.config.get("num_speculative_tokens")


def parse(
    given: Sequence[str], common: Mapping[str, Any] | None = None, engines: Sequence[str] = (OURS,)
) -> list[Method]:
    """Methods in order, plain decoding first, which all are compared with. `common` is for all that draft. With several
    engines, `ENGINE/METHOD` is for one of them, all others are the first one's; each has plain decoding."""
    first, *more = engines
    found = [_one(text, common or {}, first, more) for item in given for text in _items(item)]
    plain = [Method(BASELINE), *(Method(f"{name}/{BASELINE}", engine=name) for name in more)]
    others = [method for method in found if method.config]
    names = [method.name for method in others]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"{twice[0]!r} stands twice among the methods.")
    return [*plain, *others]


def _items(text: str) -> list[str]:
    """A JSON object is one, also behind an engine's name; everything else is names with commas."""
    parts = [text] if re.match(r"\s*(\w+/)?\{", text) else text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _one(text: str, common: Mapping[str, Any], first: str, more: Sequence[str]) -> Method:
    engine = next((name for name in more if text.startswith(f"{name}/")), "")
    config = _config(text.removeprefix(f"{engine}/").removeprefix(f"{first}/"))
    config = dict(common) | config if config else {}
    if config and (engine or first) == OURS:
        _check(text, config)
    return Method(text.removeprefix(f"{first}/"), config, engine)


def _config(text: str) -> dict[str, Any]:
    if text.startswith("{"):
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise BadInput(f"The method {text} is not JSON: {error}.") from error
    name, _, rest = text.partition(":")
    if name == BASELINE:
        return {}
    model, tokens = _split(rest)
    told = {"method": name, "model": model or None, "num_speculative_tokens": tokens}
    return {key: value for key, value in told.items() if value is not None}


def _split(rest: str) -> tuple[str, int | None]:
    """`MODEL:5`, `MODEL` or `5`: a model may have colons in its name, and is no number."""
    model, _, last = rest.rpartition(":")
    return (model, int(last)) if last.isdigit() else (rest, None)


def _check(text: str, config: dict[str, Any]) -> None:
    from headstart.drafters import find

    try:
        parsed, _ = parse_speculative(config)
        if parsed.method not in (BASELINE, AUTO):
            find(parsed)
    except HeadstartError as error:
        raise BadInput(f"The method {text!r} cannot be used: {error}") from error
