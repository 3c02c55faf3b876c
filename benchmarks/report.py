"""What the benchmarks share: tables for the terminal and as Markdown, kept results, and which commit was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[list[str]]  # the head first
Tables = Callable[[dict[str, Any]], Iterator[tuple[str, Rows]]]


def show(console: Console, tables: Iterable[tuple[str, Rows]]) -> None:
    for title, rows in tables:
        table = Table(title=title, title_justify="left")
        for i, cell in enumerate(rows[0]):
            table.add_column(cell, justify="left" if not i else "right")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)


def markdown(tables: Iterable[tuple[str, Rows]]) -> str:
    out = []
    for title, rows in tables:
        out += [f"**{title}**\n", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        out += ["| " + " | ".join(row) + " |" for row in rows[1:]] + [""]
    return "\n".join(out)


def print_kept(path: str, tables: Tables) -> None:
    """A result that `--out` wrote, as Markdown."""
    try:
        print(markdown(tables(json.loads(Path(path).read_text()))))
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be shown: {error}. Give a file that --out wrote.")


def keep(path: str, result: dict[str, Any]) -> None:
    """Write this result, or add it to what the file has of the same commit, so that a long run can be made in parts."""
    try:
        kept = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        kept = {}
    if kept.get("provenance", {}).get("commit") == result["provenance"]["commit"]:
        result = _merged(kept, result)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def rows(path: str, *names: str) -> list[dict[str, Any]]:
    """JSON lines that have all of these."""
    wanted = f"Give a file of JSON lines, each with {' and '.join(names)}."
    try:
        found = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read: {error}. {wanted}")
    if not found or not all(isinstance(row, dict) and row.keys() >= set(names) for row in found):
        sys.exit(f"{path} has other lines than were expected. {wanted}")
    return found


def refuse_unknown(given: str, known: Iterable[str]) -> None:
    """Names with commas, all of them known."""
    names = list(known)
    if unknown := [name for name in filter(None, given.split(",")) if name not in names]:
        sys.exit(f"{unknown[0]!r} is not known; choose from: {', '.join(names)}.")


def where() -> dict[str, Any]:
    """The machine, how busy it was, and what ran there."""
    import torch

    import headstart

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "headstart": headstart.__version__,
        "commit": commit(),
    }


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return os.environ.get("HEADSTART_COMMIT") or found or "unknown"
