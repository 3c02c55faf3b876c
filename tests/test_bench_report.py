"""What a benchmark shows, on a planted result: the numbers are known beforehand, and so is what must not get through."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.bench import compare, markdown, plots, report, summary
from headstart.bench.compare import FASTER, SAME, SLOWER
from headstart.bench.records import BASELINE, Counts, Difference, Lap, Point, Result, Sample
from headstart.errors import BadInput

PER_TOKEN = 0.025  # seconds, of plain decoding alone
SPEED = {"none": 1.0, "eagle3": 1.8, "ngram": 1.2}
SHARES = {"eagle3": [0.8, 0.6, 0.45, 0.3], "ngram": [0.4, 0.2]}  # accepted, by position
POINTS = [Point(1, 0.0), Point(8, 0.0), Point(1, 1.0), Point(8, 1.0)]
CATEGORIES = ("chat", "code", "translation")
FIRST = POINTS[0]
ATTACK = "</svg><script>alert(1)</script>'\"&\x00\x1b|`"
VOID = {"meta", "br", "link", "img", "input", "hr"}


# ------------------------------------------------------------------ a result whose numbers are known
def planted(seed: int = 0, slower: dict[str, float] | None = None, rounds: int = 3, noise: float = 0.02) -> Result:
    """Three methods at four points, 12 prompts of three kinds; one request failed, and one answer differs."""
    draw = np.random.default_rng(seed)
    result = Result(
        provenance={
            "headstart": "0.1.0",
            "commit": "abc1234",
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "machine": {"system": "Linux aarch64", "cpu": "Neoverse-N1", "cores": 2},
            "load": 0.42,
            "date": "2026-11-17T03:00:00+00:00",
            "argv": ["headstart", "bench", "smollm2", "--method", "eagle3,ngram:2", "--note", "two words"],
        },
        setting={
            "engine": "headstart",
            "model": "smollm2",
            "workload": "mixed",
            "prompts": [f"prompt-{i:02}" for i in range(12)],
            "rounds": rounds,
            "max_tokens": 64,
        },
        methods={"none": {}, "eagle3": {"num_speculative_tokens": 4}, "ngram": {"num_speculative_tokens": 2}},
    )
    for number in range(rounds):
        for point in POINTS:
            drift = draw.lognormal(0, noise / 4)
            for method in result.methods:
                slow = drift * (slower or {}).get(method, 1.0)
                _lap(result, method, point, number, slow, noise, draw)
    failed = (
        next(s for s in result.samples if (s.method, s.point, s.round) == ("ngram", POINTS[3], 2))
        if rounds > 2
        else None
    )
    if failed is not None:
        failed.error, failed.tokens, failed.counts = "the request took longer than 60 s", 0, Counts()
    parted = next(s for s in result.samples if (s.method, s.point, s.prompt) == ("eagle3", FIRST, "prompt-05"))
    assert parted.token_ids is not None
    parted.token_ids = [*parted.token_ids[:17], 99_999, *parted.token_ids[18:]]
    result.differences = [Difference("eagle3", 1, 0.0, "prompt-05", 17, 0.00123, True)]
    result.roofline = {
        "bandwidth": 36e9,
        "peak": 150e9,
        "weights": 540e6,
        "flops_per_token": 270e6,
        "points": {
            "none": {"tokens_per_second": 40.0, "rows": 1, "seconds": 540e6 / 36e9 / 0.71},
            "eagle3": {"tokens_per_second": 72.0, "rows": 5, "seconds": 0.031},
        },
    }
    return result


def _lap(
    result: Result, method: str, point: Point, number: int, slow: float, noise: float, draw: np.random.Generator
) -> None:
    per_token = PER_TOKEN * slow / SPEED[method] * (2.0 if point.concurrency == 8 else 1.0)
    if point.temperature > 0 and method == "ngram":
        per_token *= 1.5  # then 0.8 times as fast as plain decoding
    samples = []
    for i in range(12):
        seconds = (0.1 + 64 * per_token) * draw.lognormal(0, noise)
        samples.append(
            Sample(
                method, point.concurrency, point.temperature, number, f"prompt-{i:02}", CATEGORIES[i % 3], 20 + 30 * i, 64,
                seconds, 0.1, text=f"answer {i}", token_ids=[100 * i + t for t in range(64)], counts=_counts(method),
            )
        )  # fmt: skip
    result.samples += samples
    busy = sum(s.seconds for s in samples) / point.concurrency
    result.laps.append(
        Lap(
            method,
            point.concurrency,
            point.temperature,
            number,
            busy,
            64 * 12,
            load=0.5,
            memory=700_000_000,
            joules=76.8,
        )
    )


def _counts(method: str) -> Counts:
    """Of one answer of 64 tokens."""
    shares = SHARES.get(method, [])
    steps = 64 / (1 + sum(shares))  # parts of steps: sums are what matters here
    known = {
        "steps": steps,
        "drafts": steps * bool(shares),
        "drafted": steps * len(shares),
        "accepted": steps * sum(shares),
    }
    timed = {"draft_seconds": 0.1 * bool(shares), "target_seconds": 0.9 + 0.1 * (not shares)}
    return Counts(by_position=[steps * share for share in shares], **known, **timed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> Result:
    return planted()


@pytest.fixture(scope="module")
def page(result: Result) -> str:
    return report.html(result)


def of(result: Result, method: str, point: Point = FIRST) -> summary.Summary:
    return next(s for s in summary.summarise(result) if (s.method, s.point) == (method, point))


# ------------------------------------------------------------------ reading a page
class Reader(HTMLParser):
    """Balanced tags, and what is in them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def words(page: str) -> str:
    return " ".join(" ".join(read(page).text).split())


def svgs(page: str) -> Iterator[ElementTree.Element]:
    for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        yield ElementTree.fromstring(found)


def plots_of(page: str) -> dict[str, ElementTree.Element]:
    drawn = [svg for svg in svgs(page) if svg.get("role") == "img"]
    return {str(svg.findtext("title")): svg for svg in drawn}


def check_page(page: str) -> None:
    """What holds of every page, whatever is in the result."""
    reader = read(page)
    for svg in svgs(page):
        assert svg.get("aria-hidden") == "true" or (svg.get("role") == "img" and svg.findtext("title"))
        for part in svg.iter():
            for value in part.attrib.values():
                assert "nan" not in value.split() and "inf" not in value.split(), value
    for tag, attrs in reader.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "a", "form"}, tag
        assert not {"src", "href", "onerror", "onload", "onclick"} & set(attrs)
    assert not re.search(r"url\(|@import", page)


# ------------------------------------------------------------------ the page
def test_the_page_is_whole_and_asks_for_nothing(page: str):
    check_page(page)
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    assert "default-src 'none'" in page


def test_the_page_says_at_its_top_what_came_out(result: Result, page: str):
    lead = re.search(r'<p class="lead">(.*?)</p>', page)
    gain = of(result, "eagle3").speedup
    assert lead and gain
    assert lead[1] == (
        f"eagle3 is {gain.value:.2f} times as fast as plain decoding ({gain.low:.2f} to {gain.high:.2f}) at 1 at once, "
        "temperature 0; 35 of 36 answers are identical."
    )
    said = words(page)
    assert "ngram is 1." in said and "all 36 answers are identical." in said
    assert "ngram over all 4 points: from 0." in said
    assert "1 of 432 requests failed." in said
    assert "Answers that part from plain decoding's: 1 (near-tie: 1)." in said


def test_the_page_shows_all_that_is_known_of_the_run(page: str):
    said = words(page)
    for part in (
        "Headstart bench: smollm2", "abc1234", "torch 2.13.0", "cpu Neoverse-N1", "0.42", "mixed",
        "headstart bench smollm2 --method eagle3,ngram:2 --note 'two words'", "num_speculative_tokens 4",
        "the request took longer than 60 s", "after 17 tokens", "0.0012", "35 of 36", "97.2%",
    ):  # fmt: skip
        assert part in said, part


def test_the_tables_hold_the_numbers(result: Result, page: str):
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    own = next(row for row in rows if ">eagle3<" in row and "tokens/s" not in row)
    cells = re.findall(r"<td>(.*?)</td>", own)
    s = of(result, "eagle3")
    assert cells[-3:] == ["36", "0", "2,304"]  # requests, failed, tokens
    assert plots.number(s.tokens_per_second) in cells and str(s.speedup) in cells
    assert "700 MB" in cells and "0.100" in cells  # joules for a token
    said = words(page)
    assert "54%" in said and "3.15" in said and "80% 60% 45% 30%" in said  # α, τ, by position


def test_every_plot_is_there_and_has_its_marks(page: str):
    drawn = plots_of(page)
    assert len(drawn) == 2 + 2 + 2 + 2 + 2 + 1  # of each temperature, and the roofline
    gains = drawn["Speed-up: times as fast as plain decoding, temperature 0"]
    assert len(gains.findall(".//rect")) == 4  # two methods, two numbers at once
    throughput = drawn["Throughput: tokens/s of all requests together, temperature 0"]
    assert len(throughput.findall(".//path[@class='curve']")) == 3
    assert len(throughput.findall(".//path[@class='mark']")) == 6
    accepted = next(svg for title, svg in drawn.items() if title.startswith("Acceptance by position: "))
    assert [t.text for t in accepted.findall(".//g/g/title")][1] == "eagle3: position in the draft 2, accepted 60%"
    roof = next(svg for title, svg in drawn.items() if title.startswith("Roofline"))
    assert len(roof.findall(".//path[@class='roof']")) == 2 and len(roof.findall(".//path[@class='mark']")) == 2


def test_the_roofline_says_how_near_it_comes(page: str):
    assert "plain decoding reaches 71% of what the memory allows." in words(page)
    assert "eagle3 reaches 48% of what the memory allows." in words(page)
    crowded = planted(rounds=1)
    assert crowded.roofline
    crowded.roofline["points"]["eagle3"] |= {"rows": 64, "seconds": 64 * 270e6 / 150e9 / 0.5}
    assert "eagle3 reaches 50% of what the compute units allow." in words(report.html(crowded))


def test_definitions_are_those_of_the_code():
    source = resources.files("headstart").joinpath("bench", "summary.py").read_text(encoding="utf-8")
    fields = source.split("class Summary:")[1].split("@property")[0]
    said = " ".join(report.DEFINITIONS.values())
    told = re.findall(r"^    \w+: .*?# (.*)$", fields, re.MULTILINE)
    assert len(told) >= 12
    for words in told:
        assert words in said, words
    assert (summary.speedup.__doc__ or "").split("The interval ")[1].rstrip(".") in said


# ------------------------------------------------------------------ what must not get through
def test_what_comes_from_data_is_escaped(result: Result):
    hostile = planted(rounds=1)
    hostile.methods = {BASELINE: {}, ATTACK: {ATTACK: [ATTACK]}}
    for s in [*hostile.samples, *hostile.laps, *hostile.differences]:
        s.method = ATTACK if s.method == "eagle3" else s.method
    for s in hostile.samples:
        s.prompt, s.category, s.text = ATTACK + s.prompt, ATTACK + s.category, ATTACK
    hostile.samples[0].error = ATTACK
    hostile.differences[0].prompt = ATTACK
    hostile.provenance = {"argv": [ATTACK, "\udcff"], "machine": ATTACK, ATTACK: {ATTACK: ATTACK}}
    hostile.setting = {"model": ATTACK, "workload": "\ud800", ATTACK: "x" * 500 + ATTACK}
    assert hostile.roofline
    hostile.roofline["points"] = {ATTACK: hostile.roofline["points"]["eagle3"]}
    page = report.html(hostile)
    check_page(page)
    assert "<script" not in page and "alert(1)" in words(page)
    page.encode("utf-8")
    short = markdown.short(hostile)
    short.encode("utf-8")
    assert "<script" not in short.split("```")[0] and "\x1b" not in short.split("```")[0]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in short.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "a name has broken the table"


# ------------------------------------------------------------------ less than all
def unknown(result: Result) -> Result:
    """As of an engine that tells text and times alone."""
    for s in result.samples:
        s.counts, s.token_ids = Counts(), None
    for lap in result.laps:
        lap.memory = lap.joules = lap.load = None
    result.roofline = None
    return result


def without(result: Result, *methods: str) -> Result:
    for method in methods:
        result.methods.pop(method)
    result.samples = [s for s in result.samples if s.method in result.methods]
    result.laps = [lap for lap in result.laps if lap.method in result.methods]
    result.differences = [d for d in result.differences if d.method in result.methods]
    return result


def only(result: Result, *points: Point) -> Result:
    result.samples = [s for s in result.samples if s.point in points]
    result.laps = [lap for lap in result.laps if lap.point in points]
    return result


def one_request(result: Result) -> Result:
    result = only(result, FIRST)
    result.samples = [s for s in result.samples if s.prompt == "prompt-00"]
    return result


def all_failed(result: Result) -> Result:
    for s in result.samples:
        s.error, s.tokens, s.seconds = "no", 0, 0.0
    for lap in result.laps:
        lap.tokens, lap.seconds = 0, 0.0
    return result


def no_time(result: Result) -> Result:
    for s in result.samples:
        s.seconds = s.first_seconds = 0.0
    return result


PARTIAL = {
    "nothing": (Result({}, {}, {}), "Nothing was measured."),
    "no laps": (Result({}, {}, {"none": {}}), "Nothing was measured."),
    "no counts": (unknown(planted()), "Acceptance by position is left out"),
    "one round": (planted(rounds=1), "eagle3 is 1."),
    "plain decoding alone": (without(planted(), "eagle3", "ngram"), "there is nothing to compare it with"),
    "no plain decoding": (without(planted(), "none"), "cannot be compared with plain decoding"),
    "one number at once": (only(planted(), FIRST), "Throughput is left out"),
    "one request": (one_request(planted(rounds=1)), "one request, so there is no interval"),
    "all failed": (all_failed(planted()), "432 of 432 requests failed"),
    "no time": (no_time(planted(rounds=1)), "times as fast"),
    "half a roofline": (dataclasses.replace(planted(rounds=1), roofline={"peak": 1.0}), "Roofline is left out"),
    "a roof without end": (
        dataclasses.replace(planted(rounds=1), roofline=planted(rounds=1).roofline | {"peak": float("inf")}),
        "Roofline is left out",
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # divisions by no time
@pytest.mark.parametrize("case", PARTIAL)
def test_less_than_all_is_shown_as_far_as_it_goes(case: str):
    result, said = PARTIAL[case]
    page = report.html(result)
    check_page(page)
    assert said in words(page)
    assert markdown.short(result).endswith("\n")
    compare.markdown(compare.compare(result, result))


def test_parted_answers_without_tokens_are_counted_in_characters():
    result = unknown(planted(rounds=1))
    assert "after 17 characters" in words(report.html(result))


# ------------------------------------------------------------------ Markdown
def test_markdown_is_short_and_right(result: Result):
    text, s = markdown.short(result), of(result, "eagle3")
    assert text.startswith("- eagle3 is 1.")
    assert (
        f"| eagle3 | 1 at once, temperature 0 | {plots.number(s.tokens_per_second)} | {s.speedup} | 3.15 | 54% |"
        in text
    )
    assert "97.2% |" in text
    assert "\n```\nheadstart bench smollm2 --method eagle3,ngram:2 --note 'two words'\n```\n" in text
    assert "cpu Neoverse-N1" in text.splitlines()[-1]
    assert len(text.splitlines()) < 32


@pytest.mark.parametrize(("text", "fence"), [("a", "```"), ("a ``` b", "````")])
def test_a_fence_is_longer_than_what_it_holds(text: str, fence: str):
    assert markdown.fenced(text) == f"{fence}\n{text}\n{fence}"


# ------------------------------------------------------------------ numbers
@pytest.mark.parametrize("method", SPEED)
def test_summaries_are_what_was_planted(result: Result, method: str):
    s = of(result, method)
    per_token = PER_TOKEN / SPEED[method]
    whole = 0.1 + 64 * per_token
    shares = SHARES.get(method, [])
    near = {"rel": 0.01}
    assert s.requests == 36 and s.failed == 0 and s.tokens == 36 * 64
    assert s.tokens_per_second == pytest.approx(64 / whole, rel=0.02)  # one lap's drift is in it
    assert s.ms_per_token == pytest.approx(1e3 * 64 * per_token / 63, rel=0.02)
    assert s.first_ms[50] == pytest.approx(100) and s.latency_ms[50] == pytest.approx(1e3 * whole, rel=0.02)
    assert s.block_efficiency == pytest.approx(1 + sum(shares), **near)
    assert s.joules_per_token == pytest.approx(0.1, **near) and s.memory == 700_000_000
    if method == BASELINE:
        assert s.speedup is None and s.identical is None and s.acceptance_rate is None
        return
    truth = (0.1 + 64 * PER_TOKEN) / whole
    assert s.speedup is not None and s.speedup.value == pytest.approx(truth, **near)
    assert s.speedup.low < truth < s.speedup.high and s.speedup.high - s.speedup.low < 0.1
    assert s.relative_cost == pytest.approx(1 / truth, **near)
    assert s.acceptance_rate == pytest.approx(sum(shares) / len(shares), **near)
    assert s.acceptance_by_position == pytest.approx(shares, **near)
    assert s.draft_length == pytest.approx(len(shares)) and s.block_limit == pytest.approx(len(shares) + 1)
    assert s.draft_overhead == pytest.approx(0.1, **near)
    token, forward = 0.1 / (64 / (1 + sum(shares)) * len(shares)), 1.0 / 64
    assert s.mbsu == pytest.approx((1 + sum(shares)) / (token / forward * len(shares) + 1), **near)


def test_a_failed_request_is_counted_and_left_out(result: Result):
    s = of(result, "ngram", POINTS[3])
    assert s.failed == 1 and s.requests == 35
    assert s.speedup is not None and s.speedup.value == pytest.approx((0.1 + 64 * 0.05) / (0.1 + 64 * 0.0625), rel=0.01)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """95% of them, were there many rounds; three rounds know less than that."""
    truth, held = (0.1 + 64 * PER_TOKEN) / (0.1 + 64 * PER_TOKEN / 1.8), 0
    for seed in range(40):
        draw, result = np.random.default_rng(seed), Result({}, {}, {})
        for number in range(5):
            for method in ("none", "eagle3"):
                _lap(result, method, FIRST, number, 1.0, 0.05, draw)
        gain = summary.speedup(result.of("none", FIRST), result.of("eagle3", FIRST))
        assert gain is not None
        held += gain.low <= truth <= gain.high
    assert held >= 33


def test_speed_up_by_kind_of_prompt(result: Result):
    kinds = summary.by_category(result, "eagle3", FIRST)
    assert list(kinds) == list(CATEGORIES) and all(gain.low < 1.72 < gain.high for gain in kinds.values())
    assert list(summary.by_depth(result, "eagle3", FIRST)) == ["0 to 127", "128 to 511"]


def test_a_sum_is_known_where_all_of_its_parts_are():
    one = Counts(steps=3, drafts=2, drafted=4, accepted=2, by_position=[2, 0], draft_seconds=0.5)
    two = Counts(steps=2, drafts=1, drafted=3, accepted=3, by_position=[1, 1, 1], draft_seconds=0.25)
    assert Counts.total([one, two]) == Counts(5, 3, 7, 5, [3, 1, 1], 0.75, None)
    assert Counts.total([one, Counts(steps=1)]) == Counts(steps=4)
    assert Counts.total([]) == Counts()


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (28172.4, "28,172"), (732.2, "732"), (41.52, "41.5"), (1.834, "1.83"), (0.0123, "0.0123"), (-2.5, "-2.50"),
     (1e-5, "1e-05"), (float("nan"), "?"), (float("inf"), "?")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, said: str):
    assert plots.number(value) == said


@pytest.mark.parametrize("top", [1e-9, 0.03, 0.99, 1, 1.83, 2.0001, 7, 49.9, 50, 732, 28172, 3e13])
def test_ticks_are_few_and_reach_the_top(top: float):
    ticks = plots.nice(top, 6)
    assert ticks[0] == 0 and ticks[-1] >= top * (1 - 1e-9) and 3 <= len(ticks) <= 7
    assert ticks[-2] < top


# ------------------------------------------------------------------ on disk
def small(result: Result) -> Result:
    """Three prompts at one point; what is counted is whole numbers, as engines count."""
    result = only(result, FIRST)
    result.samples = [s for s in result.samples if s.prompt in ("prompt-00", "prompt-01", "prompt-05")]
    for s in result.samples:
        whole = {n: round(getattr(s.counts, n)) for n in ("steps", "drafts", "drafted", "accepted")}
        s.counts = dataclasses.replace(s.counts, **whole, by_position=[round(n) for n in s.counts.by_position or []])
    return result


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What such a result is on disk."""
    path = tmp_path_factory.mktemp("kept") / "result.json"
    small(planted(rounds=1)).save(path)
    return path.read_text(encoding="utf-8")


def test_a_result_comes_back_as_it_was(tmp_path: Path):
    path, result = tmp_path / "deep" / "result.json", small(planted())
    result.laps[0].counts = result.samples[0].counts
    result.save(path)
    assert Result.load(path) == result
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda k: k.pop("samples"), 'it has no "samples"'),
        (lambda k: k.update(samples={}), "samples is an object, not a list"),
        (lambda k: k.update(laps=7), "laps is 7, not a list"),
        (lambda k: k.update(roofline=[]), "roofline is a list, not an object"),
        (lambda k: k.update(surprise=1), 'it has "surprise", which is not known'),
        (lambda k: k["methods"].update(ngram=3), 'methods["ngram"] is 3, not an object'),
        (lambda k: k["samples"].insert(0, {"method": "x"}), 'samples[0] has no "concurrency"'),
        (lambda k: k["samples"].insert(1, 7), "samples[1] is 7, not an object"),
        (lambda k: k["samples"][2].update(seconds="1.5"), 'samples[2].seconds is "1.5", not a number'),
        (lambda k: k["samples"][2].update(tokens=1.5), "samples[2].tokens is 1.5, not a whole number"),
        (lambda k: k["samples"][2].update(round=True), "samples[2].round is true, not a whole number"),
        (lambda k: k["samples"][2].update(text=None), "samples[2].text is null, not a text"),
        (lambda k: k["samples"][2]["token_ids"].insert(3, "4"), 'samples[2].token_ids[3] is "4", not a whole number'),
        (lambda k: k["samples"][2]["token_ids"].insert(3, True), "samples[2].token_ids[3] is true, not a whole number"),
        (lambda k: k["samples"][2]["counts"].update(steps="many"), 'samples[2].counts.steps is "many", not a whole number'),
        (lambda k: k["samples"][2]["counts"].update(by_position=[1, 10**400]), "samples[2].counts.by_position[1] is 1000"),
        (lambda k: k["laps"][0].update(surprise=1), 'laps[0] has "surprise", which is not known'),
        (lambda k: k["laps"][0].update(seconds=10**400), "which is too large"),
        (lambda k: k["laps"][0].update({"x\ny" * 100: 1}), "which is not known"),
        (lambda k: k["differences"].append(None), "differences[1] is null, not an object"),
        (lambda k: k["differences"][0].update(near_tie=1), "differences[0].near_tie is 1, not true or false"),
        (lambda k: k.update(format=0), "is no result of `headstart bench`"),
        (lambda k: k.clear(), "is no result of `headstart bench`"),
    ],
)  # fmt: skip
def test_a_damaged_result_is_said_in_one_sentence(tmp_path: Path, kept: str, change, why: str):
    path, own = tmp_path / "result.json", json.loads(kept)
    change(own)
    path.write_text(json.dumps(own))
    with pytest.raises(BadInput, match=r"result\.json is ") as caught:
        Result.load(path)
    assert why in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """All values inside; of a list of numbers the first two."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        if not isinstance(inner, int) or not isinstance(key, int) or key < 2:
            yield (*path, key)
            yield from places(inner, (*path, key))


ANYTHING = st.one_of(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from([10**400, 0, "none", "ngram", "\ud800"]),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers that are none
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_changed_is_refused_or_shown(tmp_path: Path, kept: str, monkeypatch, data: st.DataObject):
    monkeypatch.setattr(summary, "RESAMPLES", 20)
    path, own = tmp_path / "result.json", json.loads(kept)
    *way, last = data.draw(st.sampled_from(list(places(own))))
    inner = own
    for part in way:
        inner = inner[part]
    inner[last] = data.draw(ANYTHING)
    path.write_text(json.dumps(own))
    try:
        result = Result.load(path)
    except BadInput as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    check_page(report.html(result))
    markdown.short(result).encode()
    compare.markdown(compare.compare(result, result)).encode()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, None])
def test_what_is_no_result_is_said_in_one_sentence(tmp_path: Path, content: bytes | None):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        Result.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


# ------------------------------------------------------------------ before and after
def changes(a: Result, b: Result) -> dict[tuple[str, Point], compare.Change]:
    return {(c.method, c.point): c for c in compare.compare(a, b).changes}


def test_a_tenth_more_time_is_found(result: Result):
    found = changes(result, planted(seed=1, slower={"eagle3": 1.1}))
    assert len(found) == 12
    truth = (0.1 + 64 * PER_TOKEN * 1.1 / 1.8) / (0.1 + 64 * PER_TOKEN / 1.8)
    for point in POINTS:
        own = found["eagle3", point]
        assert own.verdict == SLOWER and own.gain_verdict == SLOWER
        assert own.gain is not None and own.gain.value < 1
    assert found["eagle3", FIRST].time.value == pytest.approx(truth, rel=0.02)
    assert changes(planted(seed=1, slower={"eagle3": 1.1}), result)["eagle3", FIRST].verdict == FASTER


def test_a_baseline_that_became_slower_makes_the_speed_up_grow(result: Result):
    found = changes(result, planted(seed=1, slower={"none": 1.2}))
    own = found["eagle3", FIRST]
    assert found["none", FIRST].verdict == SLOWER and found["none", FIRST].gain is None
    assert own.verdict == SAME and own.gain_verdict == FASTER


def test_two_draws_of_the_same_are_no_difference():
    """Of many comparisons at 95%, some stand out by chance; not many may."""
    found = [c.verdict for seed in range(4) for c in changes(planted(2 * seed), planted(2 * seed + 1)).values()]
    assert found.count(SAME) >= 0.88 * len(found)
    assert all(c.verdict == SAME for c in changes(planted(3), planted(3)).values())


def test_what_is_not_comparable_is_said(result: Result):
    other = planted(rounds=1)
    other.setting |= {"model": "qwen", "max_tokens": 128, "workload": "code", "methods": {"ngram": {"k": 3}}}
    other.provenance |= {"commit": "fff", "load": 9.0, "machine": {"cpu": "Xeon"}, "versions": {"torch": "2.12.0"}}
    for s in other.samples:
        if s.prompt == "prompt-03":
            s.prompt_tokens += 1
        if s.prompt == "prompt-11":
            s.prompt = "another"
    without(other, "ngram")
    first = dataclasses.replace(result, setting=result.setting | {"methods": {"ngram": {"k": 2}}})
    said = compare.compare(first, other)
    assert "Not the same model: smollm2 before, qwen after." in said.warnings
    assert "Not the same max_tokens: 64 before, 128 after." in said.warnings
    assert "Not the same workload: mixed before, code after." in said.warnings
    assert "Not the same cpu (machine): Neoverse-N1 before, Xeon after." in said.warnings
    assert "Not the same torch (versions): 2.13.0 before, 2.12.0 after." in said.warnings
    assert "ngram was not set up the same: k 2 before, k 3 after." in said.warnings
    assert any("One round" in line for line in said.warnings)
    assert any("same number of tokens" in line for line in said.warnings)
    assert not any("abc1234" in line or "same load" in line for line in said.warnings)
    assert "ngram at 1 at once, temperature 0 is only in the one before." in said.missing
    assert "1 of 12 prompts are only in the one after, and were left out." in said.missing
    assert not compare.compare(result, planted(seed=1)).warnings


def test_a_comparison_as_markdown(result: Result):
    text = compare.markdown(compare.compare(result, planted(seed=1, slower={"eagle3": 1.1})))
    assert "- eagle3 at 1 at once, temperature 0 is slower: a token takes " in text
    row = next(line for line in text.splitlines() if line.startswith("| eagle3 | 1 at once, temperature 0 "))
    assert len(row.split("|")) == len(compare.HEADINGS) + 2 and "| slower |" in row and "3.15 → 3.15" in row
    same = compare.markdown(compare.compare(result, result))
    assert same.startswith(f"- 12 compared: {SAME}.")
    empty = Result({}, {}, {})
    assert "nothing that both have measured" in compare.markdown(compare.compare(empty, result))


def test_the_modules_need_no_library_for_plots():
    tree = ast.parse(Path(plots.__file__).read_text(encoding="utf-8"))
    named = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert named <= {"__future__", "collections.abc", "dataclasses"}
