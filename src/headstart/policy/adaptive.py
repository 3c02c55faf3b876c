"""As much as pays: what a node is likely to bring, against what its row costs on this machine.

Drafters that need no weights are asked all the time, since asking them is nearly free, and of what they propose the nodes are
verified that make the step's expected tokens per second highest. None is a common answer. Where asking costs something (a model
has to run, or the device has to wait for the host), a request whose drafts do not pay is asked again after a while, so that
asking takes at most a small share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.config import SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.drafters import WEIGHTLESS
from headstart.policy import Load, StepTimes
from headstart.policy.beliefs import Beliefs
from headstart.policy.costs import Costs
from headstart.policy.fixed import FixedPolicy

PROBES = 0.01  # share of the time that asking in vain may take
PROBE_DEPTH = 2  # tokens that a model drafts when it is only asked how good it has become
GOOD = 0.97  # of the best expected tokens per second is good enough
QUIET = 2  # steps without a draft that paid, after which a request is asked less often


@dataclass
class Mean:
    """A mean that forgets."""

    value: float = 0.0
    seen: int = 0

    def add(self, value: float) -> None:
        self.seen += 1
        self.value += (value - self.value) / min(self.seen, 20)


@dataclass
class Pace:
    """When a request was last asked for a draft, and when one last paid; in steps of its own."""

    asked: int = 0
    quiet: int = 0


class AdaptivePolicy:
    cuts = True

    def __init__(self, config: SpeculativeConfig, drafter_of: Callable[[Request], str | None]) -> None:
        self.fixed, self.drafter_of = FixedPolicy(config), drafter_of
        self.costs, self.beliefs = Costs(), Beliefs()
        self._around = {False: Mean(), True: Mean()}  # seconds of a step outside its forward, without and with asking
        self._per_token = Mean()  # seconds that a drafter with weights takes for one token of depth
        self._paces: dict[str, Pace] = {}
        self._asked = False  # somebody was, in this step
        self._modelled = 0  # tokens that a drafter with weights drafted for one request

    # ------------------------------------------------------------------ before drafts
    def budget(self, requests: Sequence[Request], load: Load) -> list[int]:
        most = self.fixed.budget(requests, load)
        return [self._ask(r, n, len(requests)) if n else 0 for r, n in zip(requests, most, strict=True)]

    def _ask(self, request: Request, most: int, company: int) -> int:
        """How deep to draft for this request, 0 where asking would be in vain."""
        name = self.drafter_of(request)
        if name is None:
            return 0
        free = name in WEIGHTLESS
        wanted = most if free else self._depth(request, name, most, company)
        pace = self._paces.get(request.id)
        if wanted and (pace is None or pace.quiet < QUIET):
            return wanted
        wanted = wanted or min(most, PROBE_DEPTH)
        due = pace is None or pace.asked + 1 >= self._interval(company, 0 if free else wanted)
        return wanted if due else 0

    def _interval(self, company: int, depth: int) -> int:
        """Steps between two questions, so that questions in vain take little of the time; a model drafts `depth` tokens."""
        extra = max(0.0, self._around[True].value - self._around[False].value) + depth * self._per_token.value
        step = self.costs.of(company) + self._around[False].value
        return max(1, math.ceil(extra / (PROBES * step)))

    def _depth(self, request: Request, name: str, most: int, company: int) -> int:
        """The depth at which a drafter that runs a model pays best, before it has said anything."""
        chances = np.array(self.beliefs.chances(request, name, Tree.chain([0] * most)))
        tokens = 1 + np.concatenate([[0.0], np.cumsum(chances)])
        depth = np.arange(most + 1)
        seconds = self.costs.span(company, most + 1) + self._around[False].value + depth * self._per_token.value
        return _first_good(tokens / seconds)

    def is_quiet(self, request: Request) -> bool:
        pace = self._paces.get(request.id)
        return pace is not None and pace.quiet >= QUIET

    # ------------------------------------------------------------------ with drafts
    def keep(
        self, requests: Sequence[Request], names: Sequence[str], trees: Sequence[Tree], load: Load
    ) -> list[list[int]]:
        """For each request, the nodes of its draft that are worth their rows, ascending."""
        self._asked = any(names)
        deep = [len(t) for n, t in zip(names, trees, strict=True) if n and n not in WEIGHTLESS]
        self._modelled = max(deep, default=0)
        kept: list[list[int]] = [[] for _ in requests]
        nodes: list[tuple[float, int, int]] = []
        for i, (request, name, draft) in enumerate(zip(requests, names, trees, strict=True)):
            if len(draft):
                chances = self.beliefs.claim(request, name, draft)
                nodes += [(-chance, i, node) for node, chance in enumerate(chances)]
        if nodes:
            nodes.sort()
            for _, i, node in nodes[: self._best([-n[0] for n in nodes], len(requests), load)]:
                kept[i].append(node)
        for request, name, own in zip(requests, names, kept, strict=True):
            pace = self._paces.setdefault(request.id, Pace())
            pace.asked = 0 if name else pace.asked + 1
            pace.quiet = 0 if own else pace.quiet + 1
        return [sorted(own) for own in kept]

    def _best(self, chances: list[float], company: int, load: Load) -> int:
        """How many nodes, likeliest first, make the most expected tokens per second."""
        tokens = company + np.concatenate([[0.0], np.cumsum(chances)])
        seconds = self.costs.span(company + load.num_prefill_tokens, len(tokens)) + self._around[True].value
        return _first_good(tokens / seconds)

    # ------------------------------------------------------------------ after the step
    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        for request in requests:
            self.beliefs.hear(request)
        if times.num_prefill_tokens:
            return
        self.costs.learn(times.num_tokens, times.target)
        drafting = times.draft if self._modelled else 0.0
        if self._modelled:
            self._per_token.add(drafting / self._modelled)
        self._around[self._asked].add(max(0.0, times.period - times.target - drafting))

    def release(self, request: Request) -> None:
        self._paces.pop(request.id, None)
        self.beliefs.forget(request)


def _first_good(worth: np.ndarray) -> int:
    """The smallest number that is nearly as good as the best: chances are guesses, and a row that is not asked is sure."""
    return int(np.argmax(worth >= GOOD * worth.max()))
