"""A result as people read it: one HTML file that needs nothing else, and a short Markdown for a pull request.

Whatever comes from data is escaped here: names of methods and prompts may hold anything."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from statistics import median
from typing import Any

from headstart.bench import plots
from headstart.bench.plots import Bar, Series, escape, number, percent
from headstart.bench.records import BASELINE, Difference, Point, Result, Sample
from headstart.bench.summary import Interval, Summary, by_category, by_depth, summarise

Column = tuple[str, Callable[[Summary], str | None]]
UNKNOWN = "–"
SHOWN_PROMPTS, SHOWN_FAILURES, SHOWN_DIFFERENCES = 200, 20, 100
LONG = 400  # letters that are folded
WIDE = 20  # times the least: the axis is a logarithmic one
PLAIN = "plain decoding"
WHY = {True: "near-tie", False: "more than rounding explains", None: "why is not known"}
# In the words of `summary`, where each is computed; a test holds them together.
DEFINITIONS = {
    "tokens/s": "of a lap, all requests together",
    "ms per token": "of one request, behind its first tokens",
    "first token": "time to the first token, by percentile",
    "latency": "time to the last, by percentile",
    "speed-up": "how many times faster a request comes to its end than with the baseline, by token",
    "its interval": "95%; tells what other prompts and other rounds could have brought: both are drawn anew (bootstrap)",
    "identical": "The share of answers that are the baseline's, token by token where tokens are told",
    "acceptance": "α: accepted ÷ drafted",
    "acceptance by position": "share of drafts whose i-th token was accepted",
    "block efficiency": "τ: tokens for each target forward",
    "limit": "The most that block efficiency can be: γ + 1",
    "draft length": "γ: tokens of a draft, as a mean",
    "drafting": "share of the time that goes into drafting",
    "MBSU": "memory-bound speed-up: τ ÷ (c·γ + 1), where c is what one token of a draft takes, of what a plain target "
    "forward takes",
    "relative cost": "time of a token ÷ the baseline's",
}
LEFT_OUT = {
    "Speed-up": f"there is {PLAIN} alone, or it is missing",
    "Speed-up by category": "there are no categories to tell apart, or nothing to compare with",
    "Throughput": "it was measured at one number of requests at once",
    "Acceptance by position": "no engine told it, or nothing was drafted",
    "Speed-up by tokens of the prompt": "all prompts are about as long, or there is nothing to compare with",
    "Roofline": "what the machine's memory and compute units can do is not known",
}
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
"""


# ------------------------------------------------------------------ words
def html(result: Result) -> str:
    """One file with all of it but the samples, which are in the JSON. It asks for nothing over the network."""
    summaries = known(result)
    title = escape(f"Headstart bench: {told(result.setting.get('model', 'results'))}")
    style = resources.files("headstart").joinpath("bench", "report.css").read_text(encoding="utf-8")
    parts = (
        _verdict(result, summaries),
        _plots(result, summaries),
        _tables(result, summaries),
        _same_output(result, summaries),
        _failures(result),
        _provenance(result),
        _prompts(result),
        _definitions(),
    )
    head = HEAD.format(title=title, style=style)
    top = f'<header><h1>{title}</h1><p class="quiet">{escape(_about(result))}</p></header>'
    return f"{head}{top}\n<main>\n{''.join(f'{part}{chr(10)}' for part in parts if part)}</main>\n</body>\n</html>\n"


def markdown(result: Result) -> str:
    """What a pull request needs: what came out, one table, how to run it again, and where it was run."""
    summaries = known(result)
    said = "\n".join(f"- {cell(line)}" for line in verdicts(result, summaries))
    columns = SHORT
    rows = [[name(s.method), str(s.point), *(take(s) or UNKNOWN for _, take in columns)] for s in summaries]
    parts = [said, table(["method", "point", *(heading for heading, _ in columns)], rows) if rows else ""]
    if command := result.provenance.get("argv"):
        parts.append(fenced(_command(command)))
    parts.append(cell(_machine(result)))
    return "\n\n".join(part for part in parts if part) + "\n"


def known(result: Result) -> list[Summary]:
    """Not every method need have run at every point."""
    return [s for s in summarise(result) if s.requests or s.failed]


def name(method: str) -> str:
    return PLAIN if method == BASELINE else method


def told(value: Any) -> str:
    """What a free form holds, in one line."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} ({told(v)})" if isinstance(v, Mapping) else f"{k} {told(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(f"({told(v)})" if isinstance(v, (list, tuple, Mapping)) else told(v) for v in value)
    return str(value)


def _command(argv: Any) -> str:
    return shlex.join(str(part) for part in argv) if isinstance(argv, (list, tuple)) else str(argv)


def _about(result: Result) -> str:
    known = result.setting | result.provenance
    return " · ".join(told(known[key]) for key in ("engine", "workload", "machine", "when", "date") if known.get(key))


def _machine(result: Result) -> str:
    own = result.provenance
    said = [f"{key} {told(own[key])}" for key in ("versions", "commit", "load") if own.get(key) is not None]
    return "; ".join(([told(own["machine"])] if own.get("machine") else []) + said)


# ------------------------------------------------------------------ verdicts
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


# ------------------------------------------------------------------ numbers of a table
def _some(value: float | None, write: Callable[[float], str] = number) -> str | None:
    return None if value is None else write(value)


def _share_identical(value: float) -> str:
    """Rounded down: 100% is said of all of them alone."""
    return "100%" if value == 1 else f"{math.floor(1000 * value) / 10:.1f}%"


def _three(values: Mapping[int, float]) -> str | None:
    return " / ".join(number(v) for v in values.values()) or None


SPEED: list[Column] = [
    ("tokens/s", lambda s: number(s.tokens_per_second)),
    ("speed-up", lambda s: str(s.speedup) if s.speedup else None),
    ("relative cost", lambda s: _some(s.relative_cost)),
    ("ms per token", lambda s: _some(s.ms_per_token)),
    ("first token, ms: p50 / p90 / p99", lambda s: _three(s.first_ms)),
    ("latency, ms: p50 / p90 / p99", lambda s: _three(s.latency_ms)),
    ("memory", lambda s: _some(s.memory, lambda size: plots.metric(size) + "B")),
    ("J per token", lambda s: _some(s.joules_per_token)),
    ("requests", lambda s: f"{s.requests:,}"),
    ("failed", lambda s: f"{s.failed:,}"),
    ("tokens", lambda s: f"{s.tokens:,}"),
]
SPECULATION: list[Column] = [
    ("identical", lambda s: _some(s.identical, _share_identical)),
    ("acceptance α", lambda s: _some(s.acceptance_rate, percent)),
    ("block efficiency τ", lambda s: _some(s.block_efficiency)),
    ("limit γ + 1", lambda s: _some(s.block_limit)),
    ("draft length γ", lambda s: _some(s.draft_length)),
    ("drafting", lambda s: _some(s.draft_overhead, percent)),
    ("MBSU", lambda s: _some(s.mbsu)),
    ("acceptance by position", lambda s: " ".join(percent(p) for p in (s.acceptance_by_position or [])[:8]) or None),
]
SHORT: list[Column] = [
    ("tokens/s", lambda s: number(s.tokens_per_second)),
    ("speed-up", lambda s: str(s.speedup) if s.speedup else None),
    ("block efficiency", lambda s: _some(s.block_efficiency)),
    ("acceptance", lambda s: _some(s.acceptance_rate, percent)),
    ("ms to first token, p50", lambda s: _some(s.first_ms.get(50))),
    ("identical", lambda s: _some(s.identical, _share_identical)),
]


# ------------------------------------------------------------------ Markdown
def cell(text: str) -> str:
    """Text that Markdown takes as it is, in a table too."""
    flat = " ".join(plots.NOT_XML.sub("\ufffd", text).split())
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat).replace("&", "&amp;").replace("<", "&lt;")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---", "---", *["---:"] * (len(headings) - 2)]]
    return "\n".join(
        [f"| {' | '.join(cell(h) for h in lines[0])} |", f"|{'|'.join(lines[1])}|"]
        + [f"| {' | '.join(cell(one) for one in row)} |" for row in rows]
    )


def fenced(text: str) -> str:
    text = plots.NOT_XML.sub("\ufffd", text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


# ------------------------------------------------------------------ sections
def _section(heading: str, *inside: str) -> str:
    return f"<section><h2>{heading}</h2>{''.join(inside)}</section>"


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _verdict(result: Result, summaries: Sequence[Summary]) -> str:
    lead, *more = verdicts(result, summaries)
    rest = "".join(f"<li>{escape(line)}</li>" for line in more)
    return (
        f'<section><p class="lead">{escape(lead)}</p>'
        + (f'<ul class="said">{rest}</ul>' if more else "")
        + "</section>"
    )


def _tables(result: Result, summaries: Sequence[Summary]) -> str:
    if not summaries:
        return ""
    note = _quiet(
        f"{UNKNOWN} is not known, or nothing to compare with; columns of which nothing is known are left out."
    )
    return _section(
        "Numbers", note, _grouped("Speed", SPEED, summaries), _grouped("Speculation", SPECULATION, summaries)
    )


def _grouped(heading: str, columns: Sequence[Column], summaries: Sequence[Summary]) -> str:
    """A table in groups, a point each."""
    told = [(title, [take(s) for s in summaries]) for title, take in columns]
    told = [(title, values) for title, values in told if any(v is not None for v in values)]
    if not told:
        return ""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title, _ in told)
    body, before = "", None
    for i, s in enumerate(summaries):
        if s.point != before:
            wide = f'<th colspan="{len(told) + 1}" scope="rowgroup"><span>{escape(s.point)}</span></th>'
            body += f'<tr class="over">{wide}</tr>'
            before = s.point
        cells = "".join(f"<td>{escape(values[i] or UNKNOWN)}</td>" for _, values in told)
        body += f'<tr><th scope="row">{escape(name(s.method))}</th>{cells}</tr>'
    return f"<h3>{heading}</h3>" + _wide(f'<tr><th scope="col">method</th>{head}</tr>', body, label=heading)


def _wide(head: str, body: str, label: str, kind: str = "") -> str:
    """A table that is moved from side to side where it does not fit; by keys too."""
    named = f' class="{kind}"' if kind else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}"><table{named}>'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div>"
    )


def _cells(kind: str, values: Iterable[object]) -> str:
    return "".join(f"<{kind}>{escape(v)}</{kind}>" for v in values)


def _rows(headings: Sequence[str], rows: Iterable[Sequence[object]], label: str, kind: str = "words") -> str:
    body = "".join(f'<tr><th scope="row">{escape(row[0])}</th>{_cells("td", row[1:])}</tr>' for row in rows)
    return _wide("<tr>" + "".join(f'<th scope="col">{escape(h)}</th>' for h in headings) + "</tr>", body, label, kind)


# ------------------------------------------------------------------ the same output
def _same_output(result: Result, summaries: Sequence[Summary]) -> str:
    own = [s for s in summaries if s.identical is not None]
    if not own:
        return _section("The same output", _quiet(f"No answer was compared: there is {PLAIN} alone, or it is missing."))
    rows = []
    for s in own:
        same, pairs = identical(result, s)
        rows.append((s.method, s.point, f"{same:,} of {pairs:,}", _share_identical(s.identical or 0.0)))
    shares = _rows(("method", "point", "identical answers", "share"), rows, "Identical answers")
    return _section("The same output", shares, _differences(result, own))


def _differences(result: Result, own: Sequence[Summary]) -> str:
    if not result.differences:
        whole = all(s.identical == 1 for s in own)
        return _quiet("No answer differs." if whole else "Where answers part was not written down.")
    rows = [
        (d.method, d.point, d.prompt, f"after {d.at:,} {_unit(result, d)}", _some(d.margin, lambda m: f"{m:.2g}") or UNKNOWN,
         WHY[d.near_tie])
        for d in result.differences[:SHOWN_DIFFERENCES]
    ]  # fmt: skip
    left = len(result.differences) - len(rows)
    return (
        "<h3>Where answers part</h3>"
        + _rows(("method", "point", "prompt", "place", "margin, log p", "why"), rows, "Where answers part")
        + (_quiet(f"{left:,} more are in the JSON.") if left else "")
    )


def _unit(result: Result, d: Difference) -> str:
    own = [
        s for s in result.samples if s.key == (d.point, d.prompt) and s.method in (d.method, BASELINE) and not s.error
    ]
    return "tokens" if own and all(s.token_ids is not None for s in own) else "characters"


def _failures(result: Result) -> str:
    failed = [s for s in result.samples if s.error is not None]
    if not failed:
        return ""
    rows = [(name(s.method), s.point, s.round + 1, s.prompt, s.error) for s in failed[:SHOWN_FAILURES]]
    left = len(failed) - len(rows)
    more = _quiet(f"{left:,} more are in the JSON.") if left else ""
    return _section("Failed requests", _rows(("method", "point", "round", "prompt", "error"), rows, "Failed"), more)


# ------------------------------------------------------------------ how it was run
def _provenance(result: Result) -> str:
    methods = {name(method): about for method, about in result.methods.items()}
    parts = (("Setting", result.setting), ("Methods", methods), ("Where and how it was run", result.provenance))
    return _section("What was run", *(f"<h3>{heading}</h3>{_listed(own)}" for heading, own in parts if own))


def _listed(own: Mapping[str, Any]) -> str:
    def value(key: str, of: Any) -> str:
        if key == "argv":
            return f"<code>{escape(_command(of))}</code>"
        said = told(of)
        if len(said) > LONG:
            return f"<details><summary>{escape(said[:80])}…</summary>{escape(said)}</details>"
        return escape(said) or UNKNOWN

    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{value(k, v)}</dd>' for k, v in own.items())}</dl>"


def _prompts(result: Result) -> str:
    points = result.points()
    if not points:
        return ""
    return _section("Prompt by prompt", *(_of_point(result, point) for point in points))


def _of_point(result: Result, point: Point) -> str:
    by: dict[str, dict[str, list[Sample]]] = {}
    for s in result.samples:
        if s.point == point and s.error is None and s.tokens > 0:
            by.setdefault(s.prompt, {}).setdefault(s.method, []).append(s)
    methods = [m for m in result.methods if any(m in own for own in by.values())]

    def row(prompt: str, own: Mapping[str, Sequence[Sample]]) -> list[object]:
        one = next(iter(own.values()))[0]
        cost = {m: median(1e3 * s.seconds / s.tokens for s in many) for m, many in own.items()}
        return [prompt, one.category, one.prompt_tokens, *(number(cost[m]) if m in cost else UNKNOWN for m in methods)]

    rows = [row(prompt, own) for prompt, own in list(by.items())[:SHOWN_PROMPTS]]
    headings = ["prompt", "category", "its tokens", *(name(m) for m in methods)]
    left = _quiet(f"{len(by) - len(rows):,} more are in the JSON.") if len(by) > len(rows) else ""
    title = f"{point}: milliseconds for a token of the answer, the first included, median of rounds"
    return f"<details><summary>{escape(title)}</summary>{_rows(headings, rows, title, '')}{left}</details>"


def _definitions() -> str:
    return _section("What the numbers are", _listed(DEFINITIONS))


# ------------------------------------------------------------------ plots
@dataclass(frozen=True)
class Figure:
    """A plot that waits for its title."""

    caption: str  # what its numbers are
    draw: Callable[[str], str]
    legend: str = ""
    below: str = ""


def _plots(result: Result, summaries: Sequence[Summary]) -> str:
    styles = {m: i for i, m in enumerate([BASELINE, *(m for m in result.methods if m != BASELINE)])}
    parts = {
        "Speed-up": _gains(summaries, styles),
        "Speed-up by category": _by_kind(result, styles, by_category),
        "Throughput": _throughput(summaries, styles),
        "Acceptance by position": _acceptance(result, summaries, styles),
        "Speed-up by tokens of the prompt": _by_kind(result, styles, by_depth),
        "Roofline": _roofline(result.roofline, styles),
    }
    drawn = "".join(_figure(title, one) for title, own in parts.items() for one in own)
    left = "".join(_quiet(f"{title} is left out: {LEFT_OUT[title]}.") for title, own in parts.items() if not own)
    return _section("Plots", f'<div class="plots">{drawn}</div>' if drawn else "", left)


def _figure(title: str, one: Figure) -> str:
    """Its title is in the plot too, for those who hear it."""
    top = f"<figcaption><strong>{escape(title)}</strong><br>{escape(one.caption)}</figcaption>"
    return f"<figure>{top}{one.legend}{one.draw(f'{title}: {one.caption}')}{one.below}</figure>"


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
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return []
    if not marks or not (bandwidth > 0 and peak > 0):
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
    return {method: at for method, at in own.items() if min(at) > 0}


def _reach(who: str, at: tuple[float, float], bandwidth: float, peak: float) -> str:
    roof, limit = min((at[0] * bandwidth, "the memory allows"), (peak, "the compute units allow"))
    return f"{who} reaches {percent(at[1] / roof)} of what {limit}."
