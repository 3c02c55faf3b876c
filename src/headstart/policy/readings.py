"""Which prompts heads read where drafts are made ahead: those whose tokens to come are worth it, and some in hope."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from headstart.policy import StepTimes
from headstart.policy.periods import Mode
from headstart.policy.shares import Line, about
from headstart.policy.trials import DEAREST

READING = 0.002  # share of the time that reading prompts may take for which it does not seem to pay,
READINGS = 4  # and for how many of them it is saved up,
STRANGERS = 16  # prompts that are read before anything is known of what that brings
CHURN = 8  # steps after which newcomers are looked at together, where more and more come,
ARRIVALS = 0.1  # and how fast it is learned what newcomers take, and what it takes to read them
DOUBT = 1.4  # times that it should come back where the others do not draft: alone it does not pay


class Promise(NamedTuple):
    """What a head is to a request like the others."""

    gain: float = 0.0  # times what plain steps bring
    seconds: float = 0.0  # of a token, without drafts
    cost: float = math.inf  # seconds that reading takes
    new: bool = False  # nobody has seen drafts of it yet
    mode: Mode | None = None  # with which that would be,
    alone: float = 0.0  # and times what plain steps bring if nobody else drafts


@dataclass
class Newcomers:
    """While nobody drafts: how much longer the steps take that they come in, and those in which the host gets that ready."""

    count: int = 0
    read: int = 0  # of them by a head
    seconds: float = 0.0
    tokens: int = 0  # of their prompts
    seen: int = 0  # steps,
    left: int = 2  # and those that are still to be seen, if nobody else comes

    def add(self, read: bool) -> None:
        self.count, self.read, self.left = self.count + 1, self.read + read, 2


class Readings:
    def __init__(self) -> None:
        self.saved = 0.0  # seconds for reading what does not seem to pay
        self._dearer: defaultdict[int, float] = defaultdict(float)  # seconds more for one that a head reads, by company
        self.arrival: Newcomers | None = None  # the last ones
        # how much longer steps take for one that nobody reads, by its tokens, where about so many come together
        self._lines: defaultdict[int, Line] = defaultdict(lambda: Line(ARRIVALS))
        self._hoped = 0  # how many were read though it did not seem to pay
        self._strangers: Counter[int] = Counter()  # that were read before anything was known, by heat

    def pays(self, promise: Promise, least: float, tokens: float, heat: int, common: bool) -> bool:
        """Is it worth reading a newcomer of so many tokens to come? At the least that should bring `least` times what plain
        steps do; `common`: somebody drafts with a head."""
        gain, cost = promise.gain, promise.cost
        if promise.new:  # the first few will tell, even where it would not come back
            pays = gain > least and self._strangers[heat] < STRANGERS and cost < tokens * promise.seconds
            self._strangers[heat] += pays
            return pays
        return gain > least and tokens * promise.seconds * (1 - 1 / gain) > (cost if common else DOUBT * cost)

    def hopes(self, cost: float, drafts: bool) -> bool:
        """May one be read that does not seem worth it, since time for that was saved up? `drafts`: somebody does now; else
        nobody could tell what reading takes."""
        told = bool(self._lines) or drafts or self._hoped < READINGS
        if not told or self.saved < cost:
            return False
        self.saved, self._hoped = min(self.saved, READINGS * cost) - cost, self._hoped + 1
        return True

    def dearer(self, company: int) -> float:
        """How much longer steps take for a newcomer that a head reads, as was seen in about this company."""
        return self._dearer[about(company)]

    def add(self, read: bool) -> None:
        """A newcomer, whom a head reads or not."""
        self.arrival = self.arrival or Newcomers()
        self.arrival.add(read)

    def watch(self, times: StepTimes, plain: float, company: int) -> None:
        """A step of newcomers in which nobody drafts, where a plain one of this company takes so long. What is seen of it tells
        what reading a prompt takes here: a rehearsal may have had a faster host."""
        if (arrival := self.arrival) is None:
            return
        count = arrival.count
        arrival.seconds += min(times.period, DEAREST * plain * count) - plain
        arrival.tokens += times.num_prefill_tokens
        arrival.seen, arrival.left = arrival.seen + 1, arrival.left - 1
        if arrival.left and arrival.seen < CHURN:
            return
        self.arrival = None
        if arrival.tokens and not arrival.read:
            self._lines[about(count)].add(arrival.tokens / count, arrival.seconds / count)
        elif arrival.tokens and self._lines:
            nearest = min(self._lines, key=lambda n: abs(n - about(count)))
            more = (arrival.seconds - count * self._lines[nearest].at(arrival.tokens / count)) / arrival.read
            moves = 1 - (1 - ARRIVALS) ** (arrival.read * arrival.read / count)  # one of many hardly shows
            most = DEAREST * plain  # in both directions: what is cut off on one side only moves the mean
            self._dearer[about(company)] += moves * (min(most, max(-most, more)) - self.dearer(company))
