"""Plots as SVG, by hand: pure functions from numbers to text.

They follow the page's light and dark by CSS variables, need no library, and are narrow enough for a telephone.
Colour never stands alone: bars have their names beside them, lines have marks and dashes of their own."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 26, 44  # around a plot of lines
ROW, HEADING = 19, 22  # of bars
LETTER = 7.9  # wide, about, where letters are largest: on a telephone
LONGEST = 18  # letters of a name beside a bar
STYLES = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 4", "6 2 1 2 1 2")
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Bar:
    group: str
    name: str
    value: float
    low: float
    high: float
    style: int = 0


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0


@dataclass(frozen=True)
class Axis:
    """From what is measured to a share of the plot's width or height."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    write: Callable[[float], str]
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)

    def has(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)


# ------------------------------------------------------------------ words
def escape(text: object) -> str:
    """For HTML and for XML, which does not have all characters."""
    return html.escape(NOT_XML.sub("\ufffd", str(text)))


def short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: float) -> str:
    """Three digits that matter, or all of those before the point."""
    if not math.isfinite(value):
        return "?"
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}" if size >= 0.001 else f"{value:.2g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def metric(value: float) -> str:
    """1.2 G for 1,200,000,000."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


# ------------------------------------------------------------------ axes
def linear(label: str, values: Iterable[float], write: Callable[[float], str] | None = None, most: int = 6) -> Axis:
    """From zero to a round number above all values."""
    top = max((v for v in values if math.isfinite(v)), default=0.0)
    ticks = nice(top if top > 0 else 1.0, most)
    return Axis(label, 0.0, ticks[-1], ticks, write or _plain)


def nice(top: float, most: int) -> list[float]:
    """Round numbers from zero to the first that is not below `top`."""
    scale = 10.0 ** math.floor(math.log10(top / most))
    step = next(scale * s for s in (1, 2, 2.5, 5, 10, 20) if math.ceil(top / (scale * s) - 1e-9) < most)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def powers_of_two(label: str, values: Iterable[float]) -> Axis:
    own = [v for v in values if v > 0]
    low, high = math.floor(math.log2(min(own))), math.ceil(math.log2(max(own)))
    ticks = [2.0**i for i in range(low, max(high, low + 1) + 1)]
    return Axis(label, ticks[0], ticks[-1], ticks, _plain, log=True)


def logarithmic(label: str, values: Iterable[float], write: Callable[[float], str] | None = None) -> Axis:
    """Whole powers of ten around all values."""
    own = [v for v in values if v > 0 and math.isfinite(v)]
    low, high = math.floor(math.log10(min(own))), math.ceil(math.log10(max(own)))
    ticks = [10.0**i for i in range(low, max(high, low + 1) + 1)]
    every = math.ceil(len(ticks) / 7)
    return Axis(label, ticks[0], ticks[-1], ticks[::every], write or _plain, log=True)


def _plain(value: float) -> str:
    if value < 10_000:
        return f"{value:.6g}"
    return f"{value / 1000:g}k" if value < 1_000_000 else f"{value / 1_000_000:g}M"


# ------------------------------------------------------------------ pieces
def _svg(title: str, height: float, inside: Iterable[str]) -> str:
    body = "".join(inside)
    return (
        f'<svg class="plot" role="img" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _path(points: Iterable[tuple[float, float]], kind: str, dashes: str = "") -> str:
    way = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return f'<path d="{way}" class="{kind}"' + (f' stroke-dasharray="{dashes}"' if dashes else "") + "/>"


def colour(style: int) -> str:
    """A class of the style sheet."""
    return f"s{style % STYLES}"


def _own(style: int) -> int:
    """Of marks and dashes: colours that come again come with others."""
    return (style + style // STYLES) % STYLES


def mark(style: int, x: float, y: float, r: float = 4.5) -> str:
    """A shape for each method."""
    shapes = (
        f"M{-r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",  # circle
        f"M{-r} {-r}h{2 * r}v{2 * r}h{-2 * r}z",  # square
        f"M0 {-1.2 * r}L{1.2 * r} {r}H{-1.2 * r}z",  # triangle
        f"M0 {-1.4 * r}L{1.4 * r} 0L0 {1.4 * r}L{-1.4 * r} 0z",  # diamond
        f"M0 {1.2 * r}L{1.2 * r} {-r}H{-1.2 * r}z",  # triangle, upside down
        f"M{-r / 3} {-r}h{2 * r / 3}v{2 * r / 3}h{2 * r / 3}v{2 * r / 3}h{-2 * r / 3}v{2 * r / 3}h{-2 * r / 3}"
        f"v{-2 * r / 3}h{-2 * r / 3}v{-2 * r / 3}h{2 * r / 3}z",  # plus
        f"M{-r} {-r}L{r} {r}V{-r}L{-r} {r}z",  # bow tie
        f"M{-r} {-r}L{r} {r}H{-r}L{r} {-r}z",  # hourglass
    )
    return f'<path d="{shapes[_own(style)]}" transform="translate({x:.1f} {y:.1f})" class="mark"/>'


def legend(names: Sequence[tuple[str, int]]) -> str:
    """HTML, which breaks lines by itself."""
    own = (
        f'<li class="{colour(style)}"><svg class="key" aria-hidden="true" viewBox="0 0 30 14" width="30" height="14">'
        f"{_path([(0, 7), (30, 7)], 'curve', DASHES[_own(style)])}{mark(style, 15, 7)}</svg> {escape(name)}</li>"
        for name, style in names
    )
    return f'<ul class="legend">{"".join(own)}</ul>'


# ------------------------------------------------------------------ plots
def bars(title: str, many: Sequence[Bar], even: float | None = 1.0) -> str:
    """Lying bars with their intervals, group by group; a line where nothing is gained."""
    known = [bar for bar in many if math.isfinite(bar.value)]
    groups = list(dict.fromkeys(bar.group for bar in known))
    left = 12 + LETTER * max((len(short(bar.name)) for bar in known), default=0)
    axis = linear("", [*(max(bar.value, bar.high) for bar in known), even or 0], most=5)

    def x(value: float) -> float:
        return left + (WIDTH - 40 - left) * axis.at(min(max(value, axis.low), axis.high))

    y, drawn = 4.0, []
    for group in groups:
        drawn.append(_text(0, y + 15, short(group, 50), kind="group"))
        y += HEADING
        for bar in (b for b in known if b.group == group):
            drawn.append(_bar(bar, x, left, y))
            y += ROW
        y += 4
    grid = [_line(x(t), 4, x(t), y, "grid") + _text(x(t), y + 15, axis.write(t), "middle") for t in axis.ticks]
    middle = [] if even is None else [_line(x(even), 4, x(even), y, "even")]
    return _svg(title, y + 22, [*grid, *middle, *drawn])


def _bar(bar: Bar, x: Callable[[float], float], left: float, y: float) -> str:
    told = f"{bar.group}, {bar.name}: {bar.value:.2f} ({bar.low:.2f} to {bar.high:.2f})"
    middle = y + ROW / 2
    whiskers = ""
    if bar.high > bar.low:
        ends = "".join(_line(x(v), middle - 4, x(v), middle + 4, "whisker") for v in (bar.low, bar.high))
        whiskers = _line(x(bar.low), middle, x(bar.high), middle, "whisker") + ends
    return (
        f'<g class="{colour(bar.style)}"><title>{escape(told)}</title>{_text(left - 7, middle + 4, short(bar.name), "end")}'
        f'<rect x="{left:.1f}" y="{y + 2:.1f}" width="{x(bar.value) - left:.1f}" height="{ROW - 4}" class="bar"/>{whiskers}'
        f"{_text(x(max(bar.value, bar.high)) + 6, middle + 4, f'{bar.value:.2f}', kind='value')}</g>"
    )


def lines(title: str, many: Sequence[Series], x: Axis, y: Axis) -> str:
    """A line with marks for each series."""
    return _svg(title, HEIGHT, [*_frame(x, y), *(_curve(one, x, y) for one in many)])


def scatter(title: str, many: Sequence[Series], x: Axis, y: Axis, roofs: Sequence[Series] = ()) -> str:
    """Marks alone, under roofs: straight lines with their names on them."""
    drawn = []
    for roof in roofs:
        start, end = (_place(x, y, p) for p in roof.points)
        drawn += [_path([start, end], "roof"), _along(roof.name, start, end)]
    return _svg(title, HEIGHT, [*_frame(x, y), *drawn, *(_curve(one, x, y, line=False) for one in many)])


def _along(words: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    """Words that lie on a line."""
    angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    at = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    turn = f"translate({at[0]:.1f} {at[1]:.1f}) rotate({angle:.1f})"
    return f'<text transform="{turn}" y="-6" text-anchor="middle">{escape(words)}</text>'


def _place(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    return LEFT + wide * x.at(point[0]), HEIGHT - BOTTOM - high * y.at(point[1])


def _frame(x: Axis, y: Axis) -> list[str]:
    """Grid, numbers and names of the axes."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    out = [_text(0, 12, y.label), _text((LEFT + right) / 2, HEIGHT - 6, x.label, "middle")]
    for tick in y.ticks:
        at = _place(x, y, (x.low, tick))[1]
        out += [_line(LEFT, at, right, at, "grid"), _text(LEFT - 7, at + 4, y.write(tick), "end")]
    for tick in x.ticks:
        at = _place(x, y, (tick, y.low))[0]
        out += [_line(at, bottom, at, bottom + 4, "tick"), _text(at, bottom + 18, x.write(tick), "middle")]
    return [*out, _line(LEFT, bottom, right, bottom, "tick")]


def _curve(one: Series, x: Axis, y: Axis, line: bool = True) -> str:
    known = [p for p in one.points if x.has(p[0]) and y.has(p[1])]
    marks = []
    for point in known:
        told = f"{one.name}: {x.label} {x.write(point[0])}, {y.label} {_exact(y, point[1])}"
        marks.append(f"<g><title>{escape(told)}</title>{mark(one.style, *_place(x, y, point))}</g>")
    way = _path([_place(x, y, p) for p in known], "curve", DASHES[_own(one.style)]) if line and len(known) > 1 else ""
    return f'<g class="{colour(one.style)}">{way}{"".join(marks)}</g>'


def _exact(axis: Axis, value: float) -> str:
    return number(value) if axis.write is _plain else axis.write(value)
