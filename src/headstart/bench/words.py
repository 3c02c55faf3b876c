"""How a result is put into words and numbers, the same on the page, in Markdown and in a comparison."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from headstart.bench.plots import number
from headstart.bench.records import BASELINE, Result
from headstart.bench.summary import Summary, summarise

Column = tuple[str, Callable[[Summary], str | None]]  # its heading, and its cell of one method at one point
UNKNOWN = "–"
PLAIN = "plain decoding"
WHY = {True: "near-tie", False: "more than rounding explains", None: "why is not known"}


def known(result: Result) -> list[Summary]:
    """Not every method need have run at every point."""
    return [s for s in summarise(result) if s.requests or s.failed]


def name(method: str) -> str:
    return PLAIN if method == BASELINE else method


def told(value: Any) -> str:
    """What a free form holds, in one line."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} ({told(v)})" if isinstance(v, Mapping) else f"{k} {told(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(f"({told(v)})" if isinstance(v, (list, tuple, Mapping)) else told(v) for v in value)
    return str(value)


def command(argv: Any) -> str:
    return shlex.join(str(part) for part in argv) if isinstance(argv, (list, tuple)) else str(argv)


def about(result: Result) -> str:
    known = result.setting | result.provenance
    return " · ".join(told(known[key]) for key in ("engine", "workload", "machine", "when", "date") if known.get(key))


def machine(result: Result) -> str:
    own = result.provenance
    said = [f"{key} {told(own[key])}" for key in ("versions", "commit", "load") if own.get(key) is not None]
    return "; ".join(([told(own["machine"])] if own.get("machine") else []) + said)


# ------------------------------------------------------------------ numbers of a table
def some(value: float | None, write: Callable[[float], str] = number) -> str | None:
    return None if value is None else write(value)


def share_identical(value: float) -> str:
    """Rounded down: 100% is said of all of them alone."""
    return "100%" if value == 1 else f"{math.floor(1000 * value) / 10:.1f}%"
