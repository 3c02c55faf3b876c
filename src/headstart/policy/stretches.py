"""Steps that repeat one another: what they took and brought is learned for all of them together.

A step of a millisecond leaves no time to learn from each by itself, so only sums are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.core import Verdict
from headstart.policy import Wishes
from headstart.policy.outcomes import NOTHING, Guest, Tally
from headstart.policy.periods import is_wild


@dataclass
class Stretch:
    """A step, and those that repeat it."""

    asked: Sequence[Wishes] | None = None  # what drafters were asked for, for each request
    company: int = 0
    usual: float = 0.0  # seconds of such a step, as was thought
    counts: dict[int, int] = field(default_factory=dict)  # for how many there are drafts, by their way
    reads_on: bool = False  # a head only reads on for somebody
    ways: list[int | None] = field(default_factory=list)  # of each request,
    tallies: list[Tally] = field(default_factory=list)  # and where it is written down what its drafts bring
    # ------------------------------------------------------------------ what was not learned yet
    notes: int = 0  # steps with drafts,
    nodes: dict[int, int] = field(default_factory=dict)  # and how many these had, by way
    steps: int = 0  # without prompts,
    seconds: float = 0.0
    deciding: float = 0.0  # seconds of them
    produced: int = 0  # tokens
    told: int = 0  # steps that tell how long such steps take,
    took: float = 0.0  # and their seconds

    def begin(self, ways: list[int | None], guests: Sequence[Guest | None]) -> None:
        """So each request drafts."""
        self.ways, nowhere = ways, NOTHING.copy()
        self.counts = {way: ways.count(way) for way in set(ways) if way is not None}
        self.tallies = [
            nowhere if way is None or guest is None else guest.logs[way]
            for way, guest in zip(ways, guests, strict=True)
        ]

    def note(self, sizes: Sequence[int], verdicts: Sequence[Verdict]) -> None:
        """Write down what drafts brought. It runs in every step, so it does no more than it must."""
        for tally, verdict in zip(self.tallies, verdicts, strict=True):
            tally[len(verdict.accepted)] += 1
        self.notes += 1
        if len(self.counts) == 1:
            (way,) = self.counts
            self.nodes[way] = self.nodes.get(way, 0) + sum(sizes)
            return
        for own, size in zip(self.ways, sizes, strict=True):
            if own is not None:
                self.nodes[own] = self.nodes.get(own, 0) + size

    def add(self, seconds: float, deciding: float, produced: int) -> None:
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.deciding, self.produced = self.deciding + deciding, self.produced + produced

    def tell(self, seconds: float) -> None:
        """A step that nothing came before or behind, and so long did it take."""
        if not is_wild(seconds, self.usual):
            self.told, self.took = self.told + 1, self.took + seconds

    def clear(self) -> None:
        """All this was learned."""
        self.notes = self.steps = self.produced = self.told = 0
        self.seconds = self.deciding = self.took = 0.0
        self.nodes.clear()
