"""How much of what was expected came; for which and how many requests the same may be expected."""

from __future__ import annotations

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
