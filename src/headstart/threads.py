"""Where heavy work runs. OpenMP, which torch and llama.cpp compute with on CPUs, keeps a team of workers for each thread that
ever computed. With more workers than cores it lets all of them sleep between operations, and waking them costs a small model
a quarter of its speed. So nothing but the engine's own thread may keep a team."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """This runs on a thread of its own while the body does; then it is told that all is over, and waited for."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def apart(work: Callable[[], T]) -> T:
    """Do this on a thread that ends, and its team with it. What it raises is raised here; Ctrl-C does not wait for it."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="headstart-load", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed.pop()
    return done[0]
