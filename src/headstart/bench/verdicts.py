"""What came out of a benchmark, in sentences: the best method first, then how far that carries, then what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.bench.plots import number
from headstart.bench.records import BASELINE, Result
from headstart.bench.summary import Interval, Summary
from headstart.bench.words import PLAIN, WHY, name


def verdicts(result: Result, summaries: Sequence[Summary]) -> list[str]:
    """What came out, the best first: each method where least is asked of the machine, then how far that carries."""
    if not summaries:
        return ["Nothing was measured."]
    first = summaries[0].point
    others = [s for s in summaries if s.method != BASELINE]
    here = sorted((s for s in others if s.point == first), key=lambda s: -s.speedup.value if s.speedup else 0.0)
    said = [verdict(result, s) for s in here] or [_alone(s) for s in summaries if s.point == first]
    said += [line for method in result.methods if (line := _range([s for s in others if s.method == method]))]
    return said + _losses(result, summaries)


def verdict(result: Result, s: Summary) -> str:
    if s.speedup is None:
        return f"{s.method} cannot be compared with {PLAIN} at {s.point}: no request was answered by both."
    gain, answers = s.speedup, _answers(result, s)
    start = f"{s.method} is {times(gain)} at {s.point}"
    if gain.low <= 1 <= gain.high and gain.low < gain.high:
        start += ", no difference that is more than noise"
    return f"{start}; {answers}." if answers else f"{start}."


def times(gain: Interval) -> str:
    sure = f"({gain.low:.2f} to {gain.high:.2f})" if gain.low < gain.high else "(one request, so there is no interval)"
    return f"{gain.value:.2f} times as fast as {PLAIN} {sure}"


def _answers(result: Result, s: Summary) -> str:
    same, number = identical(result, s)
    if not number:
        return ""
    return f"all {number} answers are identical" if same == number else f"{same} of {number} answers are identical"


def identical(result: Result, s: Summary) -> tuple[int, int]:
    """How many answers are the baseline's, of how many that have one to be compared with."""
    base = {(one.round, one.prompt) for one in result.of(BASELINE, s.point)}
    pairs = sum((one.round, one.prompt) in base for one in result.of(s.method, s.point))
    return round((s.identical or 0.0) * pairs), pairs


def _alone(s: Summary) -> str:
    return f"{name(s.method)} writes {number(s.tokens_per_second)} tokens/s at {s.point}; there is nothing to compare it with."


def _range(own: Sequence[Summary]) -> str | None:
    gains = sorted((s.speedup.value, str(s.point)) for s in own if s.speedup)
    if len(gains) < 2:
        return None
    (low, where), (high, there) = gains[0], gains[-1]
    return (
        f"{own[0].method} over all {len(gains)} points: from {low:.2f} times ({where}) to {high:.2f} times ({there})."
    )


def _losses(result: Result, summaries: Sequence[Summary]) -> list[str]:
    failed, asked = sum(s.failed for s in summaries), sum(s.requests + s.failed for s in summaries)
    said = [f"{failed} of {asked} requests failed."] if failed else []
    if result.differences:
        counts = {why: sum(d.near_tie is tie for d in result.differences) for tie, why in WHY.items()}
        parts = ", ".join(f"{why}: {count}" for why, count in counts.items() if count)
        said.append(f"Answers that part from {PLAIN}'s: {len(result.differences)} ({parts}).")
    return said
