"""JSON into dataclasses, by their type hints, and strictly: whatever does not fit is said, with its place.

A file that somebody may have edited is checked once, where it is read; all that comes behind it can rely on its types."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]  # from what JSON holds to what is meant
FITS: dict[Any, set[type]] = {str: {str}, bool: {bool}, int: {int}, float: {int, float}}
NAMES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
MOST = 2**63 - 1  # of whole numbers: larger ones are no counts, and can be too large to be divided
SHOWN = 40  # letters of a value


class Misfit(Exception):
    """What does not fit. Whoever passes it on says where it was found."""

    def __init__(self, why: str) -> None:
        self.why, self.place = why, ""

    def within(self, place: str) -> Misfit:
        self.place = place + self.place
        return self

    def __str__(self) -> str:
        return f"{self.place.removeprefix('.') or 'it'} {self.why}"


def read(kind: type[T], value: Any) -> T:
    """The value as such a dataclass; raises `Misfit`. Every field has to be there, and nothing else."""
    return cast(T, reader(cast(Any, kind))(value))


@cache
def reader(kind: Any) -> Reader:
    """Of a type hint."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in FITS:
        return _single(kind)
    if is_dataclass(kind):
        return _record(kind)
    if origin is UnionType and len(inside) == 2 and NoneType in inside:
        return _optional(next(one for one in inside if one is not NoneType))
    if origin is list:
        return _list(inside[0])
    if origin is dict and inside[0] is str:
        return _dict(inside[1])
    raise TypeError(f"no JSON is read as {kind}")


# ------------------------------------------------------------------ one for each kind of hint
def _single(kind: Any, *more: type) -> Reader:
    fits = FITS[kind] | set(more)

    def one(value: Any) -> Any:
        own = type(value)
        if own not in fits:  # true and false are numbers to Python
            raise _other(value, NAMES[kind])
        if own is int and not -MOST <= value <= MOST:
            raise Misfit(f"is {_shown(value)}, which is too large")
        return value

    return one


def _optional(kind: Any) -> Reader:
    if kind in FITS:
        return _single(kind, NoneType)
    known = reader(kind)
    return lambda value: None if value is None else known(value)


def _list(kind: Any) -> Reader:
    one = reader(kind)

    def many(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _other(value, "a list")
        if kind is int and _whole_numbers(value):
            return value
        out: list[Any] = []
        try:
            for inner in value:
                out.append(one(inner))
        except Misfit as misfit:
            raise misfit.within(f"[{len(out)}]") from None
        return out

    return many


def _whole_numbers(values: list[Any]) -> bool:
    """The usual case, fast: token ids are most of a file."""
    return {int}.issuperset(map(type, values)) and (not values or (max(values) <= MOST and min(values) >= -MOST))


def _dict(kind: Any) -> Reader:
    one = reader(kind)

    def many(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _other(value, "an object")
        out = {}
        for key, inner in value.items():
            try:
                out[key] = one(inner)
            except Misfit as misfit:
                raise misfit.within(f"[{_shown(key)}]") from None
        return out

    return many


def _record(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {field.name: reader(hints[field.name]) for field in fields(kind)}

    def one(value: Any) -> Any:
        if type(value) is not dict:
            raise _other(value, "an object")
        if value.keys() != readers.keys():
            raise _other_keys(value, readers)
        known = {}
        try:
            for name, read in readers.items():
                known[name] = read(value[name])
        except Misfit as misfit:
            raise misfit.within(f".{name}") from None
        return kind(**known)

    return one


# ------------------------------------------------------------------ what is said
def _other(value: Any, wanted: str) -> Misfit:
    return Misfit(f"is {_shown(value)}, not {wanted}")


def _other_keys(value: dict[str, Any], known: dict[str, Reader]) -> Misfit:
    """A name that was misspelt is both unknown and missing: the former tells more."""
    if unknown := [key for key in value if key not in known]:
        return Misfit(f"has {_shown(unknown[0])}, which is not known")
    return Misfit(f"has no {_shown(next(key for key in known if key not in value))}")


def _shown(value: Any) -> str:
    """As JSON writes it, in one line; long ones by their beginning."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
