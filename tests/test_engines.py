"""Other engines under test: what they answer, count and tell, beside our own on the same model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headstart import LLM
from headstart.bench import methods, run
from headstart.bench.own import OwnEngine
from headstart.bench.records import Counts, Point, Result
from headstart.bench.run import Plan
from headstart.bench.summary import summarise
from headstart.bench.workloads import Prompt, Workload
from headstart.engines import counters
from headstart.engines.endpoint import EndpointEngine, Heard
from headstart.engines.hf import TransformersEngine
from headstart.errors import BadInput, RequestFailed
from headstart.version import VERSION
from tests import tiny
from tests.test_server import serving

TALK = ({"role": "user", "content": "the quick brown fox jumps over the lazy dog and the quick brown"},)
PROMPTS = (
    Prompt("text", "plain", "she sells sea shells she sells sea"),
    Prompt("talk", "chat", TALK),
    Prompt("ids", "plain", tuple(range(5, 30))),
)
PLAN = Plan(Workload("three", PROMPTS), (Point(1, 0.0),), rounds=1, max_tokens=16, ignore_eos=True)


def measured(engine: Any, *given: str, plan: Plan = PLAN) -> Result:
    result = Result({}, {}, {})
    run.run(engine, methods.parse(given or ["ngram:3"]), plan, result, lambda r: None)
    return result


def texts(result: Result, method: str) -> list[tuple[str, str]]:
    return [(s.prompt, s.text) for s in result.samples if s.method == method]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.with_tools("<tool_call>")


@pytest.fixture(scope="module")
def ours(model) -> Result:
    return measured(OwnEngine(model, {"kv_memory": 1 << 24}))


@pytest.fixture(scope="module")
def url(model) -> Iterator[str]:
    with LLM(model, speculative={"method": "ngram"}, kv_memory=1 << 24) as llm, serving(llm) as found:
        yield found


# ------------------------------------------------------------------ transformers
def test_generate_says_what_our_engine_says(ours) -> None:
    theirs = measured(TransformersEngine(tiny.with_tools("<tool_call>")))
    assert not theirs.differences
    for method in ("none", "ngram:3"):
        assert texts(theirs, method) == texts(ours, method)
    plain, lookup = summarise(theirs)
    assert plain.block_efficiency == pytest.approx(1.0) and (lookup.block_efficiency or 0) >= 1.0
    assert all(0 < s.first_seconds <= s.seconds and s.tokens == 16 for s in theirs.samples)


def test_generate_takes_an_assistant(monkeypatch) -> None:
    monkeypatch.setattr("headstart.models.load.load", lambda *args, **how: tiny.loaded(seed=5))
    result = measured(TransformersEngine(tiny.loaded()), "draft_model:small:2")
    assert not result.differences and len(result.samples) == 6


def test_generate_has_its_limits() -> None:
    with pytest.raises(BadInput, match="one request at a time"):
        measured(TransformersEngine(tiny.loaded()), plan=Plan(PLAN.workload, (Point(2, 0.0),)))
    with pytest.raises(BadInput, match="no 'suffix' here"):
        measured(TransformersEngine(tiny.loaded()), "suffix")


# ------------------------------------------------------------------ servers
def test_a_server_of_ours_is_told_the_method_with_each_request(ours, url) -> None:
    theirs = measured(EndpointEngine({"none": url, "ngram:3": url}))
    assert not theirs.differences and all(s.tokens == 16 and s.error is None for s in theirs.samples)
    for method in ("none", "ngram:3"):
        assert texts(theirs, method) == texts(ours, method)
    assert theirs.methods["none"] == {"url": url, "model": "tiny", "forgets": False, "version": VERSION}


def test_a_server_for_one_method_alone_tells_its_sums(url) -> None:
    """The same server by two addresses: each is taken for a server of its own, and none is told the method."""
    engine = EndpointEngine({"none": url, "ngram:3": url.replace("127.0.0.1", "localhost")})
    result = measured(engine)
    counts = [lap.counts for lap in result.laps]
    assert all(c is not None and c.drafts and c.drafted for c in counts), "this one drafts for both"
    assert all(c is not None and c.accepted == sum(c.by_position or []) for c in counts)


def test_servers_that_are_none(url) -> None:
    for bad in ("http://127.0.0.1:9", "nonsense://x", url + "/health"):
        with pytest.raises(BadInput, match="is no server with OpenAI's API"):
            measured(EndpointEngine({"none": bad, "ngram:3": bad}))
    with pytest.raises(BadInput, match="No server was given for 'ngram:3'"):
        measured(EndpointEngine({"none": url}))


def test_where_the_first_requests_are_refused_no_more_are_sent(url) -> None:
    with pytest.raises(RequestFailed, match=r"404.*no model"):
        measured(EndpointEngine({"none": url, "ngram:3": url}, model="another"))


def test_a_request_that_is_refused_later_is_a_sample_that_failed(url) -> None:
    long = Plan(Workload("w", (*PROMPTS, *PROMPTS, Prompt("long", "x", "sea " * 3000))), PLAN.points, 1, 16, 0, True)
    result = measured(EndpointEngine({"none": url, "ngram:3": url}), plan=long)
    assert [s.prompt for s in result.samples if s.error] == ["long", "long"]


def test_what_is_heard() -> None:
    heard = Heard()
    heard.add({"choices": [{"delta": {"role": "assistant"}}]}, 0.1)
    heard.add({"choices": [{"delta": {"content": "a"}}]}, 0.2)
    heard.add({"choices": [{"text": "b"}]}, 0.3)
    answer = heard.answer()
    assert (answer.text, answer.tokens, answer.first_seconds, answer.seconds) == ("ab", 2, 0.2, 0.3)
    heard.add({"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 3}}, 0.4)
    assert (heard.answer().tokens, heard.answer().prompt_tokens, heard.answer().seconds) == (7, 3, 0.3)
    heard.add({"choices": [], "timings": {"draft_n": 6, "draft_n_accepted": 2}}, 0.4)
    assert (heard.answer().counts.drafted, heard.answer().counts.accepted) == (6, 2)
    with pytest.raises(RequestFailed, match="was empty"):
        Heard().answer()
    with pytest.raises(RequestFailed, match="broken"):
        heard.add({"error": {"message": "broken"}}, 0.5)


# ------------------------------------------------------------------ counters
@pytest.mark.parametrize("prefix", ["vllm:", "headstart:", "llamacpp:"])
@pytest.mark.parametrize("end", ["", "_total"])
def test_counters_are_read_in_both_spellings(prefix, end) -> None:
    lines = [
        f'{prefix}spec_decode_num_drafts{end}{{model_name="a",drafter="x"}} 4.0',
        f'{prefix}spec_decode_num_drafts{end}{{model_name="a",drafter="y"}} 6.0',
        f"{prefix}spec_decode_num_draft_tokens{end} 30.0",
        f"{prefix}spec_decode_num_accepted_tokens{end} 12.0",
        f'{prefix}spec_decode_num_accepted_tokens_per_pos{end}{{position="0"}} 8.0',
        f'{prefix}spec_decode_num_accepted_tokens_per_pos{end}{{position="2"}} 1.0',
        "other_metric 5.0",
    ]
    assert counters.read("\n".join(lines) + "\n") == Counts(None, 10, 30, 12, [8, 0, 1])
    begun = f"# TYPE {prefix}spec_decode_num_drafts{end} counter\n"
    assert counters.read(begun) == Counts(None, 0, 0, 0, []), "nothing was drafted yet"


@pytest.mark.parametrize("text", ["", "other 1\n", "<html>no metrics</html>", "a{ 1\n"])
def test_a_server_that_tells_nothing(text) -> None:
    assert counters.read(text) is None
