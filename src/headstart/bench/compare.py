"""Two results, before and after: what became faster or slower, and whether that is more than noise."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headstart.bench.markdown import cell, table
from headstart.bench.plots import number
from headstart.bench.records import BASELINE, Point, Result, Sample
from headstart.bench.summary import Interval, Summary, answered, drawn, interval, per_token, tabled
from headstart.bench.words import UNKNOWN, known, name, told

FASTER, SLOWER, SAME = "faster", "slower", "no difference that is more than noise"
# What may differ between two runs that are compared, or is told elsewhere.
FREE = {"commit", "headstart", "load", "date", "when", "argv", "rounds", "prompts", "methods", "points"}
HEADINGS = (
    "method",
    "point",
    "tokens/s",
    "time per token, after ÷ before",
    "verdict",
    "speed-up",
    "speed-up, after ÷ before",
    "verdict on the speed-up",
    "block efficiency",
)


@dataclass(frozen=True)
class Change:
    """One method at one point, in both. Pairs are before and after; None: not known in one of them."""

    method: str
    point: Point
    tokens_per_second: tuple[float, float]
    time: Interval  # per token, after ÷ before
    speedup: tuple[Interval | None, Interval | None]  # over the baseline of the same run
    gain: Interval | None  # speed-up, after ÷ before
    block_efficiency: tuple[float | None, float | None]

    @property
    def verdict(self) -> str:
        return judged(self.time, below=FASTER, above=SLOWER)

    @property
    def gain_verdict(self) -> str | None:
        """Of the speed-up: that of a method can fall where the baseline became faster."""
        return judged(self.gain, below=SLOWER, above=FASTER) if self.gain is not None else None


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    warnings: list[str]  # why the two may not be comparable
    missing: list[str]  # what only one of them has


def judged(ratio: Interval, below: str, above: str) -> str:
    if ratio.low > 1:
        return above
    return below if ratio.high < 1 else SAME


def compare(a: Result, b: Result) -> Comparison:
    """`a` is before, `b` is after."""
    before, after = ({(s.method, s.point): s for s in known(result)} for result in (a, b))
    changes = [_change(a, b, before[key], after[key]) for key in before if key in after]
    alone = [*_alone(before, after, a, b, "before"), *_alone(after, before, b, a, "after")]
    return Comparison([c for c in changes if c is not None], warnings(a, b), alone)


# ------------------------------------------------------------------ what changed
def _change(a: Result, b: Result, before: Summary, after: Summary) -> Change | None:
    method, point = before.method, before.point
    runs = [(result.of(method, point), result.of(BASELINE, point)) for result in (a, b)]
    time = time_ratio(runs[0][0], runs[1][0], seed=_seed(method, point))
    if time is None:
        return None
    gain = gain_ratio(runs[0], runs[1], seed=_seed(method, point)) if method != BASELINE else None
    return Change(
        method,
        point,
        (before.tokens_per_second, after.tokens_per_second),
        time,
        (before.speedup, after.speedup),
        gain,
        (before.block_efficiency, after.block_efficiency),
    )


def _seed(method: str, point: Point) -> int:
    """Its own for each comparison, so that no draw is the unlucky one of all of them."""
    return zlib.crc32(f"{method} {point}".encode(errors="replace"))


def time_ratio(a: Sequence[Sample], b: Sequence[Sample], seed: int = 0) -> Interval | None:
    """Seconds for a token in `b` ÷ in `a`, over the prompts that both answered in all rounds of theirs.

    Prompts are the same in both and are drawn for both at once; rounds are not, and each draws its own. Of n rounds
    n - 1 are drawn: few rounds vary less among themselves than the next one would from them."""
    one, two = answered(a), answered(b)
    prompts = _common(one, two)
    if not prompts:
        return None
    tables = [tabled(own, _rounds(own), prompts) for own in (one, two)]
    draw = np.random.default_rng(seed)
    chosen = drawn(draw, len(prompts))
    costs = [per_token(t, _draw_rounds(draw, t), chosen) for t in tables]
    return interval((per_token(tables[1]) / per_token(tables[0]))[0], costs[1] / costs[0])


Run = tuple[Sequence[Sample], Sequence[Sample]]  # of a method, and of the baseline beside it


def gain_ratio(a: Run, b: Run, seed: int = 0) -> Interval | None:
    """The speed-up in `b` ÷ in `a`. Within a run a round of the method goes with that of its baseline."""
    own = [[answered(samples) for samples in run] for run in (a, b)]
    prompts = _common(*own[0], *own[1])
    rounds = [sorted(set(_rounds(run[0])) & set(_rounds(run[1]))) for run in own]
    if not prompts or not all(rounds):
        return None
    draw = np.random.default_rng(seed)
    chosen = drawn(draw, len(prompts))
    gains, values = [], []
    for run, numbers in zip(own, rounds, strict=True):
        fast, slow = (tabled(table, numbers, prompts) for table in run)
        at = _draw_rounds(draw, fast)
        gains.append(per_token(slow, at, chosen) / per_token(fast, at, chosen))
        values.append((per_token(slow) / per_token(fast))[0])
    return interval(values[1] / values[0], gains[1] / gains[0])


Answered = Mapping[tuple[int, str], Sample]


def _rounds(own: Answered) -> list[int]:
    return sorted({r for r, _ in own})


def _common(*many: Answered) -> list[str]:
    """Prompts that each has in all of its rounds."""
    whole = []
    for own in many:
        rounds = _rounds(own)
        whole.append({p for _, p in own if all((r, p) in own for r in rounds)})
    return sorted(set.intersection(*whole))


def _draw_rounds(draw: np.random.Generator, table: np.ndarray) -> np.ndarray:
    number = table.shape[1]
    return drawn(draw, number, max(1, number - 1))


# ------------------------------------------------------------------ what keeps them apart
def warnings(a: Result, b: Result) -> list[str]:
    """Why the two may not be comparable, a sentence each."""
    found = [*_others(a.setting, b.setting), *_others(a.provenance, b.provenance)]
    said = [f"Not the same {key}: {told(x)} before, {told(y)} after." for key, x, y in found]
    said += [f"{m} was not set up the same: {told(x)} before, {told(y)} after." for m, x, y in _other_methods(a, b)]
    if other := _other_prompts(a, b):
        said.append(f"{other} prompts have the same id, but not the same number of tokens.")
    if any(len({lap.round for lap in result.laps}) == 1 for result in (a, b)):
        said.append("One round tells nothing of how rounds differ: intervals are of prompts alone, and too narrow.")
    return said


def _others(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What differs, part by part where there are parts."""
    for key in dict.fromkeys([*a, *b]):
        x, y = a.get(key), b.get(key)
        if key in FREE or x == y:
            continue
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from ((f"{inner} ({key})", *pair) for inner, *pair in _others(x, y))
        else:
            yield key, x, y


def _other_methods(a: Result, b: Result) -> Iterator[tuple[str, Any, Any]]:
    one, two = (result.setting.get("methods") for result in (a, b))
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        yield from ((m, one[m], two[m]) for m in one if m in two and one[m] != two[m])


def _other_prompts(a: Result, b: Result) -> int:
    one, two = ({s.prompt: s.prompt_tokens for s in r.samples if s.error is None} for r in (a, b))
    return sum(two.get(prompt, tokens) != tokens for prompt, tokens in one.items())


Measured = Mapping[tuple[str, Point], Summary]


def _alone(own: Measured, other: Measured, a: Result, b: Result, when: str) -> list[str]:
    """What only one of them has."""
    said = [f"{name(m)} at {point} is only in the one {when}." for m, point in own if (m, point) not in other]
    prompts, others = ({s.prompt for s in result.samples} for result in (a, b))
    if left := len(prompts - others):
        said.append(f"{left} of {len(prompts)} prompts are only in the one {when}, and were left out.")
    return said


# ------------------------------------------------------------------ as people read it
def rows(changes: Sequence[Change]) -> list[list[str]]:
    """Cells under `HEADINGS`, for a table on the terminal or in Markdown."""

    def both(pair: tuple[Any, Any], write: Any) -> str:
        return " → ".join(UNKNOWN if value is None else write(value) for value in pair)

    return [
        [
            name(c.method),
            str(c.point),
            both(c.tokens_per_second, number),
            _narrow(c.time),
            c.verdict,
            both(c.speedup, str) if c.method != BASELINE else UNKNOWN,
            _narrow(c.gain) if c.gain is not None else UNKNOWN,
            c.gain_verdict or UNKNOWN,
            both(c.block_efficiency, number),
        ]
        for c in changes
    ]


def _narrow(ratio: Interval) -> str:
    """Changes are small: a digit more than speed-ups have."""
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def verdicts(comparison: Comparison) -> list[str]:
    """What changed, a sentence each; one for all where nothing did."""
    said = [_sentence(c) for c in comparison.changes if c.verdict != SAME]
    if not comparison.changes:
        return ["There is nothing that both have measured."]
    return said or [f"{len(comparison.changes)} compared: {SAME}."]


def _sentence(c: Change) -> str:
    more = "more" if c.verdict == SLOWER else "less"
    return f"{name(c.method)} at {c.point} is {c.verdict}: a token takes {abs(c.time.value - 1):.1%} {more} time."


def markdown(comparison: Comparison) -> str:
    """Verdicts, the table, and what to mind when reading it."""
    changes = comparison.changes
    parts = ["\n".join(f"- {cell(line)}" for line in verdicts(comparison))]
    if changes:
        chance = "An interval of 95% misses once in 20 times: of many rows, some stand out by chance."
        parts += [table(HEADINGS, rows(changes)), chance]
    notes = [*(f"Mind: {line}" for line in comparison.warnings), *comparison.missing]
    parts.append("\n".join(f"- {cell(line)}" for line in notes))
    return "\n\n".join(part for part in parts if part) + "\n"
