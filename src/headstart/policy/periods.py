"""How long steps really take where drafts are made before anyone has seen them: by mode, and by how many requests there are.

On a device that is given its next step before the last one is over, parts of a step cannot be timed by themselves, and need
not: what counts is from one step to the next. It is measured at load with requests that are made up (`rehearse`), and kept true
by real steps.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headstart import shapes
from headstart.drafters import WEIGHTLESS
from headstart.policy.shares import about

SHIFT, FOLLOW = 0.01, 0.05  # how far one step moves all modes, and its own in about the same company,
SURE = 6  # and for how many real steps it counts what was measured at load: the first ones move it further
LITTLE, MOST = 0.2, 3.0  # of what drafts for some should take, the least that a step tells, and how far that goes
WILD = 2.5  # a step that took so many times what was expected tells nothing: a graph was made, or somebody used the machine
COMPANIES = (1, 2, 4, 8, 16, 32, 64)  # numbers of requests for which steps are timed at load,
PROMPT = 64  # and tokens of their prompts


class Mode(NamedTuple):
    """One drafter, and how much it is asked for."""

    drafter: str
    nodes: int
    depth: int

    @property
    def branches(self) -> bool:
        return self.nodes > self.depth

    @property
    def size(self) -> str:
        return f"{self.nodes}x{self.depth}" if self.branches else str(self.depth)

    def __str__(self) -> str:
        return f"{self.drafter} {self.size}"


Key = Mode | None  # None: nobody drafts


class Periods:
    """Seconds from one step to the next; between measured numbers of requests, a line."""

    def __init__(self) -> None:
        self._points: dict[Key, dict[int, float]] = {}
        self._table: dict[Key, list[float]] = {}  # for 0, 1, ... requests, as real steps have moved it
        self._few: dict[Key, float] = {}  # times what is thought of drafts for few of many, as real steps tell
        self._scale = 1.0
        self._met: defaultdict[tuple[Key, int], int] = defaultdict(int)  # real steps, by mode and about which company

    @property
    def known(self) -> bool:
        return None in self._points

    def knows(self, mode: Key) -> bool:
        return mode in self._points

    def put(self, mode: Key, company: int, seconds: float) -> None:
        """So it was measured."""
        own = self._points.setdefault(mode, {})
        own[company] = seconds
        self._few[mode] = 1.0
        self._table[mode] = _line(own)

    def of(self, mode: Key, company: int) -> float:
        """All of them draft that way."""
        return self._scale * _beyond(self._table[mode], company)

    def extra(self, mode: Mode, count: int, company: int) -> float:
        """Seconds that a step takes longer where so many of the company draft."""
        return self.extras(mode, [count], company)[0]

    def extras(self, mode: Mode, counts: Sequence[int], company: int) -> list[float]:
        """The same for several numbers: no less than for these alone, and no less than their share of what it takes for all."""
        table, plain, scale = self._table[mode], self._table[None], self._scale
        share = scale * (_beyond(table, company) - _beyond(plain, company)) / company
        if company >= min(len(table), len(plain)):
            table, plain = ([_beyond(t, n) for n in range(company + 1)] for t in (table, plain))
        few, out = self._few[mode], []
        for n in counts:
            own, usual = scale * (table[n] - plain[n]), n * share
            own = own if own > usual else usual
            out.append((own if own > 0.0 else 0.0) * few ** (1 - n / company))
        return out

    def step(self, mode: Key, count: int, company: int) -> float:
        """Seconds of a step of this company, of whom so many draft; 0 where nobody knows."""
        if not self.knows(mode):
            return 0.0
        return self.of(None, company) + (self.extra(mode, count, company) if mode is not None else 0.0)

    def learn(self, mode: Key, count: int, company: int, seconds: float, steps: int = 1) -> None:
        """Of so many real steps of this company, of whom so many drafted, on average. Where few did, that tells what drafts for
        few take."""
        usual = self.step(mode, count, company)
        if is_wild(seconds, usual):
            return
        share = 1.0 if mode is None else count / company
        if mode is not None and 2 * count <= company:
            plain, extra = self.of(None, company), self.extra(mode, count, company)
            more = max(seconds - plain, LITTLE * extra) / extra if extra else 1.0
            moves = (1 - share) * (1 - (1 - FOLLOW) ** steps)
            self._few[mode] = min(MOST, max(1 / MOST, self._few[mode] * more**moves))
            return
        finds = mode is None or mode.drafter not in WEIGHTLESS  # others do not always have something to say
        shift = SHIFT if finds else 0.0
        follow = max(FOLLOW, 1 / (SURE + self._met[mode, about(company)]))
        self._met[mode, about(company)] += steps
        moves = share * (1 - (1 - shift - follow) ** steps) / (shift + follow)
        self._scale *= (seconds / usual) ** (moves * shift)
        times, table = (seconds / usual) ** (moves * follow), self._table[mode]
        table = table + [_beyond(table, n) for n in range(len(table), company + 1)]
        self._table[mode] = [
            s * times**near if near else s for s, near in zip(table, _near(company, len(table)), strict=True)
        ]

    def scale(self, times: float) -> None:
        """The machine is that much slower today."""
        self._scale *= times

    def kept(self) -> dict[str, Any]:
        """All that was measured, as JSON can say it."""
        points = [[*(mode or (None, 0, 0)), {str(n): s for n, s in own.items()}] for mode, own in self._points.items()]
        return {"points": points}

    @classmethod
    def recall(cls, kept: Mapping[str, Any]) -> Periods:
        out = cls()
        for drafter, nodes, depth, own in kept["points"]:
            mode = Mode(str(drafter), int(nodes), int(depth)) if drafter is not None else None
            for company, seconds in own.items():
                out.put(mode, int(company), _checked(seconds))
        return out

    def covers(self, modes: Sequence[Key], companies: Sequence[int]) -> bool:
        """Is it known how long these take, for the largest of these companies too?"""
        return all(self.knows(m) for m in modes) and set(companies) <= set(self._points[None])

    def to_dict(self) -> dict[str, Any]:
        """For people and for the simulator: "plain" and modes, by number of requests."""
        names = {mode: "plain" if mode is None else str(mode) for mode in self._points}
        return {names[mode]: {str(n): self.of(mode, n) for n in own} for mode, own in self._points.items()}


def is_wild(seconds: float, usual: float) -> bool:
    """So long, or so short, that it tells nothing."""
    return not usual / WILD < seconds < usual * WILD


def _checked(seconds: Any) -> float:
    if not 0 < float(seconds) < 3600:
        raise ValueError(f"{seconds} is not how long a step takes")
    return float(seconds)


def _line(points: Mapping[int, float]) -> list[float]:
    """For 0, 1, ... requests."""
    sizes = sorted(points)
    return np.interp(range(sizes[-1] + 1), sizes, [points[n] for n in sizes]).tolist()


@functools.lru_cache(512)
def _near(company: int, size: int) -> list[float]:
    """How far what is seen in this company holds for 0, 1, ... requests: hardly for twice as many, or half."""
    company = min(company, size - 1)
    return [0.0, *(max(0.0, 1 - abs(math.log2(n / company))) for n in range(1, size))]


def _beyond(table: Sequence[float], company: int) -> float:
    """Beyond what was measured, as the last requests did."""
    more = company - len(table) + 1
    return table[company] if more <= 0 else table[-1] + more * max(0.0, table[-1] - table[-2])


SIZES: Mapping[str, Sequence[shapes.Size]] = {
    "ngram": ((3, 3), (6, 6)),
    "suffix": ((7, 7),),
    "draft_model": ((3, 3), (5, 5)),
}


def modes_of(names: Sequence[str], most_depth: int, most_nodes: int) -> list[Mode]:
    """The ways to draft that are told apart, within what a user allows."""
    usual = shapes.USUAL_SIZES
    return [
        Mode(name, *size) for name in names for size in shapes.within(SIZES.get(name, usual), most_depth, most_nodes)
    ]
