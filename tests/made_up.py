"""A device that is made up, for policies that decide before drafts are known: it is given how long steps take, and how often
tokens are right."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from headstart.config import parse_speculative
from headstart.core import Request, SamplingParams, Verdict
from headstart.policy import Load, StepTimes
from headstart.policy.ahead import AheadPolicy
from headstart.policy.periods import Mode

NGRAM, CHAIN, TREE = Mode("ngram", 3, 3), Mode("eagle3", 2, 2), Mode("eagle3", 15, 5)
MODES = [NGRAM, Mode("ngram", 6, 6), CHAIN, Mode("eagle3", 4, 4), TREE]
PROMPT = 2e-4  # seconds that a prompt takes in its own step; behind it, more
CHANCES = {  # that the next token of a draft is right, by kind of text
    "code": {"eagle3": 0.8, "ngram": 0.3},
    "poor": {"eagle3": 0.35, "ngram": 0.05},
    "hard": {"eagle3": 0.02, "ngram": 0.0},
    "copies": {"eagle3": 0.02, "ngram": 0.9},
    "noise": {"eagle3": 0.02, "ngram": 0.0},  # as hard, at a high temperature
}


def seconds(mode: Mode | None, count: int, company: int) -> float:
    """Of a step of this company, of whom so many draft."""
    plain = 1.2e-3 + 12e-6 * company
    if mode is None:
        return plain
    own = 30e-6 if mode.drafter == "ngram" else (1.3 if mode.nodes > mode.depth else 1.0) * (20e-6 + 75e-6 * mode.depth)
    return plain + own + 5e-6 * mode.nodes * count


def policy() -> AheadPolicy:
    out = AheadPolicy(parse_speculative({"method": "auto"})[0], lambda r: ())
    for company in (1, 4, 16, 64):
        for mode in (None, *MODES):
            if company * (1 + (mode.nodes if mode else 0)) <= 1024:
                out.periods.put(mode, company, seconds(mode, company, company))
    return out


def request(kind: str, seed: int, tokens: int = 1 << 20) -> Request:
    heat = 1.5 if kind == "noise" else 0.0
    return Request([1] * 8, SamplingParams(temperature=heat, max_tokens=tokens), seed, id=f"{kind} {seed}")


@dataclass
class Device:
    """Steps of made-up requests."""

    policy: AheadPolicy | None = None
    way: Mode | None = None  # without a policy, all draft like this
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    came: int = 0  # requests so far
    clock: float = 0.0
    vain: float = 0.0  # seconds that drafts took which brought nothing
    late: float = 0.0  # seconds that the step behind prompts takes longer; not counted, since all have the same prompts
    used: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[bool]] = field(default_factory=dict)  # by kind of text: whether it had one, step by step
    unread: set[str] = field(default_factory=set)  # requests whose prompt no head has read
    resting: set[str] = field(default_factory=set)  # those that it has left alone, and would have to join again
    pieces: int = 1 << 20  # of a decision, for which there is time in a step

    def __post_init__(self) -> None:
        if self.policy is not None:
            self.policy.choices = self.policy.fixed.choices = self._choices

    def _choices(self, request: Request) -> tuple[str, ...]:
        return ("ngram",) if request.id in self.unread else ("ngram", "eagle3")

    def run(self, kinds: list[str], load: int, count: int, tokens: int = 64) -> float:
        """Tokens per second over so many requests, of these kinds in turn, as long as some of them wait."""
        waiting = [request(kinds[i % len(kinds)], self.came + i, tokens) for i in range(count)]
        self.came += count
        running: list[Request] = []
        began, made = self.clock, 0
        while waiting:
            prompts = 0
            while waiting and len(running) < load:
                running.append(waiting.pop(0))
                prompts += 1
                company = min(load, len(running) + len(waiting))
                if self.policy and not self.policy.enlist(running[-1], Load(company, len(waiting), 0)):
                    self.unread.add(running[-1].id)
            made += self.step(running, prompts)
            for r in [r for r in running if r.num_output >= tokens]:
                running.remove(r)
                if self.policy:
                    self.policy.release(r)
        for r in running if self.policy else ():
            self.policy.release(r)
        return made / (self.clock - began)

    def step(self, running: list[Request], prompts: int = 0) -> int:
        """Tokens that came."""
        company = len(running)
        wishes = self._wishes(running)
        modes = [
            Mode(n, w.nodes, w.depth) if own else None for own in wishes for n, w in (*own.items(), ("", None))[:1]
        ]
        modes = modes if self.policy is not None else [self.way] * company
        took = seconds(None, 0, company)
        for mode in {m for m in modes if m}:
            took += seconds(mode, modes.count(mode), company) - seconds(None, 0, company)
        took *= 1 + self.rng.gauss(0, 0.03)
        period, self.late = took + self.late + PROMPT * prompts, 3 * PROMPT * prompts
        got = [self._accepted(r, m) for r, m in zip(running, modes, strict=True)]
        for r, n, m in zip(running, got, modes, strict=True):
            r.tokens += [1] * (n + 1)
            self.used[str(m)] = self.used.get(str(m), 0) + 1
            self.drafts.setdefault(r.id.split()[0], []).append(m is not None)
        self.clock += took
        self.vain += 0.0 if any(got) else took - seconds(None, 0, company)
        if self.policy is not None:
            sizes, made = [m.nodes if m else 0 for m in modes], company + sum(got)
            times = StepTimes(0, 0, 0, 0, 0, 8 * prompts, period, produced=made, asked=wishes, drafted=sizes)
            self.policy.learn(times, list(running), [Verdict(list(range(n)), 0) for n in got])
            self._catch_up()
        return company + sum(got)

    def _wishes(self, running: list[Request]) -> list[Any]:
        """What is asked for; a head needs a step to join."""
        if self.policy is None:
            return [{} for _ in running]
        company = len(running)
        wishes = self.policy.ask(running, [{} for _ in running], Load(company, 0, 0, 100.0, 1024 // company - 1))
        self.resting |= {r.id for r, w in zip(running, wishes, strict=True) if not w and self.policy.rests(r)}
        joining = {r.id for r, w in zip(running, wishes, strict=True) if "eagle3" in w} & self.resting
        self.resting -= joining
        if joining:
            return [{} if r.id in joining else w for r, w in zip(running, wishes, strict=True)]
        return wishes

    def _catch_up(self) -> None:
        left = self.pieces

        def busy() -> bool:
            nonlocal left
            left -= 1
            return left > 0

        assert self.policy is not None
        self.policy.catch_up(busy)

    def _accepted(self, request: Request, mode: Mode | None) -> int:
        if mode is None:
            return 0
        chance = CHANCES[request.id.split()[0]][mode.drafter]
        chance = 1 - (1 - chance) ** 1.45 if mode.nodes > mode.depth else chance
        n = 0
        while n < mode.depth and self.rng.random() < chance:
            n += 1
        return n
