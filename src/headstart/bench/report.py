"""A result as a page: one HTML file that needs nothing else.

Whatever comes from data is escaped here: names of methods and prompts may hold anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from statistics import median
from typing import Any

from headstart.bench import plots
from headstart.bench.figures import LEFT_OUT, Figure, figures
from headstart.bench.plots import escape, number, percent
from headstart.bench.records import BASELINE, Difference, Point, Result, Sample
from headstart.bench.summary import Summary
from headstart.bench.verdicts import identical, verdicts
from headstart.bench.words import PLAIN, UNKNOWN, WHY, Column, about, command, known, name, share_identical, some, told

SHOWN_PROMPTS, SHOWN_FAILURES, SHOWN_DIFFERENCES = 200, 20, 100
LONG = 400  # letters that are folded
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
    top = f'<header><h1>{title}</h1><p class="quiet">{escape(about(result))}</p></header>'
    return f"{head}{top}\n<main>\n{''.join(f'{part}{chr(10)}' for part in parts if part)}</main>\n</body>\n</html>\n"


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


def _plots(result: Result, summaries: Sequence[Summary]) -> str:
    parts = figures(result, summaries)
    drawn = "".join(_figure(title, one) for title, own in parts.items() for one in own)
    left = "".join(_quiet(f"{title} is left out: {LEFT_OUT[title]}.") for title, own in parts.items() if not own)
    return _section("Plots", f'<div class="plots">{drawn}</div>' if drawn else "", left)


def _figure(title: str, one: Figure) -> str:
    """Its title is in the plot too, for those who hear it."""
    top = f"<figcaption><strong>{escape(title)}</strong><br>{escape(one.caption)}</figcaption>"
    return f"<figure>{top}{one.legend}{one.draw(f'{title}: {one.caption}')}{one.below}</figure>"


# ------------------------------------------------------------------ tables
def _three(values: Mapping[int, float]) -> str | None:
    return " / ".join(number(v) for v in values.values()) or None


SPEED: list[Column] = [
    ("tokens/s", lambda s: number(s.tokens_per_second)),
    ("speed-up", lambda s: str(s.speedup) if s.speedup else None),
    ("relative cost", lambda s: some(s.relative_cost)),
    ("ms per token", lambda s: some(s.ms_per_token)),
    ("first token, ms: p50 / p90 / p99", lambda s: _three(s.first_ms)),
    ("latency, ms: p50 / p90 / p99", lambda s: _three(s.latency_ms)),
    ("memory", lambda s: some(s.memory, lambda size: plots.metric(size) + "B")),
    ("J per token", lambda s: some(s.joules_per_token)),
    ("requests", lambda s: f"{s.requests:,}"),
    ("failed", lambda s: f"{s.failed:,}"),
    ("tokens", lambda s: f"{s.tokens:,}"),
]
SPECULATION: list[Column] = [
    ("identical", lambda s: some(s.identical, share_identical)),
    ("acceptance α", lambda s: some(s.acceptance_rate, percent)),
    ("block efficiency τ", lambda s: some(s.block_efficiency)),
    ("limit γ + 1", lambda s: some(s.block_limit)),
    ("draft length γ", lambda s: some(s.draft_length)),
    ("drafting", lambda s: some(s.draft_overhead, percent)),
    ("MBSU", lambda s: some(s.mbsu)),
    ("acceptance by position", lambda s: " ".join(percent(p) for p in (s.acceptance_by_position or [])[:8]) or None),
]


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
        rows.append((s.method, s.point, f"{same:,} of {pairs:,}", share_identical(s.identical or 0.0)))
    shares = _rows(("method", "point", "identical answers", "share"), rows, "Identical answers")
    return _section("The same output", shares, _differences(result, own))


def _differences(result: Result, own: Sequence[Summary]) -> str:
    if not result.differences:
        whole = all(s.identical == 1 for s in own)
        return _quiet("No answer differs." if whole else "Where answers part was not written down.")
    rows = [
        (d.method, d.point, d.prompt, f"after {d.at:,} {_unit(result, d)}", some(d.margin, lambda m: f"{m:.2g}") or UNKNOWN,
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
            return f"<code>{escape(command(of))}</code>"
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
