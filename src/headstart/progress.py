"""Progress on anything that takes more than a moment: a bar or a spinner on standard error, plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

EVERY = 5.0  # seconds, at least, from one line to the next: logs do not fill
REST = 30  # letters that a long text leaves to the bar, the count and the time
clock = time.monotonic
_quiet = False


class Advance(Protocol):
    def __call__(self, done: int, what: str = "", /) -> None:
        """So much was done since the last call; this is being done now."""


def set_quiet(quiet: bool) -> None:
    global _quiet
    _quiet = quiet


def note(message: str) -> None:
    """Say something once, to a person."""
    if not _quiet:
        with suppress(OSError, ValueError):  # standard error may be closed
            print(message, file=sys.stderr, flush=True)


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner while the body runs."""
    if _quiet:
        yield
        return
    if not sys.stderr.isatty():
        note(f"{message} ...")
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextmanager
def bar(message: str, total: int, unit: str = "bytes", done: int = 0) -> Iterator[Advance]:
    """A bar that begins at `done`; the body calls the returned function with how much was done since the last call, and with
    what it does now, where that is worth to be told."""
    if _quiet or not sys.stderr.isatty():
        with status(message):
            yield _lines(message, total, done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    text = Column(no_wrap=True, max_width=max(REST, console.width - REST))
    described = TextColumn("{task.description}", markup=False, table_column=text)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (described, BarColumn(), count, TimeRemainingColumn())
    remembered = 30 if unit == "bytes" else 3600  # seconds that the time left is told from: parts can take minutes
    with Progress(*columns, console=console, speed_estimate_period=remembered) as progress:
        task = progress.add_task(message, total=total, completed=done)

        def advance(more: int, what: str = "") -> None:
            progress.update(task, advance=more, description=f"{message}: {_flat(what)}" if what else None)

        yield advance


def _lines(message: str, total: int, done: int) -> Advance:
    """Without a terminal: what is being done, behind how much of it is done."""
    said = clock() - EVERY

    def advance(more: int, what: str = "") -> None:
        nonlocal done, said
        done += more
        now = clock()
        if what and now - said >= EVERY:
            said = now
            note(f"{message} {done} of {total}: {_flat(what)}")

    return advance


def _flat(text: str) -> str:
    return " ".join(text.split())
