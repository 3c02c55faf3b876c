"""Numbers from samples. Every metric is defined here, once, for all engines; docs/bench.md says the same in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from headstart.bench.records import BASELINE, Counts, Lap, Point, Result, Sample

RESAMPLES = 2000
SURE = 0.95  # of intervals
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Summary:
    """One method at one point. None: the engine does not tell, or there is nothing to compare with."""

    method: str
    point: Point
    requests: int
    failed: int
    tokens: int
    tokens_per_second: float  # of a lap, all requests together
    ms_per_token: float | None  # of one request, behind its first tokens
    first_ms: Mapping[int, float]  # to the first token, by percentile
    latency_ms: Mapping[int, float]  # to the last, by percentile
    speedup: Interval | None  # how many times faster a request comes to its end than with the baseline, by token
    identical: float | None  # share of answers that are the baseline's
    acceptance_rate: float | None  # α: accepted ÷ drafted
    acceptance_by_position: Sequence[float] | None  # share of drafts whose i-th token was accepted
    block_efficiency: float | None  # τ: tokens for each target forward
    draft_length: float | None  # γ: tokens of a draft, as a mean
    draft_overhead: float | None  # share of the time that goes into drafting
    mbsu: float | None  # memory-bound speed-up: τ ÷ (c·γ + 1)
    relative_cost: float | None  # time of a token ÷ the baseline's
    memory: int | None
    joules_per_token: float | None

    @property
    def block_limit(self) -> float | None:
        """The most that block efficiency can be: γ + 1."""
        return self.draft_length + 1 if self.draft_length is not None else None


# ------------------------------------------------------------------ all of it
def summarise(result: Result) -> list[Summary]:
    return [_summary(result, method, point) for point in result.points() for method in result.methods]


def _summary(result: Result, method: str, point: Point) -> Summary:
    samples, laps = result.of(method, point), list(result.laps_of(method, point))
    base = result.of(BASELINE, point)
    counts = counted(samples, laps)
    gain = speedup(base, samples) if method != BASELINE else None
    tokens = sum(s.tokens for s in samples)
    joules = [lap.joules for lap in laps if lap.joules is not None]
    return Summary(
        method=method,
        point=point,
        requests=len(samples),
        failed=sum(s.method == method and s.point == point and s.error is not None for s in result.samples),
        tokens=tokens,
        tokens_per_second=median([lap.tokens / lap.seconds for lap in laps if lap.seconds > 0] or [0.0]),
        ms_per_token=ms_per_token(samples),
        first_ms=percentiles([1e3 * s.first_seconds for s in samples]),
        latency_ms=percentiles([1e3 * s.seconds for s in samples]),
        speedup=gain,
        identical=same(base, samples) if method != BASELINE else None,
        acceptance_rate=_ratio(counts.accepted, counts.drafted),
        acceptance_by_position=_by_position(counts),
        block_efficiency=_ratio(tokens, counts.steps),
        draft_length=_ratio(counts.drafted, counts.drafts),
        draft_overhead=_ratio(counts.draft_seconds, _work_seconds(counts)),
        mbsu=mbsu(tokens, counts, counted(base, list(result.laps_of(BASELINE, point)))),
        relative_cost=1 / gain.value if gain is not None and gain.value > 0 else None,
        memory=max((lap.memory for lap in laps if lap.memory is not None), default=None),
        joules_per_token=sum(joules) / tokens if joules and tokens else None,
    )


def by_category(result: Result, method: str, point: Point) -> dict[str, Interval]:
    """The speed-up of each kind of prompt."""
    base, own = _groups(result.of(BASELINE, point)), _groups(result.of(method, point))
    found = {name: speedup(base[name], own[name]) for name in own if name in base}
    return {name: gain for name, gain in found.items() if gain is not None}


def by_depth(
    result: Result, method: str, point: Point, edges: Sequence[int] = (0, 128, 512, 2048)
) -> dict[str, Interval]:
    """The speed-up by how long the prompt is, in tokens."""

    def within(samples: Iterable[Sample], low: int, high: float) -> list[Sample]:
        return [s for s in samples if low <= s.prompt_tokens < high]

    base, own, out = result.of(BASELINE, point), result.of(method, point), {}
    for low, high in zip(edges, [*edges[1:], float("inf")], strict=True):
        gain = speedup(within(base, low, high), within(own, low, high))
        if gain is not None:
            out[f"from {low}" if high == float("inf") else f"{low} to {high - 1:.0f}"] = gain
    return out


def _groups(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    out: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        out[sample.category].append(sample)
    return out


# ------------------------------------------------------------------ speed
def speedup(base: Sequence[Sample], other: Sequence[Sample], seed: int = 0) -> Interval | None:
    """Seconds for a token of the baseline ÷ the method's, over prompts that both have answered in the same rounds.

    Of n rounds n - 1 are drawn, since few of them differ less among themselves than the next one would from them.
    The interval tells what other prompts and other rounds could have brought: both are drawn anew (bootstrap)."""
    pairs = _paired(base, other)
    if pairs is None:
        return None
    slow, fast = pairs  # (seconds and tokens, rounds, prompts)
    draw = np.random.default_rng(seed)
    rounds, prompts = drawn(draw, slow.shape[1], slow.shape[1] - 1), drawn(draw, slow.shape[2])
    value = per_token(slow) / per_token(fast)
    return interval(value[0], per_token(slow, rounds, prompts) / per_token(fast, rounds, prompts))


def drawn(draw: np.random.Generator, number: int, size: int | None = None) -> np.ndarray:
    """How often each of so many comes up in each resample: (resamples, number)."""
    return draw.multinomial(size or number, np.full(number, 1 / number), size=RESAMPLES)


def per_token(table: np.ndarray, rounds: np.ndarray | None = None, prompts: np.ndarray | None = None) -> np.ndarray:
    """Seconds for a token, of a table as it is or as each resample has it. Of each prompt the median of its rounds counts: one
    round that something disturbed does not."""
    ones = [np.ones((1, n), dtype=int) for n in table.shape[1:]]
    rounds, prompts = ones[0] if rounds is None else rounds, ones[1] if prompts is None else prompts
    kinds, which = np.unique(rounds, axis=0, return_inverse=True)  # of few rounds there are few ways to draw some
    middle = np.stack([np.median(np.repeat(table, kind, axis=1), axis=1) for kind in kinds], axis=1)
    seconds, tokens = ((part[which.reshape(-1)] * prompts).sum(1) for part in middle)
    return seconds / tokens


def interval(value: float, resampled: np.ndarray) -> Interval:
    tail = 100 * (1 - SURE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(float(value), float(low), float(high))


def _paired(base: Sequence[Sample], other: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray] | None:
    """Two tables of seconds and tokens, by round and prompt, of what both have in all rounds."""
    tables = [answered(samples) for samples in (base, other)]
    rounds = sorted({r for r, _ in tables[0]} & {r for r, _ in tables[1]})
    prompts = sorted(p for p in {p for _, p in tables[0]} if all((r, p) in t for r in rounds for t in tables))
    if not rounds or not prompts:
        return None
    return tabled(tables[0], rounds, prompts), tabled(tables[1], rounds, prompts)


def answered(samples: Iterable[Sample]) -> dict[tuple[int, str], Sample]:
    """By round and prompt: an answer without tokens has no time for a token."""
    return {(s.round, s.prompt): s for s in samples if s.tokens > 0}


def tabled(of: Mapping[tuple[int, str], Sample], rounds: Sequence[int], prompts: Sequence[str]) -> np.ndarray:
    """(seconds and tokens, rounds, prompts)"""
    rows = [[(of[r, p].seconds, of[r, p].tokens) for p in prompts] for r in rounds]
    return np.moveaxis(np.array(rows, dtype=float), 2, 0)


def ms_per_token(samples: Sequence[Sample]) -> float | None:
    seconds = sum(s.seconds - s.first_seconds for s in samples)
    tokens = sum(s.tokens - s.first_tokens for s in samples)
    return 1e3 * seconds / tokens if tokens > 0 else None


def percentiles(values: Sequence[float]) -> dict[int, float]:
    return {p: float(np.percentile(values, p)) for p in PERCENTILES} if values else {}


# ------------------------------------------------------------------ the same output
def same(base: Sequence[Sample], other: Sequence[Sample]) -> float | None:
    """The share of answers that are the baseline's, token by token where tokens are told."""
    known = {(s.round, s.prompt): s for s in base}
    pairs = [(known[s.round, s.prompt], s) for s in other if (s.round, s.prompt) in known]
    return sum(parting(a, b) is None for a, b in pairs) / len(pairs) if pairs else None


def parting(a: Sample, b: Sample) -> int | None:
    """How many tokens (characters, where tokens are not told) two answers share before they differ; None: they are the same."""
    told = a.token_ids is not None and b.token_ids is not None
    one, two = (a.token_ids, b.token_ids) if told else (a.text, b.text)
    assert one is not None and two is not None
    return first_difference(one, two)


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first place at which they are not the same; None when both are identical."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ------------------------------------------------------------------ speculation
def counted(samples: Sequence[Sample], laps: Sequence[Lap]) -> Counts:
    """What the laps tell, else the sum of what the requests tell."""
    whole = [lap.counts for lap in laps if lap.counts is not None]
    return Counts.total(whole) if whole and len(whole) == len(laps) else Counts.total([s.counts for s in samples])


def mbsu(tokens: int, counts: Counts, plain: Counts) -> float | None:
    """τ ÷ (c·γ + 1), where c is what one token of a draft takes, of what a plain target forward takes."""
    efficiency, length = _ratio(tokens, counts.steps), _ratio(counts.drafted, counts.drafts)
    token, forward = _ratio(counts.draft_seconds, counts.drafted), _ratio(plain.target_seconds, plain.steps)
    if efficiency is None or length is None or token is None or not forward:
        return None
    return efficiency / (token / forward * length + 1)


def _by_position(counts: Counts) -> list[float] | None:
    if counts.by_position is None or not counts.drafts:
        return None
    return [accepted / counts.drafts for accepted in counts.by_position]


def _work_seconds(counts: Counts) -> float | None:
    known = counts.draft_seconds, counts.target_seconds
    return None if known[0] is None or known[1] is None else known[0] + known[1]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
