"""Requests, as a policy knows them, and what sets each of them apart from the others, for each drafter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headstart.drafters import WEIGHTLESS
from headstart.policy import Wishes
from headstart.policy.periods import Mode

DEEPEST = 8  # tokens of a draft
SUREST, LEAST = 0.98, 0.005  # that a token is thought to be right, at most; and that it should have been, at least
PRIOR, COPIES_PRIOR = 4.0, 1.5  # tries that "it is like the others" counts for: copies are all or nothing
FADES, COPIES_FADE = 0.04, 0.12  # how fast its past is forgotten, by drafts: what is copied ends all at once
RELIEF = 0.998  # what is left of that after a step in which it has no draft
SEATS = 64  # at first
Tally = list[int]  # how many drafts brought 0, 1, ... tokens
NOTHING: Tally = [0] * (DEEPEST + 1)


@dataclass(eq=False)
class Guest:
    """One request."""

    heat: int  # see `heat_of`
    welcome: bool  # to drafts
    seat: int = 0  # among all
    logs: dict[int, Tally] = field(default_factory=dict)  # what drafts brought that nobody digested yet, by their way
    mode: Mode | None = None  # how it drafts now,
    wishes: Wishes = field(default_factory=dict)  # as drafters are told
    decided: bool = False  # whether anybody has thought about it

    def log(self, way: int) -> Tally:
        """Where it is written down what its drafts bring."""
        if way not in self.logs:
            self.logs[way] = NOTHING.copy()
        return self.logs[way]


class Owns:
    """What each guest is to each drafter: of so many tokens that were tried, how many should have been right, and were."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # of drafters
        self._prior, self._fades = np.zeros((0, 1)), np.zeros((0, 1))
        self._sums = np.zeros((4, 0, SEATS))  # tried, expected, right; drafts in all
        self._free = list(range(SEATS))

    # ------------------------------------------------------------------ seats
    def sit(self) -> int:
        if not self._free:
            seats = self._sums.shape[2]
            self._free = list(range(seats, 2 * seats))
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)], axis=2)
        return self._free.pop()

    def leave(self, seat: int) -> None:
        self._sums[:, :, seat] = 0
        self._free.append(seat)

    def rows(self, names: Iterable[str]) -> np.ndarray:
        for name in names:
            if name not in self._rows:
                self._add(name)
        return np.array([self._rows[name] for name in names])

    def _add(self, name: str) -> None:
        prior, fades = (COPIES_PRIOR, COPIES_FADE) if name in WEIGHTLESS else (PRIOR, FADES)
        self._rows[name] = len(self._rows)
        self._prior, self._fades = np.vstack([self._prior, [[prior]]]), np.vstack([self._fades, [[fades]]])
        self._sums = np.concatenate([self._sums, np.zeros((4, 1, self._sums.shape[2]))], axis=1)

    # ------------------------------------------------------------------ what is known
    def drafts(self, name: str, seats: np.ndarray) -> np.ndarray:
        """That each of them had so far."""
        return self._sums[3, self.rows([name])[0], seats]

    def odds(self, names: Sequence[str], seats: np.ndarray, usual: np.ndarray, deviations: float = 0.0) -> np.ndarray:
        """(names, seats): times those of the others, where their first tokens are right as often as `usual` says; so many
        deviations above what is likely."""
        rows = self.rows(names)
        tried, expected, right = self._sums[:3, rows[:, None], seats]
        chance = np.divide(expected, tried, out=usual.copy(), where=tried > 0).clip(LEAST, 1 - LEAST)
        prior = self._prior[rows]
        seen = tried + prior
        own = (right + prior * chance) / seen
        if deviations:
            own += deviations * np.sqrt(own * (1 - own) / (seen + 1))
        own = np.minimum(own, np.maximum(SUREST, chance))
        return own * (1 - chance) / ((1 - own) * chance)

    # ------------------------------------------------------------------ learning
    def add(self, name: str, seats: np.ndarray, first: np.ndarray, more: Sequence[np.ndarray]) -> None:
        """Each had so many drafts; of so many tokens that were tried, so many should have been right, and were."""
        row = self.rows([name])[0]
        left = (1 - self._fades[row]) ** first
        self._sums[:3, row, seats] = left * self._sums[:3, row, seats] + np.stack(more)
        self._sums[3, row, seats] += first

    def doubt(self, name: str, seats: np.ndarray, left: float) -> None:
        """So much of what is known of them still counts; they are as good as new."""
        row = self.rows([name])[0]
        self._sums[:3, row, seats] *= left
        self._sums[3, row, seats] = 0

    def rest(self, seats: np.ndarray, steps: int) -> None:
        """They had no drafts in so many steps."""
        self._sums[:3, :, seats] *= RELIEF**steps
