#!/usr/bin/env python3
"""`headstart serve` under load and under faults, over loopback, with the books of its clients beside its own.

    python benchmarks/serve.py load                             closed loop at 1 to 64 streams, then Poisson arrivals
    python benchmarks/serve.py compare                          against the same engine without a server, in turns
    python benchmarks/serve.py overhead                         from the engine's hand-out of a token to the client
    python benchmarks/serve.py soak                             64 streams for 5 minutes
    python benchmarks/serve.py faults                           clients that misbehave, then SIGTERM under load
    python benchmarks/serve.py soak faults --inside             the same, and looks into the engine for what was left behind
    python benchmarks/serve.py --quick                          every part, small: does it work at all?
    python benchmarks/serve.py load --out benchmarks/results/serve.json     keeps it; parts of one commit add up
    python benchmarks/serve.py --show benchmarks/results/serve.json         prints a kept result, as Markdown

Each part starts a server of its own on a free port; `load` and `soak` also take the --url of one that runs. Answers have a
fixed length (`ignore_eos`), and each has a prompt or at least a seed of its own: no drafter remembers it from before. The exit
status is 1 where a bar is missed.

Parts
    load      tokens/s; milliseconds to the first token, between tokens (a piece of several tokens is divided among them)
              and to the end. Open loop: from the moment at which a request was due
    compare   bar: tokens/s at least 0.95 of `LLM.chat` with the same prompts, seeds and options, and as many sequences. The two
              are processes of their own that take turns; a round in which both have the same texts to write gives one
              ratio, and the median counts. With speculation (--drafter) and without
    overhead  bar: p99 under 3 ms for a token. The server runs on a thread of this process, which listens in where the engine
              hands out a chunk and writes down the time; a client in a process of its own, which does
              nothing else, writes down when the bytes of an event are in its hands. Both read CLOCK_MONOTONIC, which
              Linux processes share. Chunks and events are matched by the request's seed and their order, and must hold
              the same tokens; each token counts. The client keeps to one core, else Linux takes it to the core of the
              server that wakes it, to run there in the server's stead; and the server's event loop keeps off it. The
              engine computes on all of them
    soak      bar: no error and nothing left behind. Memory is told, too; it grows until the KV pool has been used once
    faults    bar: the clients' books and /metrics agree to the last request. Some clients vanish, read slowly, send prompts or
              bodies that are too large, or come when the queue is full. On SIGTERM, what runs is finished and the
              server leaves with 0, within --drain

Clients are `httpx` or `bare`. A bare one is a socket, and takes a fraction of httpx's time for an event; on a machine whose
cores all compute, that time would be the server's loss. So faults uses bare ones, compare and overhead one that only listens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import itertools
import json
import os
import random
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
import report

from headstart.progress import bar, note, status

if TYPE_CHECKING:
    from headstart import LLM

console = Console(width=150)
PARTS = ("load", "compare", "overhead", "soak", "faults")
PATH = "/v1/chat/completions"
LEAST_RATIO, MOST_OVERHEAD = 0.95, 3.0  # of the offline engine's tokens/s; ms
SIZES: dict[str, tuple[Any, Any]] = {  # what is measured, and with --quick
    "tokens": (64, 12), "waves": (3, 1), "least": (8, 4), "rounds": (5, 1), "rates": ([1.0, 2.0, 4.0], [4.0]),
    "rate_seconds": (30.0, 2.0), "streams": (64, 8), "seconds": (300.0, 4.0), "requests": (300, 40), "drain": (30.0, 30.0),
}  # fmt: skip
AT_ONCE = {"load": ([1, 2, 4, 8, 16, 32, 64], [1, 4]), "compare": ([1, 8, 32], [2]), "overhead": ([1, 8, 32], [1, 4])}
ENGINE = {"kv_memory": "2GiB", "max_model_len": 2048}
RUNS, WAITS, BODY = 8, 8, 64 << 10  # sequences, queue and bytes of the server that faults are tried on
LONG = 400  # tokens of answers whose readers vanish: nobody can say that they had come to their end anyway;
ROOM = 150  # for their prompts, where a model does not take much
ANSWER = "answer: "
TASKS = [
    "Write a short story about {}.", "Explain {} to a curious child.", "What should somebody know before they deal with {}?",
    "Write a letter to a friend about {}.", "List five facts about {}, and say for each why it matters.",
    "Describe {} as a painter would see it.", "Write a dialogue between two neighbours about {}.",
    "Write a Python class that keeps records about {}, with methods to add, find and remove them.",
    "Give a table in Markdown with the advantages and disadvantages of {}.", "Summarise the history of {} in one paragraph.",
    "Repeat this sentence three times, word for word: the keeper wrote everything about {} into a notebook each morning.",
    "Write JSON with the keys name, kind, size and price for four things that have to do with {}.",
]  # fmt: skip
THINGS = [
    "a lighthouse", "the tides", "bread", "bicycles", "a stone bridge", "bees", "a small railway station", "rain", "clocks",
    "vegetable gardens", "letters that never arrived", "a mountain hut", "sailing boats", "the moon", "old maps", "markets",
    "a library", "winter", "candles", "wells", "migrating birds", "a school of fish", "paper", "ink", "windmills", "rivers",
    "apple trees", "a quarry", "salt", "chess", "ladders", "volcanoes", "mushrooms", "a ferry", "echoes", "glass", "umbrellas",
    "a night watchman", "wool", "the first day at work",
]  # fmt: skip


# ------------------------------------------------------------------ what is asked
def prompts(args: argparse.Namespace) -> list[str]:
    """In an order of chance, the same each time."""
    from heads import gsm8k, spec_bench  # brings torch along, which a client does without

    found = [text for _, text in gsm8k(args.gsm8k, 400)] if args.gsm8k else []
    found += [text for _, text in spec_bench(args.spec_bench, 40) if len(text) < 1500] if args.spec_bench else []
    found = found or [task.format(thing) for task, thing in itertools.product(TASKS, THINGS)]
    random.Random(1).shuffle(found)
    return found


def body(text: str, seed: int, tokens: int, temperature: float = 0.7, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True, "seed": seed,
        "temperature": temperature, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    } | more  # fmt: skip


def bodies(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Without end; no two have the same seed."""
    texts = prompts(args)
    return (body(texts[i % len(texts)], i, args.tokens, args.temperature) for i in itertools.count())


# ------------------------------------------------------------------ clients
@dataclass
class Answer:
    """What one client saw. Events stay bytes until the clock has stopped."""

    body: dict[str, Any]
    sent: float
    status: int = 0  # none came
    events: list[tuple[float, bytes]] = field(default_factory=list)  # when it was here, and what it says
    left: bool = False  # the client went away on purpose
    error: str = ""
    rest: bytes = b""  # of an event that is not whole; of an answer that is no stream, all of it

    def take(self, data: bytes, now: float) -> None:
        """What came over a socket: the head, too."""
        if not self.status:
            head, found, data = (self.rest + data).partition(b"\r\n\r\n")
            self.rest = b"" if found else head
            if not found:
                return
            self.status = int(head.split(b" ", 2)[1])
        self.hear(data, now)

    def hear(self, data: bytes, now: float) -> None:
        *whole, self.rest = (self.rest + data).split(b"\n\n")
        self.events += [(now, part.partition(b"data: ")[2]) for part in whole]

    @functools.cached_property
    def _read(self) -> tuple[list[tuple[float, list[int]]], int]:
        told = [(at, json.loads(data)) for at, data in self.events if data != b"[DONE]"]
        pieces = [(at, one["choices"][0]["token_ids"]) for at, one in told if one.get("choices")]
        return pieces, next((one["usage"]["completion_tokens"] for _, one in told if one.get("usage")), 0)

    @property
    def pieces(self) -> list[tuple[float, list[int]]]:
        """When tokens came, and which."""
        return self._read[0]

    @property
    def tokens(self) -> int:
        """As the server counts them."""
        return self._read[1]

    def digest(self) -> None:
        """Keep what is asked about later, and let go of the rest: a soak has millions of events."""
        assert self._read is not None
        self.events = self.events[-2:]

    @property
    def ended(self) -> float:
        return self.events[-1][0] if self.events else self.sent

    @property
    def outcome(self) -> str:
        """finished, vanished, the status that it was refused with, or broken."""
        if self.left:
            return "vanished"
        if self.status not in (0, 200):
            return str(self.status)
        whole = not self.error and self.status == 200 and self.events and self.events[-1][1] == b"[DONE]"
        came = sum(len(ids) for _, ids in self.pieces) if whole else 0
        return "finished" if whole and came == self.tokens == self.body["max_tokens"] else "broken"

    @property
    def why(self) -> str:
        """What became of it, in words."""
        said = [data.decode(errors="replace") for _, data in self.events[-2:]] or [self.rest.decode(errors="replace")]
        return f"{self.outcome}: {self.error or ' '.join(said)[:200] or 'the connection ended'}"


class Ear(asyncio.Protocol):
    """A client that is no more than a socket: writes a request, and the time at which each event was there."""

    def __init__(
        self, answer: Answer, request: bytes, leave_after: int | None = None, leave_in: float = 0.0, gap: float = 0.0
    ) -> None:
        self.answer, self.request, self.leave_after, self.leave_in, self.gap = (
            answer,
            request,
            leave_after,
            leave_in,
            gap,
        )
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)
        if self.leave_in:
            self.loop.call_later(self.leave_in, self._leave)

    def data_received(self, data: bytes) -> None:
        self.answer.take(data, time.monotonic())
        if self.leave_after is not None and len(self.answer.events) >= self.leave_after:
            self._leave()
        elif self.gap:
            self.transport.pause_reading()
            self.loop.call_later(self.gap, self._go_on)

    def _leave(self) -> None:
        if not self.transport.is_closing():
            self.answer.left = True
            self.transport.abort()

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and not self.answer.left:
            self.answer.error = repr(error)
        if not self.done.done():
            self.done.set_result(None)


class Client:
    """Asks one server, as often as one likes at once."""

    def __init__(self, url: str, kind: str = "bare", patience: float = 300.0) -> None:
        self.url, self.kind, self.patience = url, kind, patience
        self.address = _address(url)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._httpx = httpx.AsyncClient(timeout=patience, limits=limits, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._httpx.aclose()

    async def ask(self, body: dict[str, Any], sent: float | None = None, **how: Any) -> Answer:
        """An answer, whatever became of it. A bare client vanishes after `leave_after` events or in `leave_in` seconds, and
        lets `gap` seconds pass between reads."""
        answer = Answer(body, time.monotonic() if sent is None else sent)
        try:
            async with asyncio.timeout(self.patience):
                await (self._ask_httpx(answer) if self.kind == "httpx" else self._ask_bare(answer, **how))
        except TimeoutError:
            answer.error = f"it had no end after {self.patience:g} s"
        except (OSError, httpx.HTTPError) as error:
            answer.error = repr(error)
        return answer

    async def _ask_httpx(self, answer: Answer) -> None:
        async with self._httpx.stream("POST", self.url + PATH, json=answer.body) as got:
            answer.status = got.status_code
            async for data in got.aiter_raw():
                answer.hear(data, time.monotonic())

    async def _ask_bare(self, answer: Answer, **how: Any) -> None:
        door = socket.socket(socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET)
        try:
            door.setblocking(False)
            if how.get("gap"):  # or the system would read ahead for it
                door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(door, self.address)
            request = _request(self.address, answer.body)
            transport, ear = await loop.create_connection(lambda: Ear(answer, request, **how), sock=door)
        except BaseException:
            door.close()
            raise
        try:
            await ear.done
        finally:
            transport.abort()


def _address(url: str) -> tuple[str, int]:
    place = urlsplit(url)
    return place.hostname or "127.0.0.1", place.port or 80


def _request(address: tuple[str, int], body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", f"host: {address[0]}:{address[1]}", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "connection: close", "", ""]).encode() + data


def _nobody(answer: Answer) -> None: ...


async def closed(
    client: Client, bodies: Iterable[dict[str, Any]], at_once: int, hear: Callable[[Answer], None] = _nobody
) -> list[Answer]:
    """So many at once: each client asks again when it has its answer."""
    left, out = iter(bodies), []

    async def one() -> None:
        for own in left:
            out.append(await client.ask(own))
            hear(out[-1])

    await asyncio.gather(*[one() for _ in range(at_once)])
    return out


async def arrivals(
    client: Client, bodies: Iterable[dict[str, Any]], rate: float, hear: Callable[[Answer], None] = _nobody
) -> list[Answer]:
    """Poisson: they come when they come, whoever is still there."""
    rng, due, tasks = random.Random(7), time.monotonic(), []

    async def one(own: dict[str, Any], due: float) -> Answer:
        answer = await client.ask(own, due)
        hear(answer)
        return answer

    for own in bodies:
        due += rng.expovariate(rate)
        await asyncio.sleep(due - time.monotonic())
        tasks.append(asyncio.create_task(one(own, due)))
    return list(await asyncio.gather(*tasks))


# ------------------------------------------------------------------ servers
@dataclass
class Host:
    """A server that is asked: a process that we started, a thread of this one, or somebody else's."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    llm: LLM | None = None
    gate: Any = None

    def resident(self) -> int | None:
        """Bytes, where it is a process of ours."""
        if self.process is None and self.llm is None:
            return None
        pid = "self" if self.process is None else self.process.pid
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def said(self) -> str:
        """What it wrote to standard error."""
        return Path(self.log.name).read_text(errors="replace") if self.log is not None else ""


@contextlib.contextmanager
def host(args: argparse.Namespace, max_num_seqs: int, **flags: Any) -> Iterator[Host]:
    """The server that these arguments name."""
    if args.url:
        yield Host(args.url.rstrip("/"))
    elif args.inside:
        with loaded(args, max_num_seqs) as llm, inside(llm, **flags) as found:
            yield found
    else:
        with child(args, max_num_seqs, **flags) as found:
            yield found


@contextlib.contextmanager
def child(args: argparse.Namespace, max_num_seqs: int, **flags: Any) -> Iterator[Host]:
    """`headstart serve` in a process of its own, which ends with this block."""
    port = _free_port()
    given = {**ENGINE, **args.engine, "drafter": args.drafter, "port": port, "max_num_seqs": max_num_seqs, **flags}
    command = [str(Path(sys.executable).with_name("headstart")), "serve", args.model]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        command += ([flag] if value else []) if isinstance(value, bool) else [flag, str(value)]
    with tempfile.NamedTemporaryFile(prefix="headstart-serve-") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        found = Host(f"http://127.0.0.1:{port}", process, log)
        try:
            with status(f"Starting headstart serve {args.model} --drafter {args.drafter}"):
                _wait_until_ready(found)
            yield found
        finally:
            _end(process)


@contextlib.contextmanager
def inside(llm: LLM, **settings: Any) -> Iterator[Host]:
    """A server on a thread of this process."""
    from headstart.server.app import ServerSettings, create_app
    from headstart.server.run import on_thread

    app = create_app(llm, ServerSettings("inside", **settings))
    with on_thread(app, log_level="warning") as (server, url):
        try:
            yield Host(url, llm=llm, gate=app.state.gate)
        finally:
            server.force_exit = True


def open_llm(how: dict[str, Any], max_num_seqs: int) -> LLM:
    """As `headstart serve` opens it, from `model`, `engine` and `drafter`."""
    from headstart.cli.options import EngineOptions, SpeculationOptions

    options = EngineOptions(model=how["model"], **{**ENGINE, **how["engine"]})
    return options.open(SpeculationOptions(drafter=how["drafter"]).config(), max_num_seqs=max_num_seqs)


def loaded(args: argparse.Namespace, max_num_seqs: int) -> LLM:
    with status(f"Loading {args.model} --drafter {args.drafter}"):
        return open_llm(vars(args), max_num_seqs)


def _free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def _wait_until_ready(found: Host, patience: float = 600.0) -> None:
    assert found.process is not None
    end = time.monotonic() + patience
    while time.monotonic() < end and found.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{found.url}/ready", trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    sys.exit(f"The server did not get ready. It said:\n{found.said()}")


def _end(process: subprocess.Popen[Any], patience: float = 10.0) -> None:
    """Nothing that we started outlives us."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Worker:
    """This script in another process: jobs in, answers out, one at a time."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, job: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it says itself what is wrong with it
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        sys.exit("A helper process ended early; what it said stands above.")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self.process)


def work(kind: str) -> None:
    """What a worker does, until nobody asks any more."""
    handle = {"client": client_worker, "offline": offline_worker}[kind]()
    next(handle)
    for line in sys.stdin:
        print(ANSWER + json.dumps(handle.send(json.loads(line))), flush=True)


# ------------------------------------------------------------------ books
def counters(url: str) -> dict[str, float]:
    """What /metrics tells, by name without its prefix, and the reason where there is one."""
    got = httpx.get(f"{url}/metrics", timeout=60, trust_env=False)
    got.raise_for_status()
    out: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(got.text):
        for sample in family.samples:
            name, why = sample.name.partition(":")[2], sample.labels.get("finished_reason")
            out[f"{name} {why}" if why else name] += sample.value
    return out


def disagreements(answers: Sequence[Answer], before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Where the clients' books and the server's differ, in words."""
    seen = Counter(answer.outcome for answer in answers)
    grew = {name: after.get(name, 0) - before.get(name, 0) for name in {*before, *after}}
    ended = {name.split(" ")[1]: n for name, n in grew.items() if name.startswith("request_success_total ")}
    aborted = ended.pop("abort", 0)
    pairs = [
        ("answers that came to their end", seen["finished"], sum(ended.values())),
        ("clients that vanished", seen["vanished"], aborted),
        ("requests that were turned away", seen["429"], grew.get("requests_turned_away_total", 0)),
    ]
    if not seen["vanished"]:  # of which nobody knows how much they could have read
        came = sum(answer.tokens for answer in answers)
        pairs.append(("tokens", came, grew.get("generation_tokens_total", 0)))
    return [f"{what}: the clients count {a}, the server {b:g}" for what, a, b in pairs if a != b]


def leaks(found: Host) -> list[str]:
    """What an idle server holds that it should not, in words. Pages that are kept for sharing do not count as used, so the
    share in use tells; inside this process we look at the engine's own books, too."""
    told = counters(found.url)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    out = [f"{name} is {told[name]:g}" for name in names if told[name]]
    return out + (engine_leaks(found.llm, found.gate) if found.llm is not None else [])


def engine_leaks(llm: LLM, gate: Any) -> list[str]:
    engine, loop = llm.engine, llm._loop
    held = {
        "requests inside the gate": range(gate.inside), "KV tables": engine.pool.tables, "listeners": loop._listeners,
        "texts": engine.delivery.streams, "requests known to drafters": engine.drafting._choices,
    }  # fmt: skip
    out = [f"{len(own)} {what} are left" for what, own in held.items() if own]
    try:
        engine.check_integrity()
    except AssertionError as error:
        out.append(f"the KV pool's books are wrong: {error}")
    return out


def settled(read: Callable[[], list[str]], patience: float = 10.0) -> list[str]:
    """What is still wrong when the server has had time to put things away: it does so after the last byte."""
    end = time.monotonic() + patience
    while (found := read()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return dict(zip(("p50", "p90", "p99"), np.percentile(values, [50, 90, 99]).tolist(), strict=True))


def speed(answers: Sequence[Answer]) -> float:
    """Tokens a second, from the first request to the last event."""
    seconds = max(a.ended for a in answers) - min(a.sent for a in answers)
    return sum(a.tokens for a in answers) / max(1e-9, seconds)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    good = [a for a in answers if a.outcome == "finished"]
    bad = [a for a in answers if a.outcome != "finished"]
    return {
        "requests": len(answers),
        "errors": len(bad),
        "what went wrong": sorted({a.why for a in bad})[:5],
        "tokens": sum(a.tokens for a in good),
        "tokens/s": speed(good) if good else 0.0,
        "first token ms": percentiles([1e3 * (a.pieces[0][0] - a.sent) for a in good]),
        "between tokens ms": percentiles([1e3 * gap for a in good for gap in gaps(a.pieces)]),
        "whole answer ms": percentiles([1e3 * (a.ended - a.sent) for a in good]),
    }


def gaps(pieces: Sequence[tuple[float, Sequence[int]]]) -> list[float]:
    """Seconds before each token behind the first piece; those that came together share what they took."""
    steps = itertools.pairwise(pieces)
    return [(now - before) / len(ids) for (before, _), (now, ids) in steps for _ in ids]


# ------------------------------------------------------------------ load
def load(args: argparse.Namespace, found: Host) -> dict[str, Any]:
    asked = bodies(args)
    ask(args, found, "httpx", asked, max(args.at_once("load")), "Warming up")
    out: dict[str, Any] = {"closed": {}, "open": {}}
    for at_once in args.at_once("load"):
        count = max(args.least, args.waves * at_once)
        answers = ask(args, found, "httpx", itertools.islice(asked, count), at_once, f"{at_once} at once", count)
        out["closed"][str(at_once)] = summary(answers) | {"load": os.getloadavg()[0]}
    for rate in args.rates:
        count = max(1, round(rate * args.rate_seconds))

        async def come(count: int = count, rate: float = rate) -> list[Answer]:
            async with Client(found.url, args.client or "httpx") as client:
                with bar(f"{rate:g} requests a second", count, "requests") as tick:
                    return await arrivals(client, itertools.islice(asked, count), rate, lambda _: tick(1))

        out["open"][f"{rate:g}"] = summary(asyncio.run(come())) | {"load": os.getloadavg()[0]}
    return out


def ask(
    args: argparse.Namespace, found: Host, kind: str, asked: Iterable[dict[str, Any]], at_once: int, message: str,
    count: int | None = None,
) -> list[Answer]:  # fmt: skip
    """A closed loop with a progress line; of an endless supply, one for each client."""
    count = count or at_once

    async def go() -> list[Answer]:
        async with Client(found.url, args.client or kind) as client:
            with bar(message, count, "requests") as tick:
                return await closed(client, itertools.islice(asked, count), at_once, lambda _: tick(1))

    return asyncio.run(go())


# ------------------------------------------------------------------ compare
def compare(args: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for drafter in dict.fromkeys([args.drafter, "none"]):
        for at_once in args.at_once("compare"):
            own = argparse.Namespace(**vars(args) | {"drafter": drafter})
            with child(own, at_once) as found, Worker("offline") as engine:
                with status(f"Loading {args.model} without a server"):
                    engine.ask({"model": args.model, "engine": args.engine, "drafter": drafter, "seqs": at_once})
                out.setdefault(drafter, {})[str(at_once)] = duel(own, found, engine.ask, at_once)
    return out


def duel(args: argparse.Namespace, found: Host, offline: Callable[[Any], Any], at_once: int) -> dict[str, Any]:
    """Rounds in which both answer the same, one after the other; who begins changes. The first does not count."""
    asked, count = bodies(args), max(args.least, args.waves * at_once)
    speeds: dict[str, list[float]] = {"server": [], "offline": []}
    loads, errors, same = [], 0, []
    for number in range(1 + args.rounds):
        batch = list(itertools.islice(asked, count))
        told: dict[str, Any] = {}
        for side in ("server", "offline") if number % 2 else ("offline", "server"):
            if side == "offline":
                told[side] = offline(batch)
            elif args.client:
                told[side] = ask(args, found, args.client, batch, at_once, f"Round {number}, {at_once} at once", count)
            else:
                with status(f"Round {number}, {at_once} at once"):
                    told[side] = hear_out(found.url, batch, at_once)
        answers = told["server"]
        errors += sum(a.outcome != "finished" for a in answers)
        if number:
            speeds["server"].append(speed(answers))
            speeds["offline"].append(told["offline"]["tokens"] / told["offline"]["seconds"])
            loads.append(os.getloadavg()[0])
            by_seed = {a.body["seed"]: [t for _, ids in a.pieces for t in ids] for a in answers}
            same += [by_seed[b["seed"]] == ids for b, ids in zip(batch, told["offline"]["texts"], strict=True)]
    ratios = [a / b for a, b in zip(speeds["server"], speeds["offline"], strict=True)]
    return {
        **{side: statistics.median(own) for side, own in speeds.items()}, "speeds": speeds, "requests a round": count,
        "ratio": statistics.median(ratios), "errors": errors, "same text": sum(same) / len(same), "load": loads,
    }  # fmt: skip


def offline_worker() -> Generator[Any, Any, None]:
    """First how to open the engine, then batches of what is asked."""
    how = yield None
    with open_llm(how, how["seqs"]) as llm:
        batch = yield "ready"
        while True:
            batch = yield offline(llm, batch)


def offline(llm: LLM, batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    from headstart import SamplingParams

    names = ("max_tokens", "temperature", "seed", "ignore_eos")
    params = [SamplingParams(**{name: own[name] for name in names}) for own in batch]
    began = time.perf_counter()
    out = llm.chat([own["messages"] for own in batch], params)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(o.stats.tokens for o in out), "texts": [o.token_ids for o in out]}


# ------------------------------------------------------------------ overhead
Heard = dict[int, list[tuple[float, list[int]]]]  # by a request's seed: when tokens were handed out, and which


@contextlib.contextmanager
def listening_in(llm: LLM) -> Iterator[Heard]:
    """Notes the time at which the engine hands out a chunk, on its own thread, before anybody else hears of it."""
    heard: Heard = defaultdict(list)
    loop: Any = llm._loop

    def submit(requests: Sequence[Any], listener: Callable[[Any, Any], None]) -> None:
        def stamped(request: Any, event: Any) -> None:
            if not isinstance(event, BaseException):
                heard[request.seed].append((time.monotonic(), event.token_ids))
            listener(request, event)

        type(loop).submit(loop, requests, stamped)

    loop.submit = submit
    try:
        yield heard
    finally:
        del loop.submit


def delays(heard: Heard, came: Heard) -> tuple[list[float], list[str]]:
    """Milliseconds of each token from hand-out to client; and where the two do not tell of the same tokens."""
    out, wrong = [], []
    for seed, pieces in came.items():
        if [ids for _, ids in heard.get(seed, [])] != [ids for _, ids in pieces]:
            wrong.append(f"request {seed}: what was handed out is not what came")
            continue
        for (handed, ids), (here, _) in zip(heard[seed], pieces, strict=True):
            out += [1e3 * (here - handed)] * len(ids)
    return out, wrong


def overhead(args: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    asked, out = bodies(args), {}
    with inside(llm) as found, Worker("client") as client:
        _keep_off(clients_core())
        for number, at_once in enumerate([max(args.at_once("overhead")), *args.at_once("overhead")]):
            count = max(args.least, args.waves * at_once)
            batch = list(itertools.islice(asked, count))
            with listening_in(llm) as heard, status(f"{count} requests, {at_once} at once"):
                told = client.ask({"url": found.url, "batch": batch, "at_once": at_once})
            if not number:  # a round to warm up
                continue
            came = {answer["seed"]: [(at, ids) for at, ids in answer["pieces"]] for answer in told}
            values, wrong = delays(heard, came)
            wrong += [answer["why"] for answer in told if answer["outcome"] != "finished"]
            out[str(at_once)] = {
                "requests": count, "tokens": len(values), "ms": percentiles(values), "most": max(values, default=0.0),
                "wrong": wrong, "load": os.getloadavg()[0],
            }  # fmt: skip
    return out


def clients_core() -> int:
    return max(os.sched_getaffinity(0))


def _keep_off(core: int) -> None:
    """The event loop of the server in this process."""
    others = os.sched_getaffinity(0) - {core}
    for thread in threading.enumerate():
        if thread.name == "headstart-server" and thread.native_id is not None and others:
            os.sched_setaffinity(thread.native_id, others)


def client_worker() -> Generator[Any, Any, None]:
    job = yield None
    os.sched_setaffinity(0, [clients_core()])
    while True:
        answers = hear_out(job["url"], job["batch"], job["at_once"])
        job = yield [
            {"seed": a.body["seed"], "outcome": a.outcome, "why": a.why, "pieces": a.pieces if a.status == 200 else []}
            for a in answers
        ]


def hear_out(url: str, bodies: Sequence[dict[str, Any]], at_once: int, patience: float = 300.0) -> list[Answer]:
    """Ask all of it, so many at a time. No event loop stands between the socket and the clock, and bytes are read at the end: a
    client that is busy with one event would be late for the next, and the server would be blamed."""
    address, waiting = _address(url), iter(bodies)
    heard: list[tuple[Answer, list[tuple[float, bytes]]]] = []
    with selectors.DefaultSelector() as doors:

        def begin() -> None:
            for own in itertools.islice(waiting, 1):
                door = socket.create_connection(address, patience)
                heard.append((Answer(own, time.monotonic()), []))
                door.sendall(_request(address, own))
                door.setblocking(False)
                doors.register(door, selectors.EVENT_READ, heard[-1])

        for _ in range(at_once):
            begin()
        while doors.get_map():
            ready = [key for key, _ in doors.select(patience)]
            for key in [key for key in ready if not _take(key)] if ready else list(doors.get_map().values()):
                doors.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                begin()
    for answer, parts in heard:
        for at, data in parts:
            answer.take(data, at)
    return [answer for answer, _ in heard]


def _take(key: selectors.SelectorKey) -> bytes:
    """What is here, with the time; nothing at its end."""
    answer, parts = key.data
    try:
        data: bytes = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
    except OSError as error:
        answer.error, data = repr(error), b""
    parts.append((time.monotonic(), data))
    return data


# ------------------------------------------------------------------ soak
def soak(args: argparse.Namespace, found: Host) -> dict[str, Any]:
    asked = bodies(args)
    ask(args, found, "httpx", asked, args.streams, "Warming up")
    wrong = settled(lambda: leaks(found))
    before, marks = counters(found.url), [found.resident()]
    began = time.monotonic()

    def until_it_is_over() -> Iterator[dict[str, Any]]:
        """What is asked until then; on the way, memory is noted ten times."""
        for own in asked:
            passed = time.monotonic() - began
            if passed > args.seconds:
                return
            if passed > args.seconds * len(marks) / 10:
                marks.append(found.resident())
            yield own

    async def go() -> list[Answer]:
        async with Client(found.url, args.client or "httpx") as client:
            watch = asyncio.create_task(_tell_time(args.seconds, f"{args.streams} streams"))
            try:
                return await closed(client, until_it_is_over(), args.streams, Answer.digest)
            finally:
                watch.cancel()

    answers = asyncio.run(go())
    seconds = time.monotonic() - began
    wrong += settled(lambda: [*leaks(found), *disagreements(answers, before, counters(found.url))])
    megabytes = [m >> 20 for m in [*marks, found.resident()] if m is not None]
    return summary(answers) | {
        "streams": args.streams, "seconds": seconds, "wrong": wrong, "resident MB": megabytes, "load": os.getloadavg()[0],
        "inside": found.llm is not None,
    }  # fmt: skip


async def _tell_time(seconds: float, message: str) -> None:
    with bar(message, round(seconds), "seconds") as tick:
        for _ in range(round(seconds)):
            await asyncio.sleep(1)
            tick(1)


# ------------------------------------------------------------------ faults
@dataclass(frozen=True)
class Fault:
    """One client that is to misbehave, and what may become of it. Anybody may find the queue full, and be told so."""

    kind: str
    body: dict[str, Any]
    fair: frozenset[str]
    how: dict[str, Any] = field(default_factory=dict)


def fault(kind: str, asked: dict[str, Any], rng: random.Random, max_len: int) -> Fault:
    if kind == "vanishes":
        own = asked | {"max_tokens": min(LONG, max_len - ROOM)}
        return Fault(kind, own, frozenset(["vanished", "429"]), {"leave_after": rng.randint(1, 3)})
    if kind == "vanishes early":  # before anything came, perhaps while it waits for its turn
        own = asked | {"max_tokens": min(LONG, max_len - ROOM)}
        if rng.random() < 0.5:
            own = {name: value for name, value in own.items() if name != "stream_options"} | {"stream": False}
        return Fault(kind, own, frozenset(["vanished", "429"]), {"leave_in": 0.1})
    if kind == "slow":  # log probabilities make answers large, so that buffers fill up
        own = asked | {"logprobs": True, "top_logprobs": 20}
        return Fault(kind, own, frozenset(["finished", "429"]), {"gap": 0.02})
    if kind == "prompt too long":
        own = asked | {"messages": [{"role": "user", "content": "word " * (2 * max_len)}]}
        return Fault(kind, own, frozenset(["400", "429"]))
    if kind == "body too large":
        own = asked | {"messages": [{"role": "user", "content": "x" * (BODY + 1)}]}
        return Fault(kind, own, frozenset(["413"]))
    return Fault(kind, asked, frozenset(["finished", "429"]))


def crowd(args: argparse.Namespace, max_len: int) -> list[Fault]:
    """Of twenty, two vanish mid-stream and one before, two read slowly, and two ask for what is too large."""
    rng, asked = random.Random(3), bodies(args)
    odd = ["vanishes", "vanishes", "vanishes early", "slow", "slow", "prompt too long", "body too large"]
    twenty = [*odd, *["honest"] * 13]
    kinds = [twenty[i % len(twenty)] for i in range(args.requests)]
    rng.shuffle(kinds)
    return [fault(kind, next(asked), rng, max_len) for kind in kinds]


async def misbehave(client: Client, people: Sequence[Fault], at_once: int, tick: Callable[[int], None]) -> list[Answer]:
    left, out = iter(list(enumerate(people))), {}

    async def one() -> None:
        for i, person in left:
            out[i] = await client.ask(person.body, **person.how)
            tick(1)

    await asyncio.gather(*[one() for _ in range(at_once)])
    return [out[i] for i in range(len(people))]


def faults(args: argparse.Namespace, found: Host) -> dict[str, Any]:
    max_len = httpx.get(f"{found.url}/v1/models", trust_env=False).json()["data"][0]["max_model_len"]
    people, before = crowd(args, max_len), counters(found.url)
    rush = [
        fault("in a rush", own, random.Random(0), max_len) for own in itertools.islice(bodies(args), 3 * (RUNS + WAITS))
    ]

    async def go() -> list[Answer]:
        async with Client(found.url) as client:
            with bar("Clients that misbehave", len(people) + len(rush), "requests") as tick:
                first = await misbehave(client, people, RUNS + WAITS // 2, tick)
                return first + await misbehave(client, rush, len(rush), tick)

    answers, everybody = asyncio.run(go()), [*people, *rush]
    wrong = settled(lambda: [*leaks(found), *disagreements(answers, before, counters(found.url))])
    wrong += unfair(everybody, answers)
    if not any(a.outcome == "429" for a in answers[len(people) :]):
        wrong.append(f"{len(rush)} came at once and nobody was turned away")
    seen: dict[str, Counter[str]] = {}
    for person, answer in zip(everybody, answers, strict=True):
        seen.setdefault(person.kind, Counter())[answer.outcome] += 1
    out: dict[str, Any] = {"requests": len(answers), "seen": seen, "inside": found.llm is not None}
    if found.process is not None:
        out["stop"], more = stop_under_load(args, found, found.process)
        wrong += more
    return out | {"wrong": wrong}


def unfair(people: Sequence[Fault], answers: Sequence[Answer]) -> list[str]:
    """Who got what they should not have got, in words."""
    pairs = zip(people, answers, strict=True)
    found = Counter(f"{p.kind}: {a.why}" for p, a in pairs if a.outcome not in p.fair)
    return [f"{count} x {what}" for what, count in found.most_common(8)]


def stop_under_load(
    args: argparse.Namespace, found: Host, process: subprocess.Popen[bytes]
) -> tuple[dict[str, Any], list[str]]:
    """SIGTERM while some run and some wait: these are served to the end, newcomers are not."""
    asked = itertools.islice(bodies(args), RUNS + WAITS // 2)

    async def go() -> tuple[list[Answer], int, float, Answer]:
        async with Client(found.url) as client:
            tasks = [asyncio.create_task(client.ask(own)) for own in asked]
            while counters(found.url)["num_requests_running"] < RUNS and not any(t.done() for t in tasks):
                await asyncio.sleep(0.02)
            process.terminate()
            began, here = time.monotonic(), sum(not t.done() for t in tasks)
            await asyncio.sleep(0.5)
            late = await client.ask(body("Hello", 0, 1))
            return list(await asyncio.gather(*tasks)), here, began, late

    with status("SIGTERM under load"):
        answers, here, began, late = asyncio.run(go())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, args.drain - (time.monotonic() - began)))
    seconds, code = time.monotonic() - began, process.poll()
    cut = [a.why for a in answers if a.outcome != "finished"]
    wrong = [f"SIGTERM: {len(cut)} of {here} that ran or waited were not finished, such as {cut[0]}"] if cut else []
    if late.status not in (0, 503):
        wrong.append(f"SIGTERM: a newcomer was not sent away: {late.why}")
    if code != 0:
        wrong.append(f"SIGTERM: exit status {code} after {seconds:.1f} s")
    if "Traceback" in found.said():
        wrong.append(f"The server's log has a traceback: {found.said()[-400:]}")
    return {"here": here, "seconds": seconds, "status": code, "newcomer": late.why}, wrong


# ------------------------------------------------------------------ showing
def tables(kept: dict[str, Any]) -> Iterator[tuple[str, report.Rows]]:
    if "load" in kept:
        yield from _load_tables(kept["load"])
    if "compare" in kept:
        rows = [["drafter", "at once", "server tokens/s", "offline tokens/s", "ratio", "errors", "same text", "load"]]
        for drafter, own in kept["compare"].items():
            for at_once, c in own.items():
                cells = [f"{c['server']:.1f}", f"{c['offline']:.1f}", f"{c['ratio']:.3f}", str(c["errors"])]
                rows.append([drafter, at_once, *cells, f"{c['same text']:.0%}", f"{max(c['load']):.1f}"])
        yield "The server against the engine alone", rows
    if "overhead" in kept:
        rows = [["at once", "tokens", "p50 ms", "p90 ms", "p99 ms", "most ms", "load"]]
        for at_once, o in kept["overhead"].items():
            rows.append([at_once, str(o["tokens"]), *_cells(o["ms"], 3), f"{o['most']:.3f}", f"{o['load']:.1f}"])
        yield "From the engine's hand-out of a token to the client", rows
    if "soak" in kept:
        s = kept["soak"]
        memory = s["resident MB"]
        rows = [["streams", "seconds", "requests", "errors", "tokens/s", "left behind", "resident MB"]]
        cells = [f"{s['seconds']:.0f}", str(s["requests"]), str(s["errors"]), f"{s['tokens/s']:.1f}"]
        rows.append(
            [str(s["streams"]), *cells, str(len(s["wrong"])), f"{memory[0]} to {memory[-1]}" if memory else "-"]
        )
        yield "Soak", rows
    if "faults" in kept:
        seen = kept["faults"]["seen"]
        names = sorted({outcome for own in seen.values() for outcome in own})
        rows = [[kind, *(str(own.get(name, 0)) for name in names)] for kind, own in seen.items()]
        yield "Clients, and what became of them", [["client", *names], *rows]


def _load_tables(found: dict[str, Any]) -> Iterator[tuple[str, report.Rows]]:
    times = ("first token ms", "between tokens ms", "whole answer ms")
    heads = [f"{name}, p50 / p90 / p99" for name in times]
    for way, title, first in (("closed", "Closed loop", "at once"), ("open", "Poisson arrivals", "requests/s")):
        if not found[way]:
            continue
        rows = [[first, "requests", "errors", "tokens/s", *heads]]
        for name, s in found[way].items():
            cells = [str(s["requests"]), str(s["errors"]), f"{s['tokens/s']:.1f}"]
            rows.append([name, *cells, *(" / ".join(_cells(s[t], 1)) for t in times)])
        yield title, rows


def _cells(values: dict[str, float], digits: int) -> list[str]:
    return [f"{values[name]:.{digits}f}" if values else "-" for name in ("p50", "p90", "p99")]


def bars(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What is promised, with what was found; and whether it holds."""
    out: list[tuple[str, bool]] = []
    for way, own in result.get("load", {}).items():
        errors = sum(s["errors"] for s in own.values())
        what = "; ".join(w for s in own.values() for w in s["what went wrong"])
        out.append((f"load, {way} loop: {errors} errors (bar 0). {what}", errors == 0))
    for drafter, own in result.get("compare", {}).items():
        for at_once, c in own.items():
            text = (
                f"compare: {c['ratio']:.3f} of the engine alone at {at_once} with drafter {drafter} (bar {LEAST_RATIO})"
            )
            out.append((f"{text}; {c['errors']} errors", c["ratio"] >= LEAST_RATIO and not c["errors"]))
    for at_once, o in result.get("overhead", {}).items():
        p99 = o["ms"].get("p99", float("inf"))
        text = f"overhead: p99 {p99:.2f} ms a token at {at_once} (bar {MOST_OVERHEAD:g})"
        out.append(("; ".join([text, *o["wrong"][:3]]), p99 < MOST_OVERHEAD and not o["wrong"]))
    if "soak" in result:
        s = result["soak"]
        text = f"soak: {s['streams']} streams for {s['seconds']:.0f} s: {s['errors']} errors, {len(s['wrong'])} left or off"
        out.append(("; ".join([text, *s["what went wrong"], *s["wrong"]]), not s["errors"] and not s["wrong"]))
    if "faults" in result:
        f = result["faults"]
        ended = f"; SIGTERM: exit {f['stop']['status']} after {f['stop']['seconds']:.1f} s" if "stop" in f else ""
        text = f"faults: {f['requests']} requests, {len(f['wrong'])} things wrong{ended}"
        out.append(("; ".join([text, *f["wrong"]]), not f["wrong"]))
    return out


# ------------------------------------------------------------------ the command
def run(part: str, args: argparse.Namespace) -> dict[str, Any]:
    if part == "compare":
        return compare(args)
    if part == "overhead":
        with loaded(args, max(args.at_once("overhead"))) as llm:
            return overhead(args, llm)
    if part == "faults":
        flags: dict[str, Any] = {"max_queue": WAITS, "max_body": BODY} | ({} if args.inside else {"drain": args.drain})
        with host(args, RUNS, **flags) as found:
            return faults(args, found)
    with host(args, args.streams if part == "soak" else max(args.at_once("load"))) as found:
        return (soak if part == "soak" else load)(args, found)


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",") if part]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; left out, all of them")
    parser.add_argument("--quick", action="store_true", help="everything small")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help='more flags of headstart serve: {"device": "cuda"}'
    )
    parser.add_argument("--url", help="a server on this machine that runs already, for load and soak")
    parser.add_argument("--inside", action="store_true", help="soak and faults: serve in this process and look inside")
    parser.add_argument("--client", choices=("bare", "httpx"), help="for load, soak and compare")
    parser.add_argument("--concurrency", type=numbers(int), help="streams at once: 1,8,32")
    parser.add_argument("--rates", type=numbers(float), help="load: requests a second, of Poisson arrivals")
    parser.add_argument("--rate-seconds", type=float, help="load: how long they come")
    parser.add_argument("--tokens", type=int, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--waves", type=int, help="requests for each stream at once")
    parser.add_argument("--least", type=int, help="requests of a point, where that is fewer")
    parser.add_argument("--rounds", type=int, help="compare: turns that count")
    parser.add_argument("--streams", type=int, help="soak: at once")
    parser.add_argument("--seconds", type=float, help="soak: how long")
    parser.add_argument("--requests", type=int, help="faults: clients, before the rush")
    parser.add_argument("--drain", type=float, help="faults: seconds in which the server has to leave")
    parser.add_argument("--gsm8k", help="GSM8K's test.jsonl, in place of the built-in prompts")
    parser.add_argument("--spec-bench", help="Spec-Bench's question.jsonl")
    parser.add_argument("--out", help="keep the result here, as JSON")
    parser.add_argument("--show", help="print a kept result and end")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return complete(parser.parse_args(given))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Sizes that nobody gave; what cannot be is said before anything is loaded."""
    for name, sizes in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, sizes[args.quick])
    args.at_once = lambda part: args.concurrency or AT_ONCE[part][args.quick]
    args.parts = args.parts or list(PARTS)
    report.refuse_unknown(",".join(args.parts), PARTS)
    if args.url and not set(args.parts) <= {"load", "soak"}:
        sys.exit("--url is for load and soak: the other parts need a server of their own.")
    if args.url and not _is_here(args.url):
        sys.exit(f"{args.url} is not on this machine: name a server as http://127.0.0.1:PORT.")
    return args


def _is_here(url: str) -> bool:
    name = urlsplit(url).hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    names = ("drafter", "engine", "tokens", "temperature", "waves", "rounds", "quick", "client")
    own = {name: getattr(args, name) for name in names}
    return {"model": Path(args.model).name, **report.where(), "date": time.strftime("%Y-%m-%d"), **own}


def main() -> None:
    args = arguments()
    if args.worker:
        return work(args.worker)
    if args.show:
        return report.print_kept(args.show, tables)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does: whatever we started is ended
    missed = False
    for part in args.parts:
        note(f"{part}:")
        result = {"provenance": provenance(args), part: run(part, args)}
        report.show(console, tables(result))
        for text, ok in bars(result):
            console.print(("[green]met[/]     " if ok else "[red]not met[/] "), text, markup=True, highlight=False)
            missed = missed or not ok
        if args.out:
            report.keep(args.out, result)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
