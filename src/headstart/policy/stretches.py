"""Steps that repeat one another, and what was seen of steps since it was last learned from.

A step of a millisecond leaves no time to learn from each by itself, so only sums are taken, until the next decision needs them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.policy import StepTimes, Wishes
from headstart.policy.outcomes import NOTHING, Guest, Tally

Kind = tuple[int | None, int, int]  # the way in which most requests draft, how many draft so, and how many there are


@dataclass
class Stretch:
    """A step, and those that repeat it."""

    asked: Sequence[Wishes] | None = None  # what drafters were asked for, for each request
    company: int = 0
    drafts: bool = False  # they were asked for something
    kind: Kind | None = None  # of its steps; None: a head only reads on for somebody, or some are on trial
    counts: dict[int, int] = field(default_factory=dict)  # for how many there are drafts, by their way
    ways: list[int | None] = field(default_factory=list)  # of each request,
    tallies: list[Tally] = field(default_factory=list)  # and where it is written down what its drafts bring

    def begin(self, ways: list[int | None], guests: Sequence[Guest | None]) -> None:
        """So each request drafts."""
        self.ways, nowhere = ways, NOTHING.copy()
        self.counts = {way: ways.count(way) for way in set(ways) if way is not None}
        self.tallies = [
            nowhere if way is None or guest is None else guest.logs[way]
            for way, guest in zip(ways, guests, strict=True)
        ]
        if self.kind is not None and self.counts:
            most = max(self.counts, key=lambda way: self.counts[way])
            self.kind = most, self.counts[most], self.company

    def note(self, steps: Sequence[Sequence[int] | None]) -> None:
        """Write down what drafts brought in each step; None: nothing."""
        for brought in steps:
            for tally, count in zip(self.tallies, brought or itertools.repeat(0), strict=False):
                tally[count] += 1


@dataclass
class Watch:
    """Over steps with drafts, whether they lose."""

    steps: int = 0
    drafts: int = 0
    came: int = 0  # tokens,
    instead: float = 0.0  # and those of plain steps in the same time

    def add(self, drafts: int, came: int, instead: float) -> None:
        self.steps, self.drafts = self.steps + 1, self.drafts + drafts
        self.came, self.instead = self.came + came, self.instead + instead

    @property
    def gain(self) -> float:
        """Times what plain steps bring."""
        return self.came / self.instead


@dataclass
class Passed:
    """Steps in which nobody drafted, and that nobody looked at."""

    steps: int = 0
    plain: int = 0  # without prompts
    seconds: float = 0.0
    deciding: float = 0.0  # of them

    def add(self, times: StepTimes) -> None:
        self.steps, self.plain = self.steps + 1, self.plain + (not times.num_prefill_tokens)
        self.seconds, self.deciding = self.seconds + times.period, self.deciding + times.policy


@dataclass
class Seen:
    """What was not learned yet."""

    steps: int = 0  # without prompts,
    seconds: float = 0.0
    deciding: float = 0.0  # seconds of them
    produced: int = 0  # tokens,
    expected: float = 0.0  # and those of plain steps in the same time
    drafts: defaultdict[int, list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )  # steps and nodes, by way
    told: defaultdict[Kind, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0.0])
    )  # steps, seconds
    usual: dict[Kind, float] = field(default_factory=dict)  # seconds of such a step, as was thought

    def count(self, stretch: Stretch, steps: Sequence[Sequence[int]]) -> None:
        """Drafts of these steps were so large."""
        alone = len(stretch.counts) == 1
        for way in stretch.counts:
            book = self.drafts[way]
            book[0] += len(steps)
            for sizes in steps:
                book[1] += sum(
                    sizes if alone else [n for own, n in zip(stretch.ways, sizes, strict=True) if own == way]
                )

    def add(self, steps: int, seconds: float, deciding: float, produced: int, expected: float) -> None:
        self.steps, self.seconds, self.deciding = self.steps + steps, self.seconds + seconds, self.deciding + deciding
        self.produced, self.expected = self.produced + produced, self.expected + expected

    def tell(self, kind: Kind, seconds: Sequence[float]) -> None:
        """Steps that nothing came before or behind, and so long did each take."""
        own = self.told[kind]
        own[0] += len(seconds)
        own[1] += sum(seconds)
