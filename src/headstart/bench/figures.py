"""The figures of a result: which numbers are drawn, and how. A figure for which too little is known is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headstart.bench import plots
from headstart.bench.plots import Bar, Series, escape, percent
from headstart.bench.records import BASELINE, Point, Result
from headstart.bench.summary import Interval, Summary, by_category, by_depth
from headstart.bench.words import PLAIN, name

WIDE = 20  # times the least: the axis is a logarithmic one
LEFT_OUT = {  # why there is none
    "Speed-up": f"there is {PLAIN} alone, or it is missing",
    "Speed-up by category": "there are no categories to tell apart, or nothing to compare with",
    "Throughput": "it was measured at one number of requests at once",
    "Acceptance by position": "no engine told it, or nothing was drafted",
    "Speed-up by tokens of the prompt": "all prompts are about as long, or there is nothing to compare with",
    "Roofline": "what the machine's memory and compute units can do is not known",
}


@dataclass(frozen=True)
class Figure:
    """A plot that waits for its title."""

    caption: str  # what its numbers are
    draw: Callable[[str], str]
    legend: str = ""
    below: str = ""


def figures(result: Result, summaries: Sequence[Summary]) -> dict[str, list[Figure]]:
    """By title, the same ones for every result; where a list is empty, `LEFT_OUT` says why."""
    styles = {m: i for i, m in enumerate([BASELINE, *(m for m in result.methods if m != BASELINE)])}
    return {
        "Speed-up": _gains(summaries, styles),
        "Speed-up by category": _by_kind(result, styles, by_category),
        "Throughput": _throughput(summaries, styles),
        "Acceptance by position": _acceptance(result, summaries, styles),
        "Speed-up by tokens of the prompt": _by_kind(result, styles, by_depth),
        "Roofline": _roofline(result.roofline, styles),
    }


def _temperatures(summaries: Iterable[Summary]) -> dict[float, list[Summary]]:
    out: dict[float, list[Summary]] = {}
    for s in summaries:
        out.setdefault(s.point.temperature, []).append(s)
    return out


def _gains(summaries: Sequence[Summary], styles: Mapping[str, int]) -> list[Figure]:
    out = []
    for temperature, own in _temperatures(summaries).items():
        many = [_bar(f"{s.point.concurrency} at once", s.method, s.speedup, styles) for s in own if s.speedup]
        if many:
            out.append(Figure(f"times as fast as {PLAIN}, temperature {temperature:g}", partial(plots.bars, many=many)))
    return out


def _bar(group: str, method: str, gain: Interval, styles: Mapping[str, int]) -> Bar:
    return Bar(group, method, gain.value, gain.low, gain.high, styles[method])


def _throughput(summaries: Sequence[Summary], styles: Mapping[str, int]) -> list[Figure]:
    out = []
    for temperature, own in _temperatures(summaries).items():
        numbers, speeds = [s.point.concurrency for s in own], [s.tokens_per_second for s in own]
        if len(set(numbers)) < 2:
            continue
        many = [
            Series(name(m), [(s.point.concurrency, s.tokens_per_second) for s in own if s.method == m], i)
            for m, i in styles.items() if any(s.method == m for s in own)
        ]  # fmt: skip
        wide = 0 < WIDE * min(speeds) < max(speeds)  # then small ones would lie on the ground
        y = plots.logarithmic("tokens/s", speeds) if wide else plots.linear("tokens/s", speeds)
        caption = f"tokens/s of all requests together, temperature {temperature:g}"
        out.append(_lines(caption, many, plots.powers_of_two("requests at once", numbers), y))
    return out


def _lines(caption: str, many: Sequence[Series], x: plots.Axis, y: plots.Axis) -> Figure:
    legend = plots.legend([(one.name, one.style) for one in many])
    return Figure(caption, partial(plots.lines, many=many, x=x, y=y), legend)


def _acceptance(result: Result, summaries: Sequence[Summary], styles: Mapping[str, int]) -> list[Figure]:
    out = []
    for point in _fronts(result):
        own = {s.method: s.acceptance_by_position for s in summaries if s.point == point and s.acceptance_by_position}
        if not own:
            continue
        many = [Series(name(m), [(i + 1, p) for i, p in enumerate(shares)], styles[m]) for m, shares in own.items()]
        deepest = max(len(shares) for shares in own.values())
        every = math.ceil(deepest / 12)
        x = plots.Axis("position in the draft", 0.5, deepest + 0.5, range(1, deepest + 1, every), lambda v: f"{v:.0f}")
        y = plots.Axis("accepted", 0, 1, (0, 0.25, 0.5, 0.75, 1), percent)
        out.append(_lines(f"share of drafts whose i-th token was accepted, {point}", many, x, y))
    return out


def _fronts(result: Result) -> list[Point]:
    """Of each temperature, the point with the fewest requests at once."""
    first: dict[float, Point] = {}
    for point in result.points():
        first.setdefault(point.temperature, point)
    return list(first.values())


def _by_kind(result: Result, styles: Mapping[str, int], split: Callable[..., dict[str, Interval]]) -> list[Figure]:
    """Bars in groups of one kind of prompts each."""
    out = []
    for point in _fronts(result):
        gains = {m: split(result, m, point) for m in styles if m != BASELINE}
        kinds = list(dict.fromkeys(kind for own in gains.values() for kind in own))
        many = [_bar(kind, m, own[kind], styles) for kind in kinds for m, own in gains.items() if kind in own]
        if len(kinds) > 1:
            out.append(Figure(f"times as fast as {PLAIN}, {point}", partial(plots.bars, many=many)))
    return out


# ------------------------------------------------------------------ the roofline
def _roofline(known: Mapping[str, Any] | None, styles: Mapping[str, int]) -> list[Figure]:
    try:
        bandwidth, peak, marks = float(known["bandwidth"]), float(known["peak"]), _marks(known)  # type: ignore[index,arg-type]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return []
    if not marks or not (0 < bandwidth < math.inf and 0 < peak < math.inf):
        return []
    ridge = peak / bandwidth
    x = plots.logarithmic("flop for each byte read", [ridge / 3, ridge * 10, *(a / 2 for a, _ in marks.values())])
    y = plots.logarithmic("flop/s", [peak * 2, bandwidth * x.low, *(b for _, b in marks.values())], plots.metric)
    roofs = (
        Series(f"memory: {plots.metric(bandwidth)}B/s", [(x.low, bandwidth * x.low), (ridge, peak)]),
        Series(f"compute: {plots.metric(peak)}flop/s", [(ridge, peak), (x.high, peak)]),
    )
    many = [Series(name(m), [at], styles.get(m, len(styles))) for m, at in marks.items()]
    legend = plots.legend([(one.name, one.style) for one in many])
    said = "".join(f"<li>{escape(_reach(name(m), at, bandwidth, peak))}</li>" for m, at in marks.items())
    draw = partial(plots.scatter, many=many, x=x, y=y, roofs=roofs)
    below = f'<ul class="said">{said}</ul>'
    return [Figure("what a forward reaches, under what the machine allows", draw, legend, below)]


def _marks(known: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each method: flop for each byte, and flop/s."""
    own = {}
    for method, point in known["points"].items():
        flops = float(known["flops_per_token"]) * float(point["rows"])
        own[method] = flops / float(known["weights"]), flops / float(point["seconds"])
    return {method: at for method, at in own.items() if 0 < min(at) <= max(at) < math.inf}


def _reach(who: str, at: tuple[float, float], bandwidth: float, peak: float) -> str:
    roof, limit = min((at[0] * bandwidth, "the memory allows"), (peak, "the compute units allow"))
    return f"{who} reaches {percent(at[1] / roof)} of what {limit}."
