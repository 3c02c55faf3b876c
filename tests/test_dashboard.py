"""The Grafana dashboard against a server: it names only metrics that are served, with labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from headstart import LLM
from headstart.cli import app
from tests import tiny, web
from tests.test_server import PROMPT, serving

WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^{}]*)\}")
PAIRS = {")": "(", "]": "[", "}": "{"}
Served = dict[str, set[str]]  # metrics, and the labels of each


@pytest.fixture(scope="module", params=["headstart", "vllm"])
def prefix(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(prefix: str) -> Iterator[Served]:
    """By a tiny server that has drafted something, whatever that cost, and knows what plain steps take."""
    spec = {"method": "ngram", "policy": "fixed"}
    with LLM(tiny.loaded(), speculative=spec, max_num_seqs=4) as llm, serving(llm, metrics_prefix=prefix) as url:
        llm.engine.policy.plain_seconds = lambda *_: 0.001
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "structured_outputs": {"regex": "(ab){30}"}}
        for _ in range(3):
            web.post(f"{url}/v1/completions", json=body)
        yield names_served(web.get(f"{url}/metrics").text)


@pytest.fixture(scope="module")
def board(prefix: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["serve", "--print-grafana", "--metrics-prefix", prefix])
    assert result.exit_code == 0
    return json.loads(result.stdout)


def names_served(text: str) -> Served:
    out: Served = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            out.setdefault(sample.name, set()).update(sample.labels)
    return out


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in board["panels"] if p["type"] != "row"]


def expressions(board: dict[str, Any]) -> list[str]:
    """Those of panels, and of what can be chosen at the top."""
    chosen = [v["definition"] for v in board["templating"]["list"] if v["type"] == "query"]
    return [target["expr"] for panel in panels(board) for target in panel["targets"]] + chosen


def wrong_with(expression: str, served: Served) -> list[str]:
    """Metrics and labels that are not served."""
    out, used = [], set()
    if chosen := re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", expression):
        expression = f"sum by ({chosen[2]}) ({chosen[1]})"
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    for name, labels in SELECTOR.findall(bare):
        own = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels))
        out += [f"{name}{{{label}}}" for label in sorted(own - served.get(name, set()))]
    groups = {label.strip() for labels in GROUPING.findall(bare) for label in labels.split(",")} - {""}
    bare = GROUPING.sub("", re.sub(r"\{[^{}]*\}", "", bare))
    for name in re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?![\w:]*\s*\()", bare):
        if name not in WORDS:
            used |= served.get(name, set())
            out += [] if name in served else [name]
    return out + sorted(groups - used)


def balanced(expression: str) -> bool:
    open_: list[str] = []
    for c in re.sub(r'"[^"]*"', "", expression):
        if c in PAIRS.values():
            open_.append(c)
        elif c in PAIRS and (not open_ or open_.pop() != PAIRS[c]):
            return False
    return not open_ and expression.count('"') % 2 == 0


def test_only_metrics_that_are_served(board, served, prefix: str) -> None:
    told = expressions(board)
    assert len(told) > 30
    assert {e: wrong for e in told if (wrong := wrong_with(e, served))} == {}
    assert all(f"{prefix}:" in e for e in told)


@pytest.mark.parametrize(
    "expression, wrong",
    [
        ("rate(%s:no_such_total[5m])", ["%s:no_such_total"]),
        ('sum(rate(%s:generation_tokens_total{model="x"}[5m]))', ["%s:generation_tokens_total{model}"]),
        ("sum by (drafter) (rate(%s:generation_tokens_total[5m]))", ["drafter"]),
        ("1 + up / sum(%s:generation_tokens_total)", ["up"]),
        ("label_values(%s:num_requests_idle, model_name)", ["%s:num_requests_idle", "model_name"]),
        ("histogram_quantile(0.5, sum by (le) (%s:kv_cache_usage_perc))", ["le"]),
        ("sum(%s:generation_tokens_total) / on (drafter) group_left () sum(%s:engine_rows_total)", ["drafter"]),
    ],
)
def test_what_is_not_served_is_noticed(served, prefix: str, expression: str, wrong: list[str]) -> None:
    assert wrong_with(expression.replace("%s", prefix), served) == [w.replace("%s", prefix) for w in wrong]


def test_brackets_are_balanced(board) -> None:
    assert all(balanced(e) for e in expressions(board))
    assert not any(balanced(e) for e in ("sum(a", "sum(a[5m)]", 'a{b="c}', "a)"))


def test_grafana_can_read_it(board) -> None:
    """What Grafana 10 asks of a dashboard: numbers that are its own, places that do not overlap, known sources."""
    assert board["schemaVersion"] >= 38 and board["uid"] and board.get("id") is None
    assert [v["name"] for v in board["templating"]["list"]] == ["DS_PROMETHEUS", "model_name"]
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells
        taken |= cells
    for panel in panels(board):
        assert panel["type"] in ("timeseries", "stat") and panel["title"]
        assert (
            {t["datasource"]["uid"] for t in panel["targets"]} == {"${DS_PROMETHEUS}"} == {panel["datasource"]["uid"]}
        )
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])
