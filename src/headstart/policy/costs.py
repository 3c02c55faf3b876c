"""What a forward costs on this machine: seconds by its number of rows. Measured at load, and kept true by real steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headstart.core import Batch, Segment

if TYPE_CHECKING:
    from headstart.models.base import Runner

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 17, 20, 24, 28, 32, 40, 48, 64)
CONTEXT = 128  # tokens behind which rows are measured
FOLLOW, SHIFT = 0.3, 0.05  # how far one step moves its own number of rows, and all of them
NEAR = FOLLOW * 0.6 ** np.abs(np.arange(-6, 7))  # and those around its own
MOST = 1024  # rows that are told apart
WILD = 3.0  # a step that took so many times what was expected tells nothing: somebody else used the machine


class Costs:
    """Seconds of a forward of n rows."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self.known = bool(points)
        self._scale = 1.0
        self._table = _line(points) if points else np.ones(MOST + 1)

    def span(self, rows: int, count: int) -> np.ndarray:
        """For `rows` rows, one more, and so on."""
        last = rows + count
        if last <= MOST:
            return self._table[rows:last] * self._scale
        beyond = self._table[MOST] - self._table[MOST - 1]
        n = np.arange(rows, last)
        return (self._table[np.minimum(n, MOST)] + beyond * np.maximum(0, n - MOST)) * self._scale

    def of(self, rows: int) -> float:
        return float(self._table[rows]) * self._scale if rows <= MOST else float(self.span(rows, 1)[0])

    def learn(self, rows: int, seconds: float) -> None:
        """A real forward took so long."""
        if not self.known:
            self._table *= seconds / self._table[min(rows, MOST)]
            self.known = True
        ratio = seconds / max(self.of(rows), 1e-9)
        if 1 / WILD < ratio < WILD and rows <= MOST:
            reach = len(NEAR) // 2
            low, high = max(0, rows - reach), min(MOST, rows + reach)
            self._table[low : high + 1] *= ratio ** NEAR[low - rows + reach : high - rows + reach + 1]
            self._scale *= ratio**SHIFT


def _line(points: Mapping[int, float]) -> np.ndarray:
    """Seconds for 0 to MOST rows: a line through the points, and on at the price of the last rows."""
    x = np.array(sorted(points), float)
    y = np.array([points[int(n)] for n in x])
    rows = np.arange(MOST + 1)
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else 0.0
    return np.interp(rows, x, y) + slope * np.maximum(0.0, rows - x[-1])


def measure(runner: Runner, most_rows: int, most_seconds: float = 2.0, rows: Sequence[int] = ROWS) -> Costs:
    """Time forwards of up to `most_rows` rows on a runner whose slots are all free. Stops when its time is up."""
    slots = np.arange(CONTEXT + most_rows)
    where = slots[:CONTEXT]
    tokens = slots % max(2, min(1000, runner.vocab_size))
    points: dict[int, float] = {}
    begin = time.perf_counter()
    with runner.at_work():
        runner.forward(Batch(tokens[:CONTEXT], where, [Segment(0, CONTEXT, 0, where)], where[-1:]))
        for n in [n for n in rows if n <= most_rows]:
            if points and time.perf_counter() - begin > most_seconds:
                break
            own = np.arange(n)
            segment = Segment(0, n, CONTEXT, slots[: CONTEXT + n])
            batch = Batch(tokens[CONTEXT : CONTEXT + n], own + CONTEXT, [segment], own)
            points[n] = statistics.median(_seconds(runner, batch) for _ in range(3))
        runner.keep(slots, 0)
    return Costs(points)


def _seconds(runner: Runner, batch: Batch) -> float:
    runner.synchronize()
    begin = time.perf_counter()
    runner.forward(batch)
    runner.synchronize()
    return time.perf_counter() - begin
