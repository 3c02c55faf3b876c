"""The vocabulary: what a user may ask for, the arithmetic of statistics, drafts packed and unpacked."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstart.core import Batch, Completion, Draft, Output, Request, SamplingParams, Segment, Stats, Tree, Verdict
from headstart.errors import BadInput, HeadstartError


# ------------------------------------------------------------------ parameters
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 257), ("n", 1.5), ("n", "2"), ("n", True),
        ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", 2.0), ("max_tokens", "5"), ("max_tokens", None),
        ("min_tokens", -1), ("min_tokens", 257), ("min_tokens", "1"),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -2), ("top_k", 0.5),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_p", math.nan),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
        ("typical_p", 0), ("typical_p", 2), ("typical_p", "x"),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("presence_penalty", math.nan), ("presence_penalty", "a"),
        ("frequency_penalty", 3), ("frequency_penalty", math.nan),
        ("stop", [""]), ("stop", ""), ("stop", [3]), ("stop", 3),
        ("bad_words", [""]), ("bad_words", [3]), ("bad_words", 3),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 7),
        ("logit_bias", {"a": 1.0}), ("logit_bias", {3: "x"}), ("logit_bias", [3]), ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: math.inf}),
        ("logprobs", -1), ("logprobs", 1.5), ("prompt_logprobs", -1), ("prompt_logprobs", "all"),
        ("seed", 1.5), ("seed", "x"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_sentence(name: str, value: Any):
    with pytest.raises(BadInput) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert "expected" in message
    assert message.endswith(".") and "\n" not in message
    assert isinstance(caught.value, (HeadstartError, ValueError))


def test_what_is_fine_is_taken():
    SamplingParams(n=256, max_tokens=1, min_tokens=1, temperature=0, top_k=-1, top_p=1, min_p=1, typical_p=1, seed=-5)
    SamplingParams(
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.1, logprobs=0, prompt_logprobs=3, seed=2**70
    )


def test_lists_become_tuples_and_one_string_is_one_string():
    p = SamplingParams(stop="END", bad_words="foo", stop_token_ids=[1, 2], logit_bias={"7": 1})
    assert p.stop == ("END",)
    assert p.bad_words == ("foo",)
    assert p.stop_token_ids == (1, 2)
    assert p.logit_bias == {7: 1.0}
    empty = SamplingParams(stop=None, bad_words=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert (empty.stop, empty.bad_words, empty.stop_token_ids) == ((), (), ())


def test_greedy_means_no_temperature():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.1).greedy
    assert not SamplingParams().greedy


# ------------------------------------------------------------------ requests
def test_a_request_knows_its_output_and_what_ends_it():
    r = Request([1, 2], SamplingParams(stop_token_ids=[9]), 0, eos_ids=frozenset([5]))
    assert (r.tokens, r.output, r.num_output, r.stats.prompt_tokens) == ([1, 2], [], 0, 2)
    r.tokens += [3, 4]
    assert (r.output, r.num_output, r.prompt) == ([3, 4], 2, [1, 2])
    assert r.stop_ids == {5, 9}
    careless = Request([1], SamplingParams(ignore_eos=True, stop_token_ids=[9]), 0, eos_ids=frozenset([5]))
    assert careless.stop_ids == {9}


def test_requests_have_names_of_their_own():
    made = [Request([1], SamplingParams(), 0) for _ in range(10)]
    assert len({r.id for r in made}) == 10
    assert Request([1], SamplingParams(), 0, id="mine").id == "mine"
    assert made[0] != made[1] and made[0].tokens is not made[0].prompt


# ------------------------------------------------------------------ statistics
def test_statistics_of_a_few_steps():
    stats = Stats()
    for drafted, accepted in ((4, 2), (4, 4), (0, 0), (3, 0)):
        stats.record(["ngram"] * drafted, range(accepted))
        stats.tokens += accepted + 1
    assert (stats.steps, stats.drafts, stats.drafted, stats.accepted) == (4, 3, 11, 6)
    assert stats.accepted_by_position == [2, 2, 1, 1]
    assert stats.acceptance_by_position == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert stats.acceptance_rate == pytest.approx(6 / 11)
    assert stats.block_efficiency == pytest.approx(10 / 4)
    assert stats.by_drafter == {"ngram": [11, 6]}


def test_nothing_is_divided_by_zero():
    stats = Stats()
    assert (stats.block_efficiency, stats.acceptance_rate, stats.decode_tokens_per_second) == (0.0, 0.0, 0.0)
    assert stats.acceptance_by_position == []
    stats.tokens, stats.time_total, stats.time_to_first_token = 1, 2.0, 2.0
    assert stats.decode_tokens_per_second == 0.0


def test_speed_counts_the_tokens_behind_the_first():
    """Tokens that came with the first one, in the prefill's own step, are not counted either."""
    stats = Stats(tokens=11, first_tokens=1, time_total=3.0, time_to_first_token=1.0)
    assert stats.decode_tokens_per_second == pytest.approx(5.0)
    assert Stats(tokens=11, first_tokens=3, time_total=3.0, time_to_first_token=1.0).decode_tokens_per_second == 4.0
    assert Stats(tokens=3, first_tokens=3, time_total=3.0, time_to_first_token=1.0).decode_tokens_per_second == 0.0


@given(st.lists(st.integers(0, 8).flatmap(lambda d: st.tuples(st.sampled_from("ab"), st.just(d), st.integers(0, d)))))
def test_books_balance(steps: list[tuple[str, int, int]]):
    stats = Stats()
    for name, drafted, accepted in steps:
        stats.record([name] * drafted, range(accepted))
    assert sum(stats.accepted_by_position) == stats.accepted == sum(a for _, a in stats.by_drafter.values())
    assert stats.drafted == sum(d for d, _ in stats.by_drafter.values())
    assert stats.steps == len(steps)
    assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)
    written = json.loads(json.dumps(stats.to_dict()))
    assert written["acceptance_rate"] == pytest.approx(stats.acceptance_rate)
    assert {"steps", "tokens", "time_draft", "block_efficiency", "acceptance_by_position"} <= set(written)


# ------------------------------------------------------------------ drafts
@st.composite
def forests(draw: st.DrawFn) -> list[Tree]:
    out = []
    for _ in range(draw(st.integers(0, 5))):
        size = draw(st.integers(0, 6))
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        tokens = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
        rows = draw(st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=size, max_size=size)))
        out.append(Tree(tokens, parents, rows if size else None))
    return out


@given(forests())
def test_packing_trees_and_unpacking_them(forest: list[Tree]):
    packed = Draft.of(forest, torch.zeros(4, 100))
    assert packed.offsets.tolist() == np.cumsum([0, *map(len, forest)]).tolist()
    assert packed.tokens.dtype == packed.parents.dtype == packed.offsets.dtype == np.int64
    assert packed.trees() == forest
    without = Draft.of(forest)
    assert without.logq is None and without.logq_rows is None
    assert without.trees() == [Tree(t.tokens, t.parents) for t in forest]


def test_chains():
    draft = Draft.chains([[5, 6, 7], [], [8]])
    assert draft.trees() == [Tree([5, 6, 7], [-1, 0, 1]), Tree(), Tree([8], [-1])]
    assert draft.offsets.tolist() == [0, 3, 3, 4]


def test_a_verdict_reads_as_accepted_tokens_then_the_bonus():
    assert Verdict([1, 2], 9).tokens(Tree([5, 6, 7], [-1, -1, 1])) == [6, 7, 9]
    assert Verdict([], 9).tokens(Tree()) == [9]


def test_new_rows_are_written_to_the_last_slots_of_their_segment():
    a = Segment(0, 2, 3, np.array([10, 11, 12, 13, 14]))
    b = Segment(2, 3, 1, np.array([7, 8, 9]), np.array([-1, 0]))
    batch = Batch(np.zeros(3, np.int64), np.zeros(3, np.int64), [a, b], np.array([1, 2]))
    assert (a.num_new, b.num_new) == (2, 1)
    assert batch.write_slots.tolist() == [13, 14, 9]


def test_an_output_shows_its_first_completion():
    first = Completion("one", [1], "stop", None, 0, Stats(tokens=1))
    output = Output("p", [3], [first, Completion("two", [2], "length", None, 1, Stats())])
    assert (output.text, output.token_ids, output.finish_reason, output.logprobs) == ("one", [1], "stop", None)
    assert output.stats.tokens == 1
