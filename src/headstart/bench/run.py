"""The laps: every method over the same prompts, in turns, so that what changes on the machine meanwhile meets all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headstart.bench import meters
from headstart.bench.methods import Method
from headstart.bench.records import BASELINE, Counts, Difference, Lap, Point, Result, Sample
from headstart.bench.summary import parting
from headstart.bench.workloads import Prompt, Workload
from headstart.errors import HeadstartError

WARM_TOKENS, WARM_PROMPTS = 16, 4  # of answers that nobody counts
clock, complete = time.perf_counter, asyncio.run  # an engine that only pretends has a time of its own


@dataclass(frozen=True)
class Ask:
    """How a prompt is to be answered. The seed is the prompt's own, for all methods and rounds."""

    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = False


@dataclass
class Answer:
    text: str
    prompt_tokens: int
    tokens: int
    seconds: float
    first_seconds: float
    first_tokens: int = 1
    token_ids: list[int] | None = None
    counts: Counts = field(default_factory=Counts)


class Session(Protocol):
    """One method of an engine, ready to answer."""

    @property
    def about(self) -> Mapping[str, Any]: ...
    async def answer(self, prompt: Prompt, ask: Ask) -> Answer: ...
    def forget(self) -> None:
        """What earlier laps have left: the same prompts come again, and nobody may remember the answers."""

    def counts(self) -> Counts | None:
        """All so far, of an engine that tells sums, and not of each request."""


class Engine(Protocol):
    name: str

    def open(self, methods: Sequence[Method], plan: Plan) -> AbstractContextManager[Mapping[str, Session]]: ...
    def margin(self, prompt: Prompt, before: Sequence[int], a: int, b: int) -> tuple[float, bool] | None:
        """How far apart the target sees two tokens behind these, in log p, and whether rounding explains that."""

    def roofline(self, result: Result) -> dict[str, Any] | None:
        """What the device allows, where this process computes on it: see `roofline`."""


@dataclass(frozen=True)
class Plan:
    workload: Workload
    points: tuple[Point, ...]
    rounds: int = 3
    max_tokens: int = 256
    seed: int = 0
    ignore_eos: bool = False

    @property
    def most_at_once(self) -> int:
        return max(point.concurrency for point in self.points)

    def laps(self, methods: Sequence[str]) -> Iterator[tuple[str, Point, int]]:
        """Plain decoding first, then the others, in turned order every second round."""
        others = [name for name in methods if name != BASELINE]
        for number in range(self.rounds):
            for point in self.points:
                for name in [BASELINE, *(others[::-1] if number % 2 else others)]:
                    yield name, point, number

    def ask(self, index: int, temperature: float) -> Ask:
        return Ask(self.max_tokens, temperature, self.seed + index, self.ignore_eos)


def run(
    engine: Engine,
    methods: Sequence[Method],
    plan: Plan,
    result: Result,
    keep: Callable[[Result], None],
    advance: Callable[[str], None] = lambda what: None,
) -> None:
    """Whatever the result has not yet; `keep` is called behind each lap, so that a run that is stopped can go on."""
    done = {(lap.method, lap.point, lap.round) for lap in result.laps}
    todo = [lap for lap in plan.laps([m.name for m in methods]) if lap not in done]
    if not todo:
        return
    with engine.open(methods, plan) as sessions:
        for name, session in sessions.items():
            advance(f"warming up {name}")
            warm_up(session, plan)
            session.forget()
            result.methods[name] = dict(session.about)
        for name, point, number in todo:
            advance(f"{name}, {point}, round {number + 1} of {plan.rounds}")
            run_lap(sessions[name], plan, Lap(name, point.concurrency, point.temperature, number, 0.0, 0), result)
            keep(result)
        result.differences = differences(result, engine, plan)
        result.roofline = engine.roofline(result)
        keep(result)


def warm_up(session: Session, plan: Plan) -> None:
    """What happens once happens now. Different temperatures and numbers may be different code."""
    prompts = plan.workload.prompts[:WARM_PROMPTS]
    for point in plan.points:
        few = [(prompts[i % len(prompts)], i) for i in range(min(point.concurrency, WARM_PROMPTS))]
        asks = [(p, Ask(WARM_TOKENS, point.temperature, plan.seed + i, True)) for p, i in few]
        answers = complete(_answers(session, asks, point.concurrency))
        if failed := [answer for answer in answers if isinstance(answer, HeadstartError)]:
            raise failed[0]  # before hours are spent on more of them


def run_lap(session: Session, plan: Plan, lap: Lap, result: Result) -> None:
    session.forget()
    gpus = session.about.get("gpus")
    before, energy, began = session.counts(), meters.joules(gpus), clock()
    lap.load = meters.load()
    asks = [(prompt, plan.ask(i, lap.temperature)) for i, prompt in enumerate(plan.workload.prompts)]
    answers = complete(_answers(session, asks, lap.concurrency))
    lap.seconds = clock() - began
    lap.counts, lap.joules, lap.memory = (
        since(before, session.counts()),
        meters.since(energy, gpus),
        session.about.get("memory"),
    )
    samples = [_sample(lap, prompt, answer) for (prompt, _), answer in zip(asks, answers, strict=True)]
    lap.tokens = sum(s.tokens for s in samples)
    if lap.counts is not None and lap.counts.steps is None and lap.counts.accepted is not None:
        lap.counts = replace(lap.counts, steps=lap.tokens - lap.counts.accepted)  # each brings one that was not drafted
    result.samples += samples
    result.laps.append(lap)


async def _answers(session: Session, asks: Sequence[tuple[Prompt, Ask]], at_once: int) -> list[Answer | HeadstartError]:
    """So many at a time; where one ends, the next begins."""
    waiting = iter(range(len(asks)))
    out: dict[int, Answer | HeadstartError] = {}

    async def work() -> None:
        for i in waiting:
            try:
                out[i] = await session.answer(*asks[i])
            except HeadstartError as error:
                out[i] = error

    await asyncio.gather(*(work() for _ in range(at_once)))
    return [out[i] for i in range(len(asks))]


def _sample(lap: Lap, prompt: Prompt, answer: Answer | HeadstartError) -> Sample:
    where = (lap.method, lap.concurrency, lap.temperature, lap.round, prompt.id, prompt.category)
    if isinstance(answer, HeadstartError):
        return Sample(*where, 0, 0, 0.0, 0.0, 0, error=str(answer))
    return Sample(*where, **vars(answer))


def since(before: Counts | None, after: Counts | None) -> Counts | None:
    """What was counted in between."""
    if before is None or after is None:
        return None

    def less(name: str) -> Any:
        a, b = getattr(before, name), getattr(after, name)
        return None if a is None or b is None else b - a

    positions: list[int] | None = None
    if after.by_position is not None:
        own = before.by_position or []
        positions = [n - (own[i] if i < len(own) else 0) for i, n in enumerate(after.by_position)]
    names = ("steps", "drafts", "drafted", "accepted", "draft_seconds", "target_seconds")
    return Counts(by_position=positions, **{name: less(name) for name in names})


# ------------------------------------------------------------------ the same output
def differences(result: Result, engine: Engine, plan: Plan) -> list[Difference]:
    """Where answers part from plain decoding's, in the first round that has both: once for each prompt."""
    prompts = {prompt.id: prompt for prompt in plan.workload.prompts}
    plain = {(s.key, s.round): s for s in result.samples if s.method == BASELINE and s.error is None}
    found: dict[tuple[str, Point, str], Difference] = {}
    for s in result.samples:
        where, base = (s.method, s.point, s.prompt), plain.get((s.key, s.round))
        if s.method == BASELINE or s.error is not None or base is None or where in found:
            continue
        at = parting(base, s)
        if at is not None:
            told = _margin(engine, prompts[s.prompt], base, s, at) if s.prompt in prompts else None
            margin, near = told if told is not None else (None, None)
            found[where] = Difference(s.method, s.concurrency, s.temperature, s.prompt, at, margin, near)
    return list(found.values())


def _margin(engine: Engine, prompt: Prompt, a: Sample, b: Sample, at: int) -> tuple[float, bool] | None:
    """Drawn tokens have noise in them, so only greedy ones can be told apart so."""
    one, two = a.token_ids, b.token_ids
    if a.temperature > 0 or one is None or two is None or at >= min(len(one), len(two)):
        return None
    return engine.margin(prompt, one[:at], one[at], two[at])
