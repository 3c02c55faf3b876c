"""Policies: what is believed of drafts, what rows cost, and that speculation which does not pay is left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart import tree
from headstart.config import SpeculativeConfig, parse_speculative
from headstart.core import Draft, Request, SamplingParams, Tree, View
from headstart.drafters import Drafter, register
from headstart.errors import ConfigError
from headstart.policy import Load, StepTimes
from headstart.policy.adaptive import GOOD, AdaptivePolicy
from headstart.policy.beliefs import Beliefs, Claim, _kinds
from headstart.policy.costs import MOST, Costs, measure
from headstart.policy.fixed import FixedPolicy
from tests import harness, tiny

ALONE = Load(1, 0, 0)
FREE_ROWS = {1: 0.010, 64: 0.0101}  # a forward costs the same whatever its rows: a GPU
DEAR_ROWS = {1: 0.010, 2: 0.020, 64: 0.640}  # every row costs as much as the first


def a_request(tokens: Sequence[int] = (1, 2, 3), name: str = "a") -> Request:
    request = Request(list(tokens), SamplingParams(temperature=0.0, max_tokens=500), 1)
    request.id = name
    return request


def adaptive(points: dict[int, float], name: str = "ngram", nodes: int = 8) -> AdaptivePolicy:
    policy = AdaptivePolicy(SpeculativeConfig(name, num_speculative_tokens=nodes), lambda r: name)
    policy.costs = Costs(points)
    return policy


def live(policy: AdaptivePolicy, request: Request, drafts: int, right: bool, size: int = 4) -> list[int]:
    """So many drafts of which every token is right, or none. Returns how many nodes were kept each time."""
    kept = []
    for step in range(drafts):
        future = [10 + (step * size + i) % 50 for i in range(size)]
        [nodes] = policy.keep([request], ["ngram"], [Tree.chain(future)], ALONE)
        kept.append(len(nodes))
        said = future if right else [t + 100 for t in future]
        request.tokens += said[: len(nodes) + 1] if right else said[:1]
        policy.learn(StepTimes(0, 0.010, 0, 0, 1 + len(nodes), 0, 0.010), [request], [])
    return kept


# ------------------------------------------------------------------ costs
def test_costs_go_through_their_points_and_on_behind_the_last():
    costs = Costs({1: 1.0, 2: 3.0, 4: 5.0})
    assert costs.span(1, 6).tolist() == pytest.approx([1, 3, 4, 5, 6, 7])
    assert costs.of(MOST + 10) == pytest.approx(5 + (MOST + 10 - 4))
    assert costs.span(MOST - 1, 4).tolist() == pytest.approx([5 + n - 4 for n in range(MOST - 1, MOST + 3)])


def test_costs_follow_real_steps_and_ignore_wild_ones():
    costs = Costs({1: 1.0, 2: 1.0, 3: 1.0})
    for _ in range(60):
        costs.learn(2, 1.5)
    assert costs.of(2) == pytest.approx(1.5, rel=0.02)
    assert 1.0 < costs.of(1) < 1.5  # the whole machine may have become slower
    before = costs.of(2)
    costs.learn(2, 60.0)
    assert costs.of(2) == before


def test_costs_without_points_begin_with_the_first_step():
    costs = Costs()
    costs.learn(3, 0.5)
    assert costs.of(3) == pytest.approx(0.5) and costs.known


def test_measuring_leaves_the_runner_as_it_was():
    texts = []
    for measured in (False, True):
        engine = harness.engine(tiny.model("llama"), {"method": "ngram"})
        if measured:
            assert all(measure(engine.runner, 12).span(1, 12) > 0)
        texts.append(harness.run(engine, [harness.request(tiny.prompts(1)[0], max_tokens=12)]))
    assert texts[0] == texts[1]


# ------------------------------------------------------------------ beliefs
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_a_claim_is_booked_the_same_token_by_token_or_at_once(drafted: list[int], text: list[int], step: int):
    whole, pieces = (
        Claim(_kinds("x", Tree.chain(drafted)), Tree.chain(drafted), 0),
        Claim(_kinds("x", Tree.chain(drafted)), Tree.chain(drafted), 0),
    )
    booked = []
    for end in range(0, len(text) + step, step):
        booked += pieces.follow(text[:end])
    assert booked == whole.follow(text)
    right = next(
        (i for i, (a, b) in enumerate(zip(drafted, text, strict=False)) if a != b), min(len(drafted), len(text))
    )
    assert [ok for _, ok in booked].count(True) == right
    assert whole.over == (right == len(drafted) or right < len(text))


def test_every_child_of_a_right_node_is_a_trial():
    branching = Tree([5, 6, 7, 8], [-1, -1, 0, 1], kinds=[1, 2, 3, 4])
    trials = Claim(_kinds("x", branching), branching, 2).follow([0, 0, 6, 8])
    assert trials == [(("x", 1, 1), False), (("x", 2, 1), True), (("x", 4, 2), True)]


def test_beliefs_learn_from_drafts_that_were_never_verified():
    beliefs, request = Beliefs(), a_request()
    before = beliefs.chances(request, "ngram", Tree.chain([1]))[0]
    for _ in range(10):
        beliefs.claim(request, "ngram", Tree.chain([7]))
        request.tokens.append(7)
        beliefs.hear(request)
    assert beliefs.chances(request, "ngram", Tree.chain([1]))[0] > 0.9 > before
    other = a_request(name="b")
    assert before < beliefs.chances(other, "ngram", Tree.chain([1]))[0]  # and others profit
    beliefs.forget(request)
    assert not beliefs._own


def test_kinds_and_drafters_are_told_apart():
    beliefs, request = Beliefs(), a_request()
    for _ in range(10):
        beliefs.claim(request, "ngram", Tree([7], [-1], kinds=[5]))
        beliefs.claim(request, "ngram", Tree([8], [-1], kinds=[2]))
        request.tokens.append(7)
        beliefs.hear(request)
    good, bad = (beliefs.chances(request, "ngram", Tree([0], [-1], kinds=[k]))[0] for k in (5, 2))
    assert good > 0.9 and bad < 0.1
    assert beliefs.chances(request, "suffix", Tree([0], [-1], kinds=[5]))[0] == pytest.approx(0.3)


def test_a_text_that_turns_is_believed_within_a_few_drafts():
    policy, request = adaptive(FREE_ROWS), a_request()
    live(policy, request, 20, right=True)
    assert policy.beliefs.chances(request, "ngram", Tree.chain([1] * 4))[3] > 0.8
    live(policy, request, 10, right=False)
    assert policy.beliefs.chances(request, "ngram", Tree.chain([1]))[0] < 0.5


# ------------------------------------------------------------------ decisions
def test_good_drafts_are_taken_whole_where_rows_are_free_and_not_at_all_where_they_are_dear():
    assert live(adaptive(FREE_ROWS), a_request(), 10, right=True)[-1] == 4
    assert live(adaptive({1: 0.010, 2: 0.0201, 64: 0.64}), a_request(), 30, right=True)[-1] == 0


def test_bad_drafts_are_left_out_and_go_on_teaching():
    policy, request = adaptive(DEAR_ROWS), a_request()
    assert sum(live(policy, request, 30, right=False)) == 0
    chance = policy.beliefs.chances(request, "ngram", Tree.chain([1]))[0]
    assert chance < 0.1


def test_a_forward_that_is_cheaper_with_more_rows_gets_them():
    """As on llama.cpp, where four rows cost less than three."""
    policy = adaptive({1: 0.0076, 2: 0.0117, 3: 0.016, 4: 0.0148, 5: 0.0183, 64: 0.2})
    assert live(policy, a_request(), 20, right=True)[-1] == 3


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=10), min_size=1, max_size=5),
    st.floats(0.0001, 0.02),
)
def test_what_is_kept_is_a_tree_and_the_smallest_good_choice(shapes: list[list[tuple[int, int]]], row: float):
    """Against all other numbers of nodes, by brute force."""
    policy = adaptive({1: 0.01, 2: 0.01 + row, 64: 0.01 + 63 * row})
    drafts = [
        Tree([5] * len(s), [p % (i + 1) - 1 for i, (p, _) in enumerate(s)], kinds=[k for _, k in s]) for s in shapes
    ]
    requests = [a_request(name=str(i)) for i in range(len(drafts))]
    kept = policy.keep(requests, ["ngram"] * len(drafts), drafts, Load(len(drafts), 0, 0))
    for draft, own in zip(drafts, kept, strict=True):
        assert own == sorted(set(own)) and all(draft.parents[n] in (-1, *own) for n in own)
        assert tree.check(tree.select(draft, own), 10) is None
    chances = [policy.beliefs.chances(r, "ngram", d) for r, d in zip(requests, drafts, strict=True)]
    ranked = sorted((c for own in chances for c in own), reverse=True)

    def worth(m: int) -> float:
        return (len(drafts) + sum(ranked[:m])) / policy.costs.of(len(drafts) + m)

    chosen = sum(map(len, kept))
    assert sum(c for own, nodes in zip(chances, kept, strict=True) for c in [own[n] for n in nodes]) == pytest.approx(
        sum(ranked[:chosen])
    )
    best = max(worth(m) for m in range(len(ranked) + 1))
    assert worth(chosen) >= GOOD * best * (1 - 1e-9)
    assert all(worth(m) < GOOD * best * (1 + 1e-9) for m in range(chosen))


def test_limits_of_configuration_and_request_hold():
    policy, request = adaptive(FREE_ROWS, nodes=6), a_request()
    assert policy.budget([request], ALONE) == [6]
    request.speculation = type(request.speculation)(max_tokens=2)
    assert policy.budget([request], ALONE) == [2]
    request.speculation = type(request.speculation)(enabled=False)
    assert policy.budget([request], ALONE) == [0]


def test_where_asking_costs_it_is_rare_once_drafts_do_not_pay():
    """A drafter that runs a model for 5 ms a token, beside a target of 10 ms."""
    policy, request = adaptive(FREE_ROWS, "draft_model"), a_request()
    asked = 0
    for _ in range(400):
        [budget] = policy.budget([request], ALONE)
        asked += bool(budget)
        name, draft = ("draft_model", Tree.chain([7] * budget)) if budget else ("", Tree())
        [nodes] = policy.keep([request], [name], [draft], ALONE)
        request.tokens.append(3)
        seconds = 0.005 * budget
        policy.learn(StepTimes(seconds, 0.010, 0, 0, 1 + len(nodes), 0, 0.010 + seconds), [request], [])
    assert 1 <= asked <= 40


def test_state_goes_with_the_request():
    policy, request = adaptive(FREE_ROWS), a_request()
    live(policy, request, 3, right=True)
    policy.release(request)
    assert not policy._paces and not policy.beliefs._own


# ------------------------------------------------------------------ in the engine
@register("test-always-wrong")
class AlwaysWrong(Drafter):
    def propose(self, view: View) -> Draft:
        return Draft.chains([[(r.tokens[-1] + 1 + i) % 7 for i in range(r.budget)] for r in view.requests])


@pytest.mark.parametrize("method", ["ngram", "suffix", "test-always-wrong", "draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("points", [FREE_ROWS, DEAR_ROWS])
def test_the_text_is_that_of_plain_decoding(method: str, temperature: float, points: dict[int, float]):
    prompts = tiny.prompts(3)
    texts = []
    for speculative in (None, {"method": method, "policy": "adaptive"}):
        draft = tiny.noisy("llama") if speculative and method == "draft_model" else None
        engine = harness.engine(tiny.model("llama"), speculative, draft)
        if speculative:
            assert isinstance(engine.policy, AdaptivePolicy)
            engine.policy.costs = Costs(points)
        asked = [harness.request(p, max_tokens=40, temperature=temperature, seed=i) for i, p in enumerate(prompts)]
        texts.append(harness.run(engine, asked))
        engine.check_integrity()
    assert texts[0] == texts[1]


def test_a_policy_is_chosen_by_name_and_a_slip_is_said():
    assert isinstance(harness.engine(tiny.model("llama"), {"method": "ngram"}).policy, FixedPolicy)
    config, _ = parse_speculative({"method": "ngram", "policy": "adaptive"})
    assert config.num_speculative_tokens == 16
    with pytest.raises(ConfigError, match="fixed or adaptive"):
        parse_speculative({"method": "ngram", "policy": "clever"})


def test_costs_are_numbers():
    assert isinstance(Costs({1: 1.0}).span(1, 3), np.ndarray)
