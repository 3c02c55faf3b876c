"""What things cost on this machine: a forward of the target by its rows and their context, and the work of each drafter.

Measured at load, and kept true by real steps.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.core import Batch, Segment
from headstart.policy import Errand

if TYPE_CHECKING:
    from headstart.models.base import Runner

ROWS = (1, 2, 4, 8, 16, 32, 64, 3, 5, 6, 7, 9, 10, 12, 24, 48, 13, 17, 20, 28, 40)  # in the order of measuring
CONTEXT, FAR = 128, 1024  # tokens behind which rows are measured; and once more, for what context costs
FAR_ROWS = 8
CHECKED = (1, 2, 4, FAR_ROWS)  # rows with which costs of before are compared
NOISE = 0.04  # how far single steps differ from what such steps take, as a share of it; and how unsure one is of
POINT = 0.1  # a number of rows that was measured when the model was loaded,
OCTAVE = 0.25  # and more with each doubling beyond the last of those;
DRIFT = 0.015  # how much the whole machine becomes faster or slower from step to step,
WEAR = 0.0035  # and single numbers of rows
LOGITS = 0.1  # what rows of prompts take less than others, which have logits: a guess, and how unsure it is
SURE = 0.04  # the price of more rows is known, where one is no less sure of it than this, as a share of the step
TOGETHER, NEW = 4, 64  # steps that are read together, once so many have been read one by one
BEYOND = (1.25, 1.5, 2, 3, 4, 8, 16)  # points behind the last that was measured, in times of its rows
MOST = 1024  # rows that are told apart
WILD = 3.0  # a step that took so many times what was expected tells nothing, since somebody else used the machine,
STAYS = 4  # unless so many do
ALIKE = 1.25  # times of today and of before that differ by no more than this, one like the other, are the same curve
RECENT = 0.95  # what is left of a drafter's past, after one more errand


class Costs:
    """Seconds of a forward of n rows behind so many tokens of context each: a line through points, times how slow the whole
    machine is now.

    Each step tells something of both. Which of them was wrong depends on how sure one is of each: a Kalman filter over the
    machine, what rows of prompts take less, and all points, in shares of what they are. So what drafts cost is learned while
    all steps have drafts, too, and not mistaken for a machine that has become slow."""

    def __init__(
        self, points: Mapping[int, float] | None = None, reach: float = 0.0, measured: int | None = None
    ) -> None:
        """`measured`: the last point that was, where it is not the last of these, or of those that are measured at load."""
        self.known = bool(points)
        self._measured = measured or min(max(ROWS), max(points or {1: 1.0}))
        self.reach = reach  # seconds for one row and one token of its context
        self._scale = 1.0
        self._logits = LOGITS
        self._rows, self._seconds = _line(points or {1: 1.0})
        self._drawn = np.array(self._rows), np.array(self._seconds)  # the same for many at once
        self._unsure = _doubts(self._rows, self._measured)
        self._own_unsure = self._unsure.ravel()[:: len(self._unsure) + 1]  # of each by itself
        self._most_unsure = self._own_unsure.copy()
        self._wear = np.array([DRIFT**2, *(WEAR**2 for _ in self._own_unsure[1:])])
        self._wild = 0  # steps in a row that took far too long
        self._steps: list[tuple[int, float, float, int]] = []  # that are not read yet,
        self._read = 0  # and how many are

    def is_sure(self, rows: int, more: int) -> bool:
        """Is it known what so many rows more would cost?"""
        fewer = ((i, -weight) for i, weight in self._parts(rows))
        parts = [*self._parts(rows + more), *fewer]
        return sum(v * w * self._unsure[i, j] for i, v in parts for j, w in parts) < SURE**2

    def at(self, rows: np.ndarray, context: float = 0.0) -> np.ndarray:
        """For many numbers of rows."""
        out = np.interp(rows, *self._drawn)
        if rows.size and rows.max() > self._rows[-1]:
            out += self._steepness(len(self._rows) - 1) * np.maximum(0, rows - self._rows[-1])
        return (out + self.reach * context * rows) * self._scale

    def span(self, rows: int, count: int, context: float = 0.0) -> np.ndarray:
        """For `rows` rows, one more, and so on."""
        return self.at(np.arange(rows, rows + count), context)

    def of(self, rows: int, context: float = 0.0) -> float:
        right = self._right(rows)
        seconds = self._seconds[right] + (rows - self._rows[right]) * self._steepness(right)
        return float(seconds + self.reach * context * rows) * self._scale

    def _right(self, rows: int) -> int:
        """The point to the right of so many rows, or the last."""
        return min(max(1, bisect_left(self._rows, rows)), len(self._rows) - 1)

    def _steepness(self, right: int) -> float:
        """Seconds of a row, left of this point."""
        return (self._seconds[right] - self._seconds[right - 1]) / (self._rows[right] - self._rows[right - 1])

    def learn(self, rows: int, seconds: float, reach: float = 0.0, prompt: int = 0) -> None:
        """A real forward took so long, with so many tokens of context before all its rows together, of which so many were
        those of prompts. Later some are read together: one by one takes three times as long, since nothing of it is in the
        processor's caches."""
        self._steps.append((rows, seconds, reach, prompt))
        if self._read < NEW or len(self._steps) >= TOGETHER:
            for step in self._steps:
                self._learn(*step)
            self._read += len(self._steps)
            self._steps.clear()

    def _learn(self, rows: int, seconds: float, reach: float, prompt: int) -> None:
        if not self.known and prompt:  # which would tell little of a few rows
            return
        if not self.known:
            self._scale = seconds / self.of(rows)
            self.known = True
        share = prompt / max(1, rows)
        expected = self.of(rows, reach / max(1, rows)) * (1 - self._logits * share)
        ratio = seconds / max(expected, 1e-9)
        self._wild = self._wild + 1 if ratio >= WILD else 0
        if rows > MOST or 0 < self._wild < STAYS:
            return
        parts = [(0, 1.0), (1, -share / (1 - self._logits * share)), *self._parts(rows, reach)]
        spread = np.array([weight for _, weight in parts]) @ self._unsure[[i for i, _ in parts]]
        believed = spread / (sum(weight * spread[i] for i, weight in parts) + NOISE**2)
        self._unsure -= believed[:, None] * spread
        np.minimum(self._own_unsure + self._wear, self._most_unsure, out=self._own_unsure)
        wrong = math.log(min(WILD, max(ratio, 1 / WILD)))
        self._scale *= math.exp(believed[0] * wrong)
        self._logits = min(0.5, max(0.0, self._logits + believed[1] * wrong))
        self._drawn = self._drawn[0], self._drawn[1] * np.exp(believed[2:] * wrong)
        self._seconds = self._drawn[1].tolist()

    def _parts(self, rows: int, reach: float = 0.0) -> list[tuple[int, float]]:
        """The points that have to do with a forward of so many rows, by their place in what one is unsure of, and how much."""
        right = self._right(min(rows, MOST))
        share = (min(rows, MOST) - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
        both = (1 - share) * self._seconds[right - 1], share * self._seconds[right]
        whole = sum(both) + self.reach * reach
        return [(1 + right, both[0] / whole), (2 + right, both[1] / whole)]

    def scale(self, factor: float) -> None:
        """The whole machine is so many times as slow."""
        self._scale *= factor

    def to_dict(self) -> dict[str, Any]:
        """As a file keeps it."""
        points = {str(n): self._scale * s for n, s in zip(self._rows, self._seconds, strict=True) if n}
        context = self.reach * self._scale
        return {"seconds_by_rows": points, "seconds_by_row_and_context": context, "measured_rows": self._measured}

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> Costs:
        points = {int(n): float(s) for n, s in kept["seconds_by_rows"].items()}
        reach = float(kept["seconds_by_row_and_context"])
        if not points or not all(n > 0 and 0 < s < 1e6 for n, s in points.items()) or not 0 <= reach < 1e3:
            raise ValueError("no seconds by rows")
        measured = kept.get("measured_rows")
        if measured is not None and measured not in points:
            raise ValueError("measured_rows is none of the rows")
        return Costs(points, reach, measured)


def _line(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Numbers of rows from 0 to MOST, and their seconds: the points, and on at what the last rows cost, or those of the upper
    half of the points if that is more: one point may have been disturbed."""
    x = sorted(points)
    y = [points[n] for n in x]
    half = max(0, bisect_right(x, x[-1] / 2) - 1)
    slope = max(0.0, *((y[-1] - y[i]) / (x[-1] - x[i]) for i in (half, -2))) if len(x) > 1 else 0.0
    more = sorted({n for by in (*BEYOND, MOST) if (n := min(MOST, int(by * x[-1]))) > x[-1]})
    return [0, *x, *more], [y[0], *y, *(y[-1] + slope * (n - x[-1]) for n in more)]


def _doubts(rows: Sequence[int], last: int) -> np.ndarray:
    """How unsure one is of the machine, of prompts, and of each point, and what they have to do with each other: how far a
    line that goes on behind the last point is wrong, it is wrong for all that lies further."""
    out = np.zeros((2 + len(rows), 2 + len(rows)))
    beyond = OCTAVE**2 * np.log2(np.maximum(np.array(rows), last) / last)
    out[2:, 2:] = np.diag(np.full(len(rows), POINT**2)) + np.minimum(beyond[:, None], beyond[None, :])
    out[0, 0], out[1, 1] = POINT**2, LOGITS**2
    return out


# ------------------------------------------------------------------ drafters
@dataclass
class Work:
    """Seconds of one drafter as levels * a + rows * b: least squares over its errands, which fade."""

    level: float = 0.0
    row: float = 0.0
    seen: int = 0
    wild: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of levels², levels·rows, rows², levels·s, rows·s

    def add(self, levels: int, rows: int, seconds: float) -> None:
        if self._is_wild(levels, rows, seconds):
            return
        new = levels * levels, levels * rows, rows * rows, levels * seconds, rows * seconds
        self._sums = [RECENT * old + x for old, x in zip(self._sums, new, strict=True)]
        self.seen += 1
        ll, lr, rr, ls, rs = self._sums
        ll, rr = 1.01 * ll, 1.01 * rr  # what the errands leave open, because all were alike, is shared out evenly
        whole = ll * rr - lr * lr
        self.level, self.row = max(0.0, (rr * ls - lr * rs) / whole), max(0.0, (ll * rs - lr * ls) / whole)

    def _is_wild(self, levels: int, rows: int, seconds: float) -> bool:
        """Much longer than thought: it read a long text first, or somebody else used the machine. Unless it stays so."""
        self.wild = self.wild + 1 if self.seen > 2 and seconds > WILD * self.of(levels, rows) else 0
        return 0 < self.wild < 4

    def of(self, levels: int, rows: int) -> float:
        return levels * self.level + rows * self.row


class Errands:
    """What drafters take for their work, by name. Until one has been seen at work, it takes no time."""

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}

    def knows(self, name: str) -> bool:
        return name in self.work

    def learn(self, errand: Errand) -> None:
        if errand.levels:
            self.work.setdefault(errand.name, Work()).add(errand.levels, errand.rows, errand.seconds)

    def to_dict(self) -> dict[str, Any]:
        return {n: {"seconds_by_level": w.level, "seconds_by_row": w.row} for n, w in self.work.items()}

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> Errands:
        """What they took before, until they are seen at work again."""
        out = Errands()
        for name, own in kept.items():
            level, row = float(own["seconds_by_level"]), float(own["seconds_by_row"])
            if not (0 <= level < 1e3 and 0 <= row < 1e3):
                raise ValueError("no seconds")
            out.work[name] = Work(level, row)
        return out

    def of(self, name: str, levels: int, rows: int) -> float:
        return self.work[name].of(levels, rows) if name in self.work else 0.0

    def at(self, name: str, levels: np.ndarray, rows: np.ndarray) -> np.ndarray:
        work = self.work.get(name) or Work()
        return levels * work.level + rows * work.row


# ------------------------------------------------------------------ measuring
def measure(runner: Runner, most_rows: int, most_seconds: float = 3.0, rows: Sequence[int] = ROWS) -> Costs:
    """Time forwards of up to `most_rows` rows on a runner whose slots are all free. All sizes have their turn before the first
    is timed again, so that a moment in which somebody else uses the machine is not believed. Stops when its time is up.
    Without room for any, the first step will tell."""
    if most_rows < 1:
        return Costs()
    slots = np.arange(CONTEXT + most_rows)
    points: dict[int, float] = {}
    begin = time.perf_counter()
    with runner.at_work():
        _read(runner, slots[:CONTEXT], most_rows)
        sizes = [n for n in rows if n <= most_rows]
        for n in (*sizes, *sizes):
            if points and time.perf_counter() - begin > most_seconds:
                break
            again = (_seconds(runner, slots[: CONTEXT + n], n) for _ in range(2 if n < 16 else 1))
            points[n] = min(*again, points.get(n, math.inf))
        runner.keep(slots, 0)
    return Costs(_without_spikes(points))


def _without_spikes(points: Mapping[int, float]) -> dict[int, float]:
    """A forward takes no longer than a larger one: where it did, somebody else used the machine."""
    found: dict[int, float] = {}
    least = np.inf
    for n in sorted(points, reverse=True):
        least = found[n] = min(points[n], least)
    return found


def measure_context(runner: Runner, num_slots: int, costs: Costs) -> None:
    """What context costs beyond the first tokens, with what lies in the slots: their contents do not matter for time."""
    far = min(FAR, num_slots - FAR_ROWS)
    if far < 2 * CONTEXT or not runner.reads_unwritten:
        return
    with runner.at_work():
        slots = np.arange(far + FAR_ROWS)
        near = min(_seconds(runner, slots[: CONTEXT + FAR_ROWS], FAR_ROWS) for _ in range(3))
        costs.reach = max(0.0, min(_seconds(runner, slots, FAR_ROWS) for _ in range(3)) - near)
        costs.reach /= FAR_ROWS * (far - CONTEXT)
        runner.keep(slots, 0)


def is_still_so(runner: Runner, costs: Costs, most_rows: int) -> bool:
    """Are forwards of one and of some rows about as fast as these costs say? They take on the machine's speed of today. Costs
    that are too high for a few rows would never be noticed: nobody would draft."""
    slots = np.arange(CONTEXT + FAR_ROWS)
    if most_rows < FAR_ROWS:
        return False
    with runner.at_work():
        _read(runner, slots[:CONTEXT], most_rows)
        turns = [[_seconds(runner, slots[: CONTEXT + n], n) for n in CHECKED] for _ in range(3)]
        runner.keep(slots, 0)
    ratios = [min(own) / costs.of(n, CONTEXT) for n, own in zip(CHECKED, zip(*turns, strict=True), strict=True)]
    costs.scale(float(np.mean(ratios)))
    return are_alike(ratios, ALIKE)


def are_alike(ratios: Sequence[float], by: float) -> bool:
    """Of what is measured to what is known: do they differ from each other by no more than this, and from 1 by twice that?"""
    return max(ratios) < by * min(ratios) and 1 / by**2 < ratios[0] < by**2


def _read(runner: Runner, slots: np.ndarray, at_once: int) -> None:
    """Compute what these slots hold, so many at a time."""
    for start in range(0, len(slots), at_once):
        own = slots[start : start + at_once]
        segment = Segment(0, len(own), start, slots[: start + len(own)])
        runner.forward(Batch(_tokens(runner, own), own, [segment], np.arange(len(own))[-1:]))


def _tokens(runner: Runner, slots: np.ndarray) -> np.ndarray:
    return slots % max(2, min(1000, runner.vocab_size))


def _seconds(runner: Runner, slots: np.ndarray, rows: int) -> float:
    """Of a forward of the last so many of these slots."""
    context, own = len(slots) - rows, np.arange(rows)
    batch = Batch(_tokens(runner, slots[context:]), own + context, [Segment(0, rows, context, slots)], own)
    runner.synchronize()
    begin = time.perf_counter()
    runner.forward(batch)
    runner.synchronize()
    return time.perf_counter() - begin
