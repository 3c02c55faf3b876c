"""The server's benchmark on a tiny model: each part runs, clients read what was written, and the books notice what is off."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headstart import LLM
from headstart.server.metrics import Metrics
from tests import tiny


def _load() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


serve = _load()
SIZES = ["--tokens", "6", "--concurrency", "1,3", "--rates", "50", "--rate-seconds", "0.1", "--requests", "40"]


def arguments(*more: str) -> argparse.Namespace:
    return serve.arguments(["load", "--quick", *SIZES, *more])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny.loaded(), speculative=None, max_num_seqs=serve.RUNS) as made:
        yield made


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    """The same model with a drafter: its chunks have several tokens now and then."""
    with LLM(tiny.loaded(), speculative={"method": "ngram"}, max_num_seqs=serve.RUNS) as made:
        yield made


# ------------------------------------------------------------------ what clients read
def event(*ids: int, **more: Any) -> bytes:
    choices = [{"index": 0, "token_ids": list(ids)}] if ids else []
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


def told(*parts: bytes, tokens: int = 3) -> Any:
    answer = serve.Answer(serve.body("x", 1, tokens), 0.0, 200)
    for at, part in enumerate(parts, start=1):
        answer.hear(part, float(at))
    return answer


USAGE, DONE = event(usage={"completion_tokens": 3}), b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    whole = b"\r\n".join([b"3f", event(5, 6), b"20", event(7), b"99", USAGE, b"e", DONE])
    answer = told(*[whole[i : i + size] for i in range(0, len(whole), size)])
    assert answer.outcome == "finished" and [ids for _, ids in answer.pieces] == [[5, 6], [7]]
    pieces = answer.pieces
    answer.digest()
    assert answer.outcome == "finished" and answer.pieces == pieces and answer.tokens == 3


@pytest.mark.parametrize(
    "parts",
    [
        [event(5, 6), event(7), USAGE],  # no end
        [event(5, 6), USAGE, DONE],  # a token did not come
        [event(5, 6), event(7), DONE],  # nobody counted
        [event(5, 6), event(error={"message": "broke"}), DONE],
        [],
    ],
)
def test_an_answer_that_is_not_whole_is_broken(parts: list[bytes]) -> None:
    assert told(*parts).outcome == "broken"


def test_tokens_that_come_together_share_the_time() -> None:
    assert serve.gaps([(1.0, [1, 2]), (2.0, [3]), (4.0, [4, 5])]) == [1.0, 1.0, 1.0]


# ------------------------------------------------------------------ books
def test_books_that_agree_and_books_that_do_not() -> None:
    finished, away, vanished = told(event(5, 6), event(7), USAGE, DONE), told(), told(event(5))
    away.status, vanished.left = 429, True
    before = {"request_success_total length": 4.0, "generation_tokens_total": 9.0}
    after = {"request_success_total length": 5.0, "requests_turned_away_total": 1.0, "generation_tokens_total": 12.0}
    assert serve.disagreements([finished, away], before, after) == []
    left = after | {"request_success_total abort": 1.0}
    assert serve.disagreements([finished, away, vanished], before, left) == []
    for name in ("request_success_total length", "requests_turned_away_total", "generation_tokens_total"):
        assert len(serve.disagreements([finished, away], before, after | {name: after[name] + 1})) == 1, name
    assert len(serve.disagreements([finished, away, vanished], before, after)) == 1, "nobody was aborted"
    assert len(serve.disagreements([finished, away], before, left)) == 1, "nobody had vanished"


def test_what_is_left_behind_is_found(llm: LLM) -> None:
    with serve.inside(llm) as found:
        assert serve.leaks(found) == []
        llm.engine.pool.reserve("planted", 20)
        told = serve.leaks(found)
        assert any("kv_cache_usage_perc" in line for line in told) and any("KV tables" in line for line in told)
        llm.engine.pool.close("planted")
        llm.engine.pool._users[0] += 1
        assert any("reference counts" in line for line in serve.leaks(found))
        llm.engine.pool._users[0] -= 1
        with found.gate.enter():
            assert serve.leaks(found) == ["1 requests inside the gate are left"]
        assert serve.leaks(found) == []


# ------------------------------------------------------------------ the parts
@pytest.mark.parametrize("kind", ["bare", "httpx"])
def test_load(drafting: LLM, kind: str) -> None:
    with serve.inside(drafting) as found:
        out = serve.load(arguments("--client", kind), found)
    assert list(out["closed"]) == ["1", "3"] and list(out["open"]) == ["50"]
    for point in [*out["closed"].values(), *out["open"].values()]:
        assert point["errors"] == 0 and point["tokens"] == 6 * point["requests"], point
        assert set(point["first token ms"]) == {"p50", "p90", "p99"}
    assert all(ok for _, ok in serve.bars({"load": out}))


def test_a_server_that_refuses_is_no_load_without_errors(llm: LLM) -> None:
    with serve.inside(llm, max_prompt_tokens=3) as found:
        out = serve.load(arguments("--client", "bare", "--rates", ""), found)
    assert out["closed"]["3"]["errors"] == 4 and "takes at most 3" in out["closed"]["3"]["what went wrong"][0]
    assert not all(ok for _, ok in serve.bars({"load": out}))


def test_compare(llm: LLM, drafting: LLM) -> None:
    """Both sides write the same; and it shows where they do not."""

    def offline(shift: int, batch: list[dict[str, Any]]) -> Any:
        return serve.offline(llm, [own | {"seed": own["seed"] + shift} for own in batch])

    with serve.inside(drafting) as found:
        for shift, same in ((0, 1.0), (1, 0.0)):
            out = serve.duel(arguments(), found, functools.partial(offline, shift), 3)
            assert out["same text"] == same and out["errors"] == 0 and out["ratio"] > 0
    for ratio, errors, met in ((0.95, 0, True), (0.94, 0, False), (1.0, 1, False)):
        [(_, ok)] = serve.bars({"compare": {"auto": {"8": out | {"ratio": ratio, "errors": errors}}}})
        assert ok == met


def test_overhead(drafting: LLM) -> None:
    out = serve.overhead(arguments(), drafting)
    for point in out.values():
        assert point["wrong"] == [] and point["tokens"] == 6 * point["requests"]
        assert 0 < point["ms"]["p50"] <= point["most"], "nobody has a token before it was handed out"
    assert type(drafting._loop).submit.__get__(drafting._loop) == drafting._loop.submit, "nobody listens in any more"


def test_overhead_is_told_for_the_same_tokens_alone() -> None:
    heard = {1: [(1.0, [5]), (2.0, [6, 7])], 2: [(1.0, [5])]}
    assert serve.delays(heard, {1: [(1.5, [5]), (3.0, [6, 7])]}) == ([500.0, 1000.0, 1000.0], [])
    for came in ([(1.5, [5])], [(1.5, [5]), (3.0, [7, 6])], [(1.5, [5]), (3.0, [6]), (3.0, [7])]):
        values, wrong = serve.delays(heard, {1: came, 2: [(2.0, [5])]})
        assert values == [1000.0] and len(wrong) == 1
        [(_, ok)] = serve.bars({"overhead": {"1": {"ms": serve.percentiles([1.0]), "wrong": wrong}}})
        assert not ok


def test_soak(drafting: LLM) -> None:
    with serve.inside(drafting) as found:
        out = serve.soak(arguments("--seconds", "0.3", "--streams", "8"), found)
        assert out["errors"] == 0 and out["wrong"] == [] and out["requests"] >= 8
        assert [ok for _, ok in serve.bars({"soak": out})] == [True]
        drafting.engine.pool.reserve("planted", 20)
        found.llm = None  # as one who sees /metrics alone
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "settled", lambda read: read())
            out = serve.soak(arguments("--seconds", "0.1", "--streams", "8"), found)
        drafting.engine.pool.close("planted")
    assert any("kv_cache_usage_perc" in line for line in out["wrong"])
    assert [ok for _, ok in serve.bars({"soak": out})] == [False]


def test_faults(llm: LLM) -> None:
    """Prompts that are too long are refused at the door here, as with --max-prompt-tokens."""
    with serve.inside(llm, max_queue=serve.WAITS, max_body=serve.BODY, max_prompt_tokens=300) as found:
        out = serve.faults(arguments(), found)
    assert out["wrong"] == [] and [ok for _, ok in serve.bars({"faults": out})] == [True]
    seen = out["seen"]
    assert seen["vanishes"]["vanished"] == 4 and seen["vanishes early"]["vanished"] == 2
    assert seen["prompt too long"]["400"] == seen["body too large"]["413"] == 2
    assert seen["in a rush"]["429"] > 0 and seen["slow"]["finished"] == 4


def test_faults_that_are_booked_wrongly_are_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metrics, "abandoned", lambda self, *told: None)
    monkeypatch.setattr(serve, "settled", functools.partial(serve.settled, patience=0.5))
    with serve.inside(llm, max_queue=serve.WAITS, max_body=2 * serve.BODY, max_prompt_tokens=300) as found:
        out = serve.faults(arguments(), found)
    assert any(line.startswith("clients that vanished: the clients count 6, the server 0") for line in out["wrong"])
    assert any("body too large: 400" in line for line in out["wrong"]), "larger bodies were let in"
    assert [ok for _, ok in serve.bars({"faults": out})] == [False]


def test_a_server_that_does_not_leave_in_order_is_noticed(llm: LLM) -> None:
    """Told to stop is a process that ends at once with another status; the server goes on."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with serve.inside(llm) as found:
        told, wrong = serve.stop_under_load(arguments(), found, sleeper)
    assert told["status"] == -signal.SIGTERM and len(wrong) == 2
    assert "newcomer" in wrong[0] and "exit status -15" in wrong[1]


# ------------------------------------------------------------------ the command
@pytest.mark.parametrize(
    "given, words",
    [
        (["laod"], "laod"),
        (["faults", "--url", "http://127.0.0.1:1"], "server of their own"),
        (["load", "--url", "http://example.com"], "not on this machine"),
    ],
)
def test_mistakes_are_said_before_anything_is_loaded(given: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        serve.arguments(given)


def test_a_result_is_shown(llm: LLM) -> None:
    with serve.inside(llm) as found:
        kept = {"load": serve.load(arguments("--client", "bare"), found)}
    titles = [title for title, rows in serve.tables(json.loads(json.dumps(kept))) if len({len(r) for r in rows}) == 1]
    assert titles == ["Closed loop", "Poisson arrivals"]
