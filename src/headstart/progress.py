"""Progress on anything that takes more than a moment: a bar or a spinner on standard error, plain lines without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_quiet = False


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
def bar(message: str, total: int, unit: str = "bytes", done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar that begins at `done`; the body calls the returned function with how much was done since the last call."""
    if _quiet or not sys.stderr.isatty():
        with status(message):
            yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(message, total=total, completed=done)
        yield lambda done: progress.advance(task, done)
