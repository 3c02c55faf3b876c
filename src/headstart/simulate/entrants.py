"""Policies by their names."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.config import SpeculativeConfig
from headstart.core import Request
from headstart.drafters import WEIGHTLESS
from headstart.errors import BadInput
from headstart.policy import Policy
from headstart.policy.adaptive import AdaptivePolicy
from headstart.policy.ahead import AheadPolicy
from headstart.policy.costs import ROWS, Costs
from headstart.policy.fixed import FixedPolicy
from headstart.policy.goodput import GoodputPolicy
from headstart.policy.periods import COMPANIES, Mode
from headstart.simulate.answers import DEEPEST, WIDER
from headstart.simulate.machines import Machine
from headstart.traffic import KINDS, Trace

DECIDING = ("auto", "adaptive", "ahead")  # what they hear
WIDEST = 64  # nodes of a tree
SIZE = re.compile(r"(?:(\d+)x)?(\d+)")  # of a draft: tokens, or nodes and tokens


@dataclass(frozen=True)
class Entrant:
    """A policy by its name: none; auto, which is adaptive or ahead, as the machine has it; any of these three with the drafters
    that it has, auto:NAME+NAME; fixed:NAME:TOKENS, fixed:NAME:NODESxTOKENS (trees), or goodput:NAME:TOKENS."""

    name: str
    drafters: tuple[str, ...] | None  # None: all that the trace tells of
    tokens: int = DEEPEST
    kind: str = "fixed"
    nodes: int | None = None  # of a tree

    @staticmethod
    def parse(name: str) -> Entrant:
        kind, *more = name.split(":")
        if name == "none":
            return Entrant(name, ())
        if kind in DECIDING and len(more) < 2:
            return Entrant(name, tuple(more[0].split("+")) if more else None, kind=kind)
        size = SIZE.fullmatch(more[1]) if len(more) == 2 and more[0] else None
        if (
            size is not None
            and 1 <= int(size[2]) <= DEEPEST
            and (kind == "fixed" or (kind == "goodput" and not size[1]))
        ):
            nodes = int(size[1]) if size[1] else None
            if nodes is None or int(size[2]) <= nodes <= WIDEST:
                return Entrant(name, (more[0],), int(size[2]), kind, nodes)
        raise BadInput(
            f"--policy {name} is not usable: expected none, auto, adaptive, ahead, auto:NAME+NAME, fixed:NAME:TOKENS, "
            f"fixed:NAME:NODESxTOKENS or goodput:NAME:TOKENS with at most {DEEPEST} tokens, and {WIDEST} nodes."
        )

    def check(self, traces: Sequence[Trace]) -> None:
        """A drafter that no trace tells of is a slip of the pen, not a drafter that never has anything to say."""
        known = {name for trace in traces for name in drafters_of(trace)}
        for name in self.drafters or ():
            if name not in known:
                raise BadInput(f"--policy {self.name}: the traces tell of {', '.join(sorted(known))}, not of {name}.")

    def make(self, choices: Callable[[Request], Sequence[str]], machine: Machine, noise: Noise) -> Policy:
        method = self.drafters[0] if self.drafters else "none"
        config = SpeculativeConfig(method, num_speculative_tokens=self.tokens, num_draft_nodes=self.nodes)
        if self.kind == "fixed":
            return FixedPolicy(config, choices)
        if self.kind == "ahead" or (self.kind == "auto" and machine.ahead):
            return rehearsed(AheadPolicy(config, choices), machine, noise)
        policy = GoodputPolicy(config, choices) if self.kind == "goodput" else AdaptivePolicy(config, choices)
        policy.costs = Costs({n: _median(noise, machine.costs.of(n)) for n in ROWS}, machine.costs.reach)
        return policy


class Noise:
    """Seconds as a clock shows them: now and then more, now and then less."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._rng = share, random.Random(seed)

    def __call__(self, seconds: float) -> float:
        return seconds * self._rng.lognormvariate(0.0, self._share) if self._share else seconds


def rehearsed(policy: AheadPolicy, machine: Machine, noise: Noise) -> AheadPolicy:
    """As steps are timed at load, with requests that are made up."""
    for mode in (None, *policy.modes(sorted({*WEIGHTLESS, *machine.work}))):
        for company in COMPANIES:
            policy.periods.put(mode, company, _median(noise, machine.step(mode, company)))
    for mode in policy.modes([name for name in machine.work if name not in WEIGHTLESS]):
        policy.outcomes.expect(mode, _tried_out(mode))
    return policy


def _tried_out(mode: Mode) -> list[int]:
    """How many of some drafts bring 0, 1, ... tokens on the texts that one tries out: those of `traffic.KINDS`, but noise."""
    ranges = [own[""][1:] for kind, own in KINDS.items() if kind != "noise"]
    chances = np.concatenate([np.linspace(low, high, 100) for low, high in ranges])
    if mode.branches:
        chances = 1 - (1 - chances) ** WIDER
    reached = [*(float(np.mean(chances**k)) for k in range(mode.depth + 1)), 0.0]
    return [round(1000 * (some - more)) for some, more in itertools.pairwise(reached)]


def _median(noise: Noise, seconds: float) -> float:
    """As costs are measured at load."""
    return statistics.median(noise(seconds) for _ in range(3))


def drafters_of(trace: Trace) -> tuple[str, ...]:
    """All drafters that a trace tells of, those without weights first."""
    free = [n for n in WEIGHTLESS if n in trace.drafters or any(r.is_recorded for r in trace.requests)]
    return (*free, *(n for n in trace.drafters if n not in WEIGHTLESS))
