"""Methods by name, as they are written on the command line: `none`, `ngram:5`, `eagle3:FOLDER`, `draft_model:MODEL:4`, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.bench.records import BASELINE
from headstart.config import AUTO, parse_speculative
from headstart.errors import BadInput, HeadstartError


@dataclass(frozen=True)
class Method:
    name: str  # as reports say it
    config: Mapping[str, Any] = field(
        default_factory=dict
    )  # of speculation, with vLLM's names; nothing: plain decoding

    @property
    def tokens(self) -> int | None:
        """How deep a draft reaches, where that is said."""
        return self.config.get("num_speculative_tokens")


def parse(given: Sequence[str], common: Mapping[str, Any] | None = None) -> list[Method]:
    """Methods in order, plain decoding first, which all are compared with. `common` is for all that draft."""
    found = [_one(text, common or {}) for item in given for text in _items(item)]
    others = [method for method in found if method.name != BASELINE]
    names = [method.name for method in others]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"{twice[0]!r} stands twice among the methods.")
    return [Method(BASELINE), *others]


def _items(text: str) -> list[str]:
    """A JSON object is one; everything else is names with commas."""
    parts = [text] if text.lstrip().startswith("{") else text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _one(text: str, common: Mapping[str, Any]) -> Method:
    if text.startswith("{"):
        try:
            config = dict(json.loads(text))
        except ValueError as error:
            raise BadInput(f"The method {text} is not JSON: {error}.") from error
        return Method(text, _checked(text, dict(common) | config))
    name, _, rest = text.partition(":")
    if name == BASELINE:
        return Method(BASELINE)
    model, tokens = _split(rest)
    own = {"method": name} | ({"model": model} if model else {})
    return Method(
        text, _checked(text, dict(common) | own | ({} if tokens is None else {"num_speculative_tokens": tokens}))
    )


def _split(rest: str) -> tuple[str, int | None]:
    """`MODEL:5`, `MODEL` or `5`: a model may have colons in its name, and is no number."""
    model, _, last = rest.rpartition(":")
    return (model, int(last)) if last.isdigit() else (rest, None)


def _checked(text: str, config: dict[str, Any]) -> dict[str, Any]:
    from headstart.drafters import find

    try:
        parsed, _ = parse_speculative(config)
        if parsed.method not in (BASELINE, AUTO):
            find(parsed)
    except HeadstartError as error:
        raise BadInput(f"The method {text!r} cannot be used: {error}") from error
    return config
