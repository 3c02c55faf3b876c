"""Servers of other engines as child processes: started, waited for, their log kept, and ended whatever happens."""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from headstart.bench.methods import Method
from headstart.engines.diagnosis import diagnose
from headstart.errors import HeadstartError
from headstart.progress import note
from headstart.threads import beside

HOST = "127.0.0.1"
PATIENCE = 1200.0  # seconds until a server has to be ready: large models load for long
LOOK = 0.25  # seconds between two looks
MOMENT = 0.5  # seconds in which one that broke off ends
FAREWELL = 20.0  # seconds to end by itself
TAIL = 12  # lines of a log that are shown where nobody knows what they mean
RECENT = 400  # lines of a log in which it stands why a server ended that had been up


@dataclass(frozen=True)
class Serving:
    """What a server for clients is told beside one that is measured."""

    name: str  # of the model, as clients ask for it
    key: str = ""  # that only we know: it is asked by nobody else
    kv_memory: int | None = None  # bytes
    batch_tokens: int | None = None  # new tokens in one forward
    pipeline_parallel: int = 1
    backend: str | None = None  # that binds several machines: ray or mp
    nodes: int = 1
    rank: int = 0  # of this machine; those above 0 have no API
    master: str | None = None  # address of the machine of rank 0
    master_port: int | None = None


@dataclass(frozen=True)
class Order:
    """What a server is wanted for."""

    model: str
    method: Method
    port: int
    max_len: int | None = None  # tokens of a request; None: as many as the model takes
    at_once: int = 0  # requests; 0: as many as are measured
    dtype: str = "auto"
    threads: int | None = None
    eager: bool = False
    tensor_parallel: int = 1
    draft_tensor_parallel: int = 1
    share: float = 1.0  # of the device's memory: others stand beside it
    trust_remote_code: bool = False
    more: tuple[str, ...] = ()  # arguments of the user's own
    serving: Serving | None = None  # None: it is measured


@dataclass(frozen=True)
class Launch:
    """How a server is started, and what it needs to be asked for."""

    engine: str  # as people know it
    command: Sequence[str]
    url: str
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # where it has to run
    ready: str = "/health"
    asks: Mapping[str, Any] = field(default_factory=dict)  # fields of each request
    forgets: bool = False  # requests leave nothing behind, as they are asked for
    # for those who serve clients with it
    key: str = ""
    headless: bool = False  # a part of a server elsewhere: nobody asks it
    routes: Sequence[str] = ("/v1/",)  # that are forwarded; those that end in / with all that is behind them
    usual: Mapping[str, Any] = field(default_factory=dict)  # for requests that do not say, as it is with us
    renames: Mapping[str, str] = field(default_factory=dict)  # fields of requests, from our names to its own
    lacks: Mapping[str, Any] = field(default_factory=dict)  # fields it does not have, with what says nothing


class Child:
    """A server while it runs."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch, self.log = launch, log
        with _opened(log) as stream:
            stream.write(f"$ {shlex.join(launch.command)}\n".encode())
            stream.flush()
            try:
                self.process = subprocess.Popen(
                    list(launch.command), stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=os.environ | dict(launch.env), cwd=launch.folder, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise HeadstartError(f"{launch.engine} cannot be started: {error}.") from error

    def wait(self, patience: float = PATIENCE) -> None:
        """Until it answers. One that ends instead, or takes too long, is said with its reason."""
        until = time.monotonic() + patience
        while not self._answers():
            if (code := self.process.poll()) is not None:
                raise HeadstartError(f"{self.launch.engine} ended with code {code} before it was ready: {self.why()}")
            if time.monotonic() > until:
                raise HeadstartError(f"{self.launch.engine} was not ready after {patience:.0f} seconds: {self.why()}")
            time.sleep(LOOK)

    def _answers(self) -> bool:
        try:
            return httpx.get(self.launch.url + self.launch.ready, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def cause(self, last: int | None = None) -> str | None:
        """What its log means, or the last lines of it, where that is known."""
        lines = self._said().splitlines()
        return diagnose("\n".join(lines if last is None else lines[-last:]))

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def why(self, last: int | None = None) -> str:
        """What its log says, in words where they are known."""
        text, known = self._said(), self.cause(last)
        lines = "" if known else "\n" + "\n".join(text.rstrip().splitlines()[-TAIL:]) + "\n"
        return f"{known or ''}{lines} (All it said is in {self.log}.)".strip()

    def has_ended(self) -> bool:
        """Or is about to: a process lets go of its clients a moment before it is over."""
        try:
            self.process.wait(MOMENT)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """With everything that it has started. It is asked first."""
        try:
            self.tell(signal.SIGTERM)
            self.process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            pass  # it does not listen
        finally:  # also where we are told again to end
            self.tell(signal.SIGKILL)  # whoever is left of its family
            self.process.wait()

    def tell(self, number: int) -> None:
        """All processes of its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    @property
    def resident(self) -> int | None:
        """Bytes of main memory that its processes hold; None where that cannot be read."""
        pages = [_pages(folder, self.process.pid) for folder in Path("/proc").glob("[0-9]*")]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") or None


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("wb")
    except OSError as error:
        raise HeadstartError(f"The log {log} cannot be written: {error.strerror}.") from error


def _pages(folder: Path, group: int) -> int:
    """That a process holds, if it is of this group."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return int(fields[21]) if int(fields[2]) == group else 0
    except (OSError, ValueError, IndexError):
        return 0


@contextmanager
def started(launches: Mapping[str, Launch], logs: Path) -> Iterator[dict[str, Child]]:
    """One after the other, since each measures the memory that is free; all of them are ended in the end, also where we are
    told to end (SIGTERM), or nobody listens any more (SIGHUP)."""
    with listening(), ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, launch in launches.items():
            note(f"Starting {launch.engine} for {name} ...")
            child = children[name] = Child(launch, logs / f"{_file_name(launch.engine, name)}.log")
            stack.callback(child.stop)
            child.wait()
            note(f"{launch.engine} is ready for {name} at {launch.url}.")
        stack.callback(_ask_to_end, children)  # all at once; then each is waited for
        yield children


@contextmanager
def running(launch: Launch, log: Path, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[Child]:
    """One server, each line of its log said as it comes. It is ready in the body, where anybody can ask it; at the end it is
    ended with its family, however we end."""
    with listening(), ExitStack() as stack:
        child = Child(launch, log)
        stack.enter_context(followed(log, say))
        stack.callback(child.stop)
        if not launch.headless:
            child.wait(patience)
        yield child


def followed(log: Path, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """What is written into a file from now on, line by line, to its end."""
    return beside(functools.partial(_follow, log, say), "headstart-log")


def _follow(log: Path, say: Callable[[str], None], over: threading.Event) -> None:
    rest, ended = "", False
    with log.open(encoding="utf-8", errors="replace", newline="") as stream:
        while not ended:
            ended = over.wait(LOOK)  # before the last look: nothing comes behind it
            *lines, rest = re.split(r"[\r\n]+", rest + stream.read() + "\n" * ended)  # bars begin their line anew
            for line in filter(str.strip, lines):
                say(line)


def _ask_to_end(children: Mapping[str, Child]) -> None:
    for child in children.values():
        child.tell(signal.SIGTERM)


@contextmanager
def listening() -> Iterator[None]:
    """These end this process as Ctrl-C does, so that nobody is left behind. Only a main thread can say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: sys.exit(128 + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _file_name(engine: str, method: str) -> str:
    """Of a log: methods may be paths."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in f"{engine}-{method}")[:80]


def flags(options: Mapping[str, object]) -> list[str]:
    """`--name value` for each that has one."""
    return [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
