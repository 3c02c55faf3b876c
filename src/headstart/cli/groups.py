"""Option groups: a verb takes a dataclass, the command line shows its fields as options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def expand(verb: Callable[..., None]) -> Callable[..., None]:
    """Each field of a dataclass parameter becomes an option of the verb, which gets the dataclass filled in."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for p in inspect.signature(verb).parameters.values():
        own = p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        flat += _parameters(groups[p.name]) if p.name in groups else [own]

    def run(**given: Any) -> None:
        filled = {
            name: group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        verb(**given, **filled)

    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(group)
    ]
