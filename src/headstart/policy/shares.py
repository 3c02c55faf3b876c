"""How much of what was expected came; for which and how many requests the same may be expected; what depends on a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headstart.core import Request


def heat_of(request: Request) -> int:
    """The same for requests of about the same temperature: what is drawn at random is harder to foresee."""
    return 0 if request.params.greedy else 1 + int(2 * min(2.0, request.params.temperature))


def about(count: int) -> int:
    """The same for about as many: what depends on how many there are is learned for each of these by itself."""
    return count.bit_length()


@dataclass
class Share:
    """What came of what was expected, in tokens; both sums fade."""

    fades: float
    expected: float = 0.0
    came: float = 0.0

    def add(self, expected: float, came: float, steps: int = 1) -> None:
        """Over so many steps."""
        left = (1 - self.fades) ** steps
        self.expected, self.came = left * self.expected + expected, left * self.came + came

    def fade(self, left: float) -> None:
        """So much of what is known still counts."""
        self.expected *= left
        self.came *= left

    def value(self, before: float = 1.0, weight: float = 1.0) -> float:
        """`before` is what is thought where nothing is known, and counts for so many tokens."""
        return (self.came + weight * before) / (self.expected + weight)


@dataclass
class Line:
    """A line through points, of which the last count most. It does not fall, and ends where the points do."""

    fades: float
    least: float = math.inf
    most: float = -math.inf
    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    @property
    def known(self) -> bool:
        return self.count > 0.0

    def add(self, x: float, y: float) -> None:
        left = 1 - self.fades
        self.least, self.most = min(self.least, x), max(self.most, x)
        self.count, self.x, self.y = left * self.count + 1, left * self.x + x, left * self.y + y
        self.xx, self.xy = left * self.xx + x * x, left * self.xy + x * y

    def at(self, x: float) -> float:
        """Where all points stand at the same place, their mean."""
        mean_x, mean_y = self.x / self.count, self.y / self.count
        spread = self.xx / self.count - mean_x * mean_x
        slope = (self.xy / self.count - mean_x * mean_y) / spread if spread > 1e-6 * (1 + mean_x * mean_x) else 0.0
        return mean_y + max(0.0, slope) * (min(self.most, max(self.least, x)) - mean_x)
