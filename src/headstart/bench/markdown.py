"""A result in short, as Markdown for a pull request; and how Markdown is written.

Whatever comes from data is escaped here: names of methods and prompts may hold anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from headstart.bench.plots import NOT_XML, number, percent
from headstart.bench.records import Result
from headstart.bench.verdicts import verdicts
from headstart.bench.words import UNKNOWN, Column, command, known, machine, name, share_identical, some

COLUMNS: list[Column] = [
    ("tokens/s", lambda s: number(s.tokens_per_second)),
    ("speed-up", lambda s: str(s.speedup) if s.speedup else None),
    ("block efficiency", lambda s: some(s.block_efficiency)),
    ("acceptance", lambda s: some(s.acceptance_rate, percent)),
    ("ms to first token, p50", lambda s: some(s.first_ms.get(50))),
    ("identical", lambda s: some(s.identical, share_identical)),
]


def short(result: Result) -> str:
    """What a pull request needs: what came out, one table, how to run it again, and where it was run."""
    summaries = known(result)
    said = "\n".join(f"- {cell(line)}" for line in verdicts(result, summaries))
    rows = [[name(s.method), str(s.point), *(take(s) or UNKNOWN for _, take in COLUMNS)] for s in summaries]
    parts = [said, table(["method", "point", *(heading for heading, _ in COLUMNS)], rows) if rows else ""]
    if argv := result.provenance.get("argv"):
        parts.append(fenced(command(argv)))
    parts.append(cell(machine(result)))
    return "\n\n".join(part for part in parts if part) + "\n"


# ------------------------------------------------------------------ its parts
def cell(text: str) -> str:
    """Text that Markdown takes as it is, in a table too."""
    flat = " ".join(NOT_XML.sub("\ufffd", text).split())
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat).replace("&", "&amp;").replace("<", "&lt;")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---", "---", *["---:"] * (len(headings) - 2)]]
    return "\n".join(
        [f"| {' | '.join(cell(h) for h in lines[0])} |", f"|{'|'.join(lines[1])}|"]
        + [f"| {' | '.join(cell(one) for one in row)} |" for row in rows]
    )


def fenced(text: str) -> str:
    text = NOT_XML.sub("\ufffd", text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
