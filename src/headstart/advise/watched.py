"""What `tune` predicts from: what drafts would have brought behind every token of the user's texts, and what steps take here.

Drafts are seen in runs that verify none of them (`policy="watch"`), so that one run tells of every length of draft. What steps
take is what the policy measures at load, on a CPU by rows (`Costs`), on a GPU by whole steps (`Periods`), and what surrounds
them is seen in plain steps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.config import SpeculativeConfig, parse_speculative
from headstart.core import RequestView, SamplingParams, View
from headstart.drafters import Surroundings, build
from headstart.policy import Errand, StepTimes
from headstart.policy.costs import Costs, Work
from headstart.policy.periods import Mode, Periods
from headstart.scheduler import Plan
from headstart.simulate.machines import Machine
from headstart.traffic import Arrival, Trace, read_trace

if TYPE_CHECKING:
    from headstart.llm import LLM
    from headstart.models.load import Loaded

SIZES, TOKENS = (1, 2, 4, 8), 6  # drafts of these sizes are timed, for so many tokens each
CROWD = 16  # requests whose plain steps are looked at, at most
NOBODY = Mode("none", 0, 0)
ASKED = 200  # places of a text at which drafters without weights are timed
Texts = Sequence[Sequence[int]]  # prompts, as token ids


@contextmanager
def steps_of(llm: LLM) -> Iterator[list[StepTimes]]:
    """The times of all steps from here on."""
    found: list[StepTimes] = []
    llm.engine.watch = lambda times, trees, verdicts: found.append(times)
    try:
        yield found
    finally:
        llm.engine.watch = None


# ------------------------------------------------------------------ drafts
@dataclass(frozen=True)
class Watched:
    """One drafter behind every token of these texts."""

    trace: Trace
    work: Work  # of its drafts
    reading: float  # seconds in which it reads a token of a prompt


def watch(loaded: Loaded, spec: Mapping[str, Any], texts: Texts, tokens: int, at_once: int, **more: Any) -> Watched:
    """Answer these prompts, and note what this drafter would have said. `more` is for the LLM."""
    from headstart.llm import LLM

    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "trace.jsonl")
        options: dict[str, Any] = {"max_num_seqs": at_once, "record": file, "share_prefixes": False} | more
        with LLM(loaded, speculative=dict(spec) | {"policy": "watch"}, **options) as llm:
            _time_sizes(llm, texts[0])  # what is prepared on first use is prepared now
            with steps_of(llm) as sizes:
                _time_sizes(llm, texts[0])
            with steps_of(llm) as steps:
                llm.generate(list(texts), params)
        work = _work([*sizes, *steps])
        reading = _reading(steps, work, sum(map(len, texts)))
        depth = parse_speculative(dict(spec))[0].num_speculative_tokens
        return Watched(_last(read_trace(file), len(texts), depth), work, reading)


def _time_sizes(llm: LLM, text: Sequence[int]) -> None:
    few = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for size in SIZES:
        llm.generate([text], few, speculative={"max_tokens": size})


def _last(trace: Trace, count: int, depth: int) -> Trace:
    """The last requests, as if all had come at once."""
    return replace(trace, requests=tuple(_ended(replace(r, arrival=0.0), depth) for r in trace.requests[-count:]))


def _ended(request: Arrival, depth: int) -> Arrival:
    """A path of a tree that ends before this depth goes no further, however right it was."""
    seen = {
        name: tuple(replace(s, right=(*s.right, False)) if len(s.right) < depth and all(s.right) else s for s in own)
        for name, own in request.seen.items()
    }
    return replace(request, seen=seen)


def _work(steps: Sequence[StepTimes]) -> Work:
    """Least squares over all errands but those behind prompts, which read them first."""
    rows = [(e.levels, e.rows, e.seconds) for s in steps for e in s.errands if e.levels and not s.num_prefill_tokens]
    if not rows:
        return Work()
    table = np.array(rows)
    seconds = table[:, 2]
    usual = seconds < 3 * np.median(seconds / table[:, 0]) * table[:, 0]
    if not usual.any():
        return Work()
    (level, row), *_ = np.linalg.lstsq(table[usual, :2], seconds[usual], rcond=None)
    if level < 0 or row < 0:  # all were alike: one of the two tells everything
        sums = table[usual].sum(0)
        level, row = (0.0, sums[2] / sums[1]) if level < 0 else (sums[2] / sums[0], 0.0)
    return Work(float(level), float(row))


def _reading(steps: Sequence[StepTimes], work: Work, tokens: int) -> float:
    """What drafters took beyond their drafts, for each token of the prompts."""
    more = sum(e.seconds - work.of(e.levels, e.rows) for s in steps for e in s.errands)
    return max(0.0, more) / max(1, tokens)


def weightless(trace: Trace, name: str, tokens: int) -> Work:
    """Seconds of a draft that needs no weights, where these texts are."""
    ids = [t for r in trace.requests for t in (*r.prompt_ids, *r.output_ids)]
    drafter = build(SpeculativeConfig(name, num_speculative_tokens=tokens), Surroundings(1 + max(ids)))
    assert drafter is not None
    spent, asked = 0.0, 0
    for number, request in enumerate(trace.requests):
        text, params = [*request.prompt_ids], SamplingParams(temperature=0.0)
        view = RequestView(str(number), text, len(text), tokens, tokens, params, 0)
        for token in request.output_ids:
            began = time.perf_counter()
            drafter.propose(View([view]))
            spent, asked = spent + time.perf_counter() - began, asked + 1
            text.append(token)
        drafter.release(view)
        if asked >= ASKED:
            break
    return Work(0.0, spent / max(1, asked))


# ------------------------------------------------------------------ what steps take
@dataclass(frozen=True)
class Device:
    """What was measured of the target's own steps."""

    machine: Machine  # by rows; not known where whole steps are timed
    periods: Periods | None = None
    modes: tuple[Mode, ...] = ()  # of which whole steps were timed
    prompt: float = 0.0  # how much longer a step takes for each token of a prompt

    def with_drafter(self, mode: Mode, work: Work, reading: float) -> Machine:
        """Where this is drafted, and nothing else."""
        if self.periods is None:
            return replace(self.machine, work={mode.drafter: work}, reading={mode.drafter: Work(0.0, reading)})
        return Rehearsed(
            "here", self.machine.costs, {}, periods=self.periods, modes=self.modes, mode=mode, prompt=self.prompt
        )

    def knows(self, mode: Mode) -> bool:
        """Whether it is known what steps with such drafts take."""
        return self.periods is None or bool(_alike(self.modes, mode))


@dataclass(frozen=True)
class Rehearsed(Machine):
    """A device whose whole steps were timed in some modes; drafts are made in one way."""

    periods: Periods = field(default_factory=Periods)
    modes: tuple[Mode, ...] = ()
    mode: Mode = NOBODY
    prompt: float = 0.0

    def forward(self, plan: Plan, rows: int, reach: float) -> float:
        company, prefill = max(1, len(plan.ready)), plan.num_prefill_tokens
        return self.periods.of(None, company) + self.prompt * prefill

    def errand(self, errand: Errand, company: int) -> float:
        """Between modes that were timed, a line."""
        own = _alike(self.modes, self.mode)
        extras = [self.periods.extra(m, errand.requests, company) for m in own]
        return max(0.0, _between([m.nodes for m in own], extras, self.mode.nodes))


def _alike(modes: Iterable[Mode], mode: Mode) -> list[Mode]:
    """Chains of the same drafter, or trees, small ones first."""
    return sorted(m for m in modes if m.drafter == mode.drafter and m.branches == mode.branches)


def _between(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """On the line through the points, and on as the last two go."""
    if len(x) < 2 or x[0] <= at <= x[-1]:
        return float(np.interp(at, x, y))
    a, b = (0, 1) if at < x[0] else (-2, -1)
    return y[a] + (y[b] - y[a]) * (at - x[a]) / (x[b] - x[a])


def measure(loaded: Loaded, spec: Mapping[str, Any], texts: Texts, tokens: int, batches: Sequence[int]) -> Device:
    """What the policy finds out at load, and what plain steps of these texts take beyond that."""
    from headstart.llm import LLM
    from headstart.policy.ahead import AheadPolicy

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    options: dict[str, Any] = {"max_num_seqs": max(batches), "share_prefixes": False}
    with LLM(loaded, speculative=dict(spec), **options) as llm:
        some, off = [texts[i % len(texts)] for i in range(min(CROWD, max(batches)))], {"enabled": False}
        llm.generate(some, replace(params, max_tokens=TOKENS), speculative=off)  # what happens once happens now
        with steps_of(llm) as steps:
            llm.generate(some, params, speculative=off)
        policy = llm.engine.policy
        if isinstance(policy, AheadPolicy):
            modes = policy.modes(list(llm.engine.drafting.drafters))
            known = tuple(m for m in modes if policy.periods.knows(m))
            return Device(Machine("here", Costs(), {}), policy.periods, known, _prompts(steps, policy.periods))
        around = [s.period - s.target - s.draft for s in steps if not s.num_prefill_tokens]
        return Device(Machine("here", policy.costs, {}, float(np.median(around or [0.0]))))


def _prompts(steps: Sequence[StepTimes], periods: Periods) -> float:
    """How much longer steps with prompts took, for each token of these."""
    own = [s for s in steps if s.num_prefill_tokens]
    more = sum(s.period - periods.of(None, max(1, s.produced)) for s in own)
    return max(0.0, more) / max(1, sum(s.num_prefill_tokens for s in own))
