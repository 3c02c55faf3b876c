"""The demo: two lanes on one model, an honest table, and a closing line that comes from the token ids."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from headstart.cli import demo, race, stage
from tests import tiny
from tests.test_cli import headstart, terminal

FEW = ["--max-tokens", "24", "--kv-memory", "16MB", "--device", "cpu"]
OWN = ["--prompt", "the quick brown fox the quick brown", "--prompt", "a stone bridge"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.folder(tmp_path_factory.mktemp("model")))


def _race(plain: list[int], fast: list[int], plain_seconds: float = 1.0, fast_seconds: float = 1.0) -> race.Race:
    lanes = (
        race.Lane("plain", token_ids=plain, seconds=plain_seconds),
        race.Lane("ngram", token_ids=fast, seconds=fast_seconds),
    )
    return race.Race("Prompt 1", "p", [1, 2], *lanes)


def test_without_a_terminal_it_prints_lines(folder: str) -> None:
    result = headstart("demo", "-m", folder, *FEW)
    for title in demo.PROMPTS:
        assert result.stdout.count(title) == 2  # its lines and its row
    assert "Both texts are identical on every prompt" in result.stdout and "What to try next" in result.stdout
    assert "\x1b" not in result.stdout and "Warming up" in result.stderr


def test_json(folder: str) -> None:
    found = json.loads(headstart("demo", "-m", folder, "--json", "-d", "suffix", *OWN, *FEW).stdout)
    assert found["identical"] and found["drafter"] == "suffix" and len(found["prompts"]) == 2
    one = found["prompts"][0]
    assert one["plain"]["token_ids"] == one["speculative"]["token_ids"] and one["first_difference"] is None
    assert one["plain"]["stats"]["drafts"] == 0 and one["plain"]["tokens_per_second"] > 0
    assert one["ratio"] == pytest.approx(one["speculative"]["tokens_per_second"] / one["plain"]["tokens_per_second"])


def test_sampled_texts_are_identical_too(folder: str) -> None:
    sampled = ["--temperature", "1", "--seed", "3"]
    assert "are identical" in headstart("demo", "-m", folder, "--plain", *OWN, *sampled, *FEW).stdout


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_difference_is_said_and_fails(folder: str, monkeypatch, temperature: str) -> None:
    honest = race._run_lane

    def cheat(llm, ids, params, lane, speculative, changed):
        honest(llm, ids, params, lane, speculative, changed)
        if lane.name != "plain":
            lane.token_ids[5] += 1

    monkeypatch.setattr(race, "_run_lane", cheat)
    args = ["demo", "-m", folder, "--temperature", temperature, *OWN[:2], *FEW]
    shown = headstart(*args, code=1).stdout
    assert "the texts differ from token 5 on" in shown and "identical on every" not in shown
    assert not json.loads(headstart(*args, "--json", code=1).stdout)["identical"]


def test_rejection_may_differ_when_sampled(folder: str) -> None:
    result = headstart("demo", "-m", folder, "--verification", "rejection", "--temperature", "1", *OWN[:2], *FEW)
    assert "Rejection keeps the distribution" in result.stdout or "are identical" in result.stdout


def test_first_difference() -> None:
    assert _race([1, 2, 3], [1, 2, 3]).identical
    assert _race([1, 2, 3], [1, 9, 3]).first_difference == 1
    assert _race([1, 2, 3], [1, 2]).first_difference == 2
    assert _race([], [1]).first_difference == 0


def test_a_slower_drafter_is_shown_as_it_is() -> None:
    slow = _race([1] * 10, [1] * 10, plain_seconds=1.0, fast_seconds=2.0)
    assert slow.ratio == 0.5 and slow.identical


def test_verdict() -> None:
    same, other = _race([1, 2], [1, 2]), _race([1, 2], [1, 3])
    assert demo.verdict([same], False) == [
        "Both texts are identical on every prompt: 2 tokens compared, with and without speculation."
    ]
    other.margin, other.near_tie = 0.001, True
    assert "near-tie" in demo.verdict([same, other], False)[0]
    other.margin, other.near_tie = 1.0, False
    assert "more than rounding explains" in demo.verdict([other], False)[0]
    assert len(demo.verdict([other], True)) == 2


def test_the_live_display(folder: str) -> None:
    """Two panels beside each other, numbers under both, accepted tokens coloured."""
    seen = terminal("demo", "-m", folder, "--draft-model", folder, *OWN[:2], *FEW)
    assert "\x1b[32m" in seen
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert any("─ plain ─" in line and "─ draft_model ─" in line for line in words.splitlines())
    for part in ("24 tokens", "block efficiency 1.00", "accepted by position 100%", "are identical", "to try next"):
        assert part in words


@pytest.mark.parametrize(("columns", "height"), [(80, 24), (140, 30), (60, 20)])
def test_panels_fit_the_terminal(columns: int, height: int) -> None:
    """Stacked when narrow; a long text shows its end, a long prompt its beginning."""
    long = _race([1] * 500, [1] * 500)
    long.prompt = "begin " + "word " * 500
    for lane in (long.plain, long.speculative):
        lane.pieces = [("text ", False), ("drafted ", True)] * 250 + [("end", True)]
    console = Console(width=columns, height=height, record=True, file=io.StringIO())
    console.print(stage.LiveStage(console, long, 500).draw())
    lines = console.export_text().splitlines()
    assert any("plain" in line and "ngram" in line for line in lines) == (columns >= 100)
    assert "begin" in lines[0] and sum("end" in line for line in lines) == (1 if columns >= 100 else 2)
    assert len(lines) <= height and all(len(line) <= columns for line in lines)


@pytest.mark.real
def test_the_built_in_prompts() -> None:
    found = json.loads(headstart("demo", "--json", "--max-tokens", "8", "--dtype", "float32").stdout)
    assert found["identical"] and found["model"] == "smollm2" and found["speculative"]["method"] == "auto"


@pytest.mark.real
def test_another_drafter_on_the_built_in_model() -> None:
    found = json.loads(
        headstart("demo", "--json", "--max-tokens", "12", "--drafter", "ngram", "--dtype", "float32").stdout
    )
    assert found["identical"] and found["speculative"]["method"] == "ngram"
    assert found["prompts"][0]["speculative"]["stats"]["block_efficiency"] > 1.5


@pytest.mark.real
def test_the_head_that_comes_along() -> None:
    found = json.loads(
        headstart("demo", "--json", "--max-tokens", "16", "--drafter", "eagle3", "-k", "2", "--dtype", "float32").stdout
    )
    assert found["identical"] and found["speculative"]["method"] == "eagle3"
    assert found["prompts"][1]["speculative"]["stats"]["block_efficiency"] > 1.5
