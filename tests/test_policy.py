"""Policies: what is believed of drafts, what rows cost, and that speculation which does not pay is left out."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart import tree
from headstart.config import SpeculativeConfig, parse_speculative
from headstart.core import Draft, Request, RequestSpeculation, SamplingParams, Tree, View
from headstart.drafters import WEIGHTLESS, Drafter, register
from headstart.errors import ConfigError
from headstart.policy import Errand, Load, StepTimes, Wish
from headstart.policy.adaptive import (
    LEAST,
    PLAIN_EVERY,
    PROBES,
    PROOFS,
    RARELY,
    ROW_MARGIN,
    SCOUTS,
    STRANGERS,
    AdaptivePolicy,
    Pace,
)
from headstart.policy.beliefs import FIRST, Beliefs, Claim
from headstart.policy.costs import MOST, OCTAVE, Costs, Errands, is_still_so, measure
from headstart.policy.fixed import FixedPolicy
from headstart.policy.store import Store
from tests import harness, tiny

ALONE = Load(1, 0, 0)
FREE_ROWS = {1: 0.010, 64: 0.0101}  # a forward costs the same whatever its rows: a GPU
DEAR_ROWS = {1: 0.010, 2: 0.020, 64: 0.640}  # every row costs as much as the first


def a_request(tokens: Sequence[int] = (1, 2, 3), name: str = "a") -> Request:
    request = Request(list(tokens), SamplingParams(temperature=0.0, max_tokens=100_000), 1)
    request.id = name
    return request


def adaptive(points: dict[int, float], *names: str, nodes: int = 8) -> AdaptivePolicy:
    names = names or ("ngram",)
    policy = AdaptivePolicy(SpeculativeConfig(names[0], num_speculative_tokens=nodes), lambda r: names)
    policy.costs = Costs(points)
    return policy


def chain(tokens: Sequence[int], name: str = "ngram") -> Tree:
    return Tree(list(tokens), list(range(-1, len(tokens) - 1)), origins=[name] * len(tokens))


def live(policy: AdaptivePolicy, request: Request, drafts: int, right: bool, size: int = 4) -> list[int]:
    """So many drafts of which every token is right, or none. Returns how many nodes were chosen each time."""
    kept = []
    for step in range(drafts):
        future = [10 + (step * size + i) % 50 for i in range(size)]
        [chosen] = policy.choose([request], [{"ngram": chain(future)}], ALONE)
        policy._claimed.clear()
        kept.append(len(chosen))
        said = future if right else [t + 100 for t in future]
        request.tokens += said[: len(chosen) + 1] if right else said[:1]
        seconds = policy.costs.of(1 + len(chosen))
        produced = 1 + (len(chosen) if right else 0)
        policy.learn(StepTimes(0, seconds, 0, 0, 1 + len(chosen), 0, seconds, produced=produced), [request], [])
    return kept


@dataclass
class World:
    """Requests whose text is known, drafters that are right with a chance of their own, and what things cost."""

    points: dict[int, float]
    right: dict[str, float]
    level: dict[str, float]  # seconds of a drafter for one token of depth
    company: int = 1
    overhead: float = 0.0

    def run(self, policy: AdaptivePolicy, steps: int, seed: int = 0) -> tuple[float, dict[str, int]]:
        """Tokens per second, and how often each drafter was asked."""
        rng, truth = random.Random(seed), Costs(self.points)
        requests = [a_request(name=str(i)) for i in range(self.company)]
        asked, clock, tokens = dict.fromkeys(self.right, 0), 0.0, 0
        load = Load(self.company, 0, 0)
        for _ in range(steps):
            proposals: list[dict[str, Tree]] = [{} for _ in requests]
            errands = []
            while any(wishes := policy.ask(requests, proposals, load)):
                for name in dict.fromkeys(n for own in wishes for n in own):
                    depths = [own[name].depth for own in wishes if name in own]
                    levels, rows = (1, len(depths)) if name in WEIGHTLESS else (max(depths), sum(depths))
                    errands.append(Errand(name, len(depths), levels, rows, self.level[name] * levels))
                    asked[name] += 1
                for own, wished in zip(proposals, wishes, strict=True):
                    for name, wish in wished.items():
                        own[name] = chain([int(rng.random() < self.right[name]) for _ in range(wish.depth)], name)
            trees = policy.choose(requests, proposals, load)
            rows = len(requests) + sum(map(len, trees))
            drafting = sum(e.seconds for e in errands)
            new = [len(tree.follow(t, [1] * len(t))) + 1 for t in trees]
            for r, n in zip(requests, new, strict=True):
                r.tokens += [1] * n
            seconds = truth.of(rows)
            period = seconds + drafting + self.overhead
            policy.learn(
                StepTimes(drafting, seconds, 0, 0, rows, 0, period, 0.0, tuple(errands), sum(new)), requests, []
            )
            clock, tokens = clock + period, tokens + sum(new)
        return tokens / clock, asked


# ------------------------------------------------------------------ costs
def test_costs_go_through_their_points_and_on_behind_the_last():
    costs = Costs({1: 1.0, 2: 3.0, 4: 5.0})
    assert costs.span(1, 6).tolist() == pytest.approx([1, 3, 4, 5, 6, 7])
    assert costs.of(MOST + 10) == pytest.approx(5 + (MOST + 10 - 4))
    assert costs.span(MOST - 1, 4).tolist() == pytest.approx([5 + n - 4 for n in range(MOST - 1, MOST + 3)])
    far = Costs({1: 1.0, 2 * MOST: 2.0 * MOST})
    assert far.span(3 * MOST // 2, 1)[0] == pytest.approx(far.of(3 * MOST // 2)) == pytest.approx(1.5 * MOST)


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
        Claim("x", Tree.chain(drafted), 0),
        Claim("x", Tree.chain(drafted), 0),
    )
    booked = []
    for end in range(0, len(text) + step, step):
        booked += pieces.follow(text[:end])
    assert booked == whole.follow(text)
    right = next(
        (i for i, (a, b) in enumerate(zip(drafted, text, strict=False)) if a != b), min(len(drafted), len(text))
    )
    assert [ok for kind, ok in booked if kind[1] != FIRST].count(True) == right
    assert whole.over == (right == len(drafted) or right < len(text))


def test_every_child_of_a_right_node_is_a_trial():
    branching = Tree([5, 6, 7, 8], [-1, -1, 0, 1], kinds=[1, 2, 3, 4])
    trials = Claim("x", branching, 2).follow([0, 0, 6, 8])
    first = [(("x", FIRST, 1), False), (("x", FIRST, 2), True)]
    assert trials == [(("x", 1, 1), False), (("x", 2, 1), True), first[0], (("x", 4, 2), True), first[1]]


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
    policy = adaptive({1: 0.0076, 2: 0.0117, 3: 0.016, 4: 0.0148, 5: 0.0223, 64: 0.25})
    assert live(policy, a_request(), 20, right=True)[-1] == 3


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=10), min_size=1, max_size=5),
    st.floats(0.0001, 0.02),
)
def test_what_is_chosen_is_a_tree_and_worth_most(shapes: list[list[tuple[int, int]]], row: float):
    """Against all other numbers of nodes, by brute force."""
    policy = adaptive({1: 0.01, 2: 0.01 + row, 64: 0.01 + 63 * row}, nodes=10)
    drafts = [
        Tree(
            list(range(len(s))),
            [p % (i + 1) - 1 for i, (p, _) in enumerate(s)],
            kinds=[k for _, k in s],
            origins=["ngram"] * len(s),
        )
        for s in shapes
    ]
    requests = [a_request(name=str(i)) for i in range(len(drafts))]
    load = Load(len(drafts), 0, 0)
    chances = [policy.beliefs.chances(r, "ngram", d) for r, d in zip(requests, drafts, strict=True)]
    chosen = policy.choose(requests, [{"ngram": d} for d in drafts], load)
    for draft, own in zip(drafts, chosen, strict=True):
        assert tree.check(own, 10) is None and set(own.tokens) <= set(draft.tokens)
    ranked = sorted((c for own in chances for c in own), reverse=True)
    rate = policy.rate(len(drafts))

    def worth(m: int) -> float:
        more = policy.costs.of(len(drafts) + m) - policy.costs.of(len(drafts))
        return sum(ranked[:m]) - ROW_MARGIN * rate * more

    count = sum(map(len, chosen))
    kept = [own[n] for own, t in zip(chances, chosen, strict=True) for n in t.tokens]
    assert sum(kept) == pytest.approx(sum(ranked[:count]))
    best = max(worth(m) for m in range(len(ranked) + 1))
    assert worth(count) == pytest.approx(best, abs=1e-9) or (count == 0 and best <= LEAST)


def test_limits_of_configuration_and_request_hold():
    policy, request = adaptive(FREE_ROWS, nodes=6), a_request()
    assert policy.ask([request], [{}], ALONE) == [{"ngram": Wish(6, 6)}]
    assert policy.ask([request], [{}], Load(1, 0, 0, room=3)) == [{"ngram": Wish(3, 3)}]
    request.speculation = type(request.speculation)(max_tokens=2)
    assert policy.ask([request], [{}], ALONE) == [{"ngram": Wish(2, 2)}]
    request.speculation = type(request.speculation)(enabled=False)
    assert policy.ask([request], [{}], ALONE) == [{}]


@pytest.mark.parametrize("company", [1, 8, 64])
def test_a_bad_drafter_costs_little_and_a_good_one_pays(company: int):
    """A model that takes 5 ms a token, beside a target of 10 ms whose rows are cheap."""
    points = {1: 0.010, 64: 0.012, 512: 0.020}
    plain = company / Costs(points).of(company)
    bad, asked = World(points, {"draft_model": 0.02}, {"draft_model": 0.005}, company).run(
        adaptive(points, "draft_model"), 600
    )
    assert bad > 0.985 * plain and asked["draft_model"] >= 1
    good, _ = World(points, {"draft_model": 0.9}, {"draft_model": 0.001}, company).run(
        adaptive(points, "draft_model"), 200
    )
    assert good > 2 * plain


@pytest.mark.parametrize("names", [("ngram",), ("ngram", "draft_model")])
def test_costs_that_were_measured_beside_other_work_are_found_out(names: tuple[str, ...]):
    """Rows seemed to cost as much as the first. So nobody drafts, and nobody would notice that they cost next to nothing."""
    right, level = dict.fromkeys(names, 0.9), {"ngram": 1e-5, "draft_model": 0.002}
    world = World(FREE_ROWS, {n: right[n] for n in names}, {n: level[n] for n in names})
    policy = adaptive({1: 0.010, 2: 0.021, 3: 0.032, 64: 0.7}, *names)
    world.run(policy, 4000)
    speed, _ = world.run(policy, 200)
    assert speed > 4 / Costs(FREE_ROWS).of(1)


def test_rows_that_do_not_pay_are_verified_within_a_bound():
    world = World(DEAR_ROWS, {"ngram": 0.3}, {"ngram": 1e-6})
    speed, _ = world.run(adaptive(DEAR_ROWS), 3000)
    assert speed * Costs(DEAR_ROWS).of(1) > 1 - 2 * PROOFS


def test_how_sure_one_is_of_a_price_grows_with_steps_and_fades():
    costs = Costs({1: 1.0, 2: 2.0, 3: 3.0, 64: 64.0})
    assert not costs.is_sure(1, 2)
    for _ in range(20):
        costs.learn(1, 1.0)
        costs.learn(3, 2.0)
    assert costs.is_sure(1, 2)
    assert costs.of(1) == pytest.approx(1.0, rel=0.02) and costs.of(3) == pytest.approx(2.0, rel=0.02)
    for _ in range(300):
        costs.learn(1, 1.0)
    assert not costs.is_sure(1, 2), "nobody has met 3 rows for long"


def test_a_machine_that_becomes_slow_is_slow_for_all_numbers_of_rows():
    costs = Costs({1: 1.0, 2: 1.5, 4: 2.5, 8: 4.5})
    for _ in range(30):
        for rows in (1, 2, 4, 8):
            costs.learn(rows, 0.5 + 0.5 * rows)
    for _ in range(30):
        costs.learn(2, 3.0)
    assert costs.of(2) == pytest.approx(3.0, rel=0.02)
    assert 7.0 < costs.of(8) <= 9.0, "it was 4.5"


@pytest.mark.parametrize("thought", [{40: 64.0, 48: 64.0}, {96: 65.0, 128: 66.0, 256: 68.0}])
def test_what_rows_cost_is_learned_where_no_step_is_without_drafts(thought: dict[int, float]):
    """Rows behind the 64th seem to cost nothing. Were that taken for a machine that has become slow, drafts would go on."""
    costs = Costs({n: float(n) for n in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64)} | thought)
    rng = random.Random(1)
    for _ in range(30):
        rows = rng.randint(80, 140)
        costs.learn(rows, float(rows))
    for more in (16, 32, 64):
        assert costs.of(64 + more) - costs.of(64) > 0.6 * more


def test_rows_of_prompts_teach_what_rows_cost():
    """They have no logits, and so take less; how much less is learned."""
    costs = Costs({n: float(n) for n in (1, 2, 4, 8, 16, 32, 64)})
    rng = random.Random(1)
    for _ in range(100):
        drafts, prompt = rng.choice((0, 30)), rng.randint(0, 60)
        costs.learn(32 + drafts + prompt, 0.5 * (32 + drafts) + 0.35 * prompt + 16, prompt=prompt)
    assert costs.of(62) - costs.of(32) == pytest.approx(0.5 * 30, rel=0.25)


def test_asking_in_vain_takes_a_bounded_share_of_the_time():
    points = {1: 0.010, 64: 0.64}
    world = World(points, {"draft_model": 0.0}, {"draft_model": 0.010})
    policy = adaptive(points, "draft_model")
    world.run(policy, 50)
    _, asked = world.run(policy, 2000)
    assert asked["draft_model"] >= 1
    assert asked["draft_model"] * 2 * 0.010 <= 1.2 * PROBES * 2000 * 0.010


def test_a_drafter_that_has_become_good_is_found_again():
    points = {1: 0.010, 64: 0.0101}
    policy = adaptive(points, "draft_model")
    World(points, {"draft_model": 0.0}, {"draft_model": 0.002}).run(policy, 300)
    speed, _ = World(points, {"draft_model": 0.95}, {"draft_model": 0.002}).run(policy, 300)
    assert speed > 1.5 / 0.010


def test_the_router_takes_whoever_is_worth_more():
    """Free drafts where they are right, the model where they are not."""
    points, level = {1: 0.010, 64: 0.0105}, {"ngram": 1e-5, "draft_model": 0.004}
    policy = adaptive(points, "ngram", "draft_model")
    _, asked = World(points, {"ngram": 0.97, "draft_model": 0.6}, level).run(policy, 300)
    assert asked["ngram"] >= 297 and asked["draft_model"] < 30
    policy = adaptive(points, "ngram", "draft_model")
    speed, asked = World(points, {"ngram": 0.03, "draft_model": 0.9}, level).run(policy, 300)
    assert asked["draft_model"] > 250 and speed > 1.4 / 0.010


def test_seconds_are_taken_from_those_that_read_their_prompts_too():
    """Rows beside somebody's prompt delay more requests than those that get a token in this step."""
    policy = adaptive({1: 0.010, 64: 0.020, 512: 0.1})
    alone, beside = (policy._price(1, Load(running, 0, 200)) for running in (1, 6))
    assert beside > 2 * alone


def test_rows_that_seem_to_cost_nothing_are_no_gain():
    """A curve with a dip, measured or real: a node is worth its chance, not more."""
    policy = adaptive({1: 0.010, 8: 0.080, 9: 0.070, 64: 0.64})
    assert policy._price(8, Load(8, 0, 0)) == 0.0


def test_quiet_requests_are_asked_for_together():
    policy = adaptive(DEAR_ROWS, "ngram")
    policy.errands.learn(Errand("ngram", 1, 1, 1, 0.001))
    requests = [a_request(name=str(i)) for i in range(4)]
    for i, r in enumerate(requests):
        policy._paces[r.id, "ngram"] = Pace(asked=500 * (i == 2), worth=0.0)
    load = Load(4, 0, 0)
    assert all(policy.ask(requests, [{} for _ in requests], load))
    policy._paces["2", "ngram"].asked = 0
    assert not any(policy.ask(requests, [{} for _ in requests], load))


def test_what_several_propose_becomes_one_tree():
    policy, request = adaptive(FREE_ROWS, "ngram", "suffix"), a_request()
    for name in ("ngram", "suffix"):
        for _ in range(20):
            policy.beliefs.claim(request, name, chain([7]))
            request.tokens.append(7)
            policy.beliefs.hear(request)
    [chosen] = policy.choose([request], [{"ngram": chain([1, 2]), "suffix": chain([1, 3], "suffix")}], ALONE)
    assert chosen.tokens == [1, 2, 3] and chosen.parents == [-1, 0, 0]
    assert set(chosen.origins or ()) == {"ngram", "suffix"}


def test_what_was_drawn_for_rejection_is_verified_as_it_is():
    """Whether it is must not depend on what was drawn, nor on how long that happens to be; others' nodes do not mix with it."""
    policy, request = adaptive(DEAR_ROWS, "ngram", "draft_model"), a_request()
    for size in (1, 2, 3):
        drawn = Tree(
            list(range(size)), list(range(-1, size - 1)), logq_rows=list(range(size)), origins=["draft_model"] * size
        )
        policy._claimed.clear()
        [chosen] = policy.choose([request], [{"ngram": chain([5, 6]), "draft_model": drawn}], ALONE)
        assert chosen.tokens == drawn.tokens and chosen.logq_rows == drawn.logq_rows


def test_caps_hold_for_what_several_propose():
    policy, request = adaptive(FREE_ROWS, "ngram", "suffix"), a_request()
    request.speculation = RequestSpeculation(max_tokens=3)
    for name in ("ngram", "suffix"):
        for _ in range(20):
            policy.beliefs.claim(request, name, chain([7]))
            request.tokens.append(7)
            policy.beliefs.hear(request)
    [chosen] = policy.choose([request], [{"ngram": chain([1, 2, 3]), "suffix": chain([4, 5, 6], "suffix")}], ALONE)
    assert len(chosen) == 3


def test_a_plain_step_breaks_no_promise():
    points = {1: 0.010, 64: 0.0105}
    policy = adaptive(points, "eagle3")
    World(points, {"eagle3": 1.0}, {"eagle3": 0.0005}, 8).run(policy, PLAIN_EVERY + 40)
    assert policy._hopes["", "eagle3"].value() > 0.8


def test_a_request_that_never_ran_leaves_nothing_and_breaks_nothing():
    e = harness.engine(tiny.model("llama"), {"method": "auto"})
    bad = harness.request(tiny.prompts(1)[0], {"method": "draft_model"})
    with pytest.raises(ConfigError, match="not loaded"):
        e.add(bad)
    e.abort(bad)
    asked = [harness.request(tiny.prompts(1)[0], max_tokens=8)]
    assert harness.run(e, asked)[0] and not e.policy._paces and not e.drafting._choices


def test_state_goes_with_the_request():
    policy, request = adaptive(FREE_ROWS), a_request()
    live(policy, request, 3, right=True)
    policy.release(request)
    assert not policy._paces and not policy.beliefs._own


def test_heads_read_along_only_where_that_is_worth_it():
    points, level = {1: 0.010, 64: 0.0101}, {"eagle3": 0.003}
    policy = adaptive(points, "eagle3")
    assert policy.enlist(a_request(), ALONE), "nothing is known of it yet"
    World(points, {"eagle3": 0.1}, level, 8).run(policy, 200)
    came = [policy.enlist(a_request(name=str(i)), Load(8, 0, 0)) for i in range(64)]
    assert sum(came) == 64 // SCOUTS
    World(points, {"eagle3": 0.9}, level, 8).run(policy, 400)
    assert all(policy.enlist(a_request(name=str(i)), Load(8, 0, 0)) for i in range(16))


def test_where_reading_along_was_in_vain_it_becomes_rare():
    policy = adaptive({1: 0.010, 64: 0.0101}, "eagle3")
    World({1: 0.010, 64: 0.0101}, {"eagle3": 0.1}, {"eagle3": 0.003}, 8).run(policy, 200)
    followed = []
    for i in range(4 * RARELY):
        request = a_request(name=str(i))
        followed.append(policy.enlist(request, Load(8, 0, 0)))
        if followed[-1]:
            request.stats.tokens = 32
            policy.release(request)  # none of its tokens came from the head
    assert 4 <= sum(followed) <= 4 + 2 and sum(followed[-RARELY:]) == 1


def test_a_newcomer_is_asked_about_as_often_as_it_brought_the_others_something():
    """Ten requests for which n-grams find nothing right, one after the other: hope alone would ask in most of the steps."""
    points = {1: 0.010, 64: 0.0105}
    policy = adaptive(points, "ngram")
    world = World(points, {"ngram": 0.0}, {"ngram": 1e-4})
    asked = []
    for _ in range(10):
        asked.append(world.run(policy, 32)[1]["ngram"])
        policy.release(a_request(name="0"))
    assert asked[0] > 24 and max(asked[-3:]) <= 12
    assert World(points, {"ngram": 0.95}, {"ngram": 1e-4}).run(policy, 64)[0] > 250, (
        "a text that repeats itself is found"
    )


def test_a_plain_step_now_and_then_tells_what_drafts_bring():
    points = {1: 0.010, 64: 0.0105}
    policy = adaptive(points, "ngram")
    World(points, {"ngram": 0.95}, {"ngram": 1e-5}).run(policy, 1000)
    assert policy.plain_steps >= 1000 // (PLAIN_EVERY + 1)
    said = policy.explain()
    assert said.speedup_estimate == pytest.approx(policy._gain) and said.speedup_estimate > 3
    assert said.plain_milliseconds == pytest.approx(10, rel=0.1) and 0 <= said.break_even < 0.1
    assert said.drafters["ngram"].right == pytest.approx(0.95, abs=0.05)
    assert said.drafters["ngram"].verified <= said.drafters["ngram"].proposed
    assert "ngram pays now" in " ".join(said.sentences())
    assert json.loads(json.dumps(said.to_dict()))["drafters"]["ngram"]["asked"] > 900


def test_a_fixed_policy_says_that_it_measures_nothing():
    said = FixedPolicy(SpeculativeConfig("ngram"), lambda r: ("ngram",)).explain()
    assert said.speedup_estimate is None and "measures nothing" in said.sentences()[0]


def test_drafters_work_is_told_by_levels_and_rows():
    errands = Errands()
    for levels in (1, 2, 4) * 5:
        for requests in (1, 8):
            seconds = 0.002 * levels + 0.0005 * levels * requests
            errands.learn(Errand("x", requests, levels, levels * requests, seconds))
    assert errands.of("x", 3, 12) == pytest.approx(0.012, rel=0.1)
    before = errands.of("x", 1, 1)
    errands.learn(Errand("x", 1, 1, 1, 5.0))  # it read a long text first
    assert errands.of("x", 1, 1) == before
    assert errands.of("unknown", 3, 3) == 0


# ------------------------------------------------------------------ on disk
def test_what_was_measured_is_kept_and_found_again(tmp_path: Path):
    policy, other = adaptive({1: 0.010, 8: 0.020, 64: 0.1}), adaptive(FREE_ROWS)
    policy.costs.reach = 1e-6
    policy.errands.learn(Errand("eagle3", 1, 2, 2, 0.004))
    store = Store(tmp_path / "costs", {"model": "m", "device": "d"})
    assert not store.load(other), "nothing is there yet"
    store.save(policy)
    assert store.load(other)
    assert other.costs.span(1, 64, 100).tolist() == pytest.approx(policy.costs.span(1, 64, 100).tolist(), rel=1e-6)
    assert other.errands.of("eagle3", 2, 2) == pytest.approx(policy.errands.of("eagle3", 2, 2))
    assert not Store(tmp_path / "costs", {"model": "m", "device": "another"}).load(other)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"seconds_by_rows": {"1": -1}, "seconds_by_row_and_context": 0}']
)
def test_a_file_that_cannot_be_read_is_measured_anew(text: str, tmp_path: Path):
    store, policy = Store(tmp_path, {"model": "m"}), adaptive(FREE_ROWS)
    store.path.write_text(text)
    before = policy.costs
    assert not store.load(policy) and policy.costs is before


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_stop(tmp_path: Path):
    (tmp_path / "file").write_text("")
    Store(tmp_path / "file" / "costs", {}).save(adaptive(FREE_ROWS))


def test_costs_of_before_are_believed_where_they_still_hold():
    runner = harness.engine(tiny.model("llama"), {"method": "ngram"}).runner
    real = measure(runner, 12)
    slower = Costs({1: 100 * real.of(1), 8: 100 * real.of(8)})
    assert not is_still_so(runner, slower, 64)
    assert not is_still_so(runner, Costs({n: real.of(n) * (5 if n == 4 else 1) for n in range(1, 13)}), 64)
    assert not is_still_so(runner, real, 2), "too few rows to see"


def test_a_forward_takes_no_longer_than_a_larger_one(monkeypatch):
    took = {1: 1.0, 2: 9.0, 4: 3.0, 8: 4.0, 3: 2.5, 5: 3.5, 6: 5.0, 7: 3.9}
    monkeypatch.setattr("headstart.policy.costs._seconds", lambda runner, slots, n: took[n])
    runner = harness.engine(tiny.model("llama"), {"method": "ngram"}).runner
    assert measure(runner, 8).span(1, 8).tolist() == [1.0, 2.5, 2.5, 3.0, 3.5, 3.9, 3.9, 4.0]


def test_a_moment_in_which_somebody_else_uses_the_machine_is_not_believed(monkeypatch):
    """Eight forwards in a row take five times as long: those of a few rows, behind the first."""
    timed: list[int] = []

    def seconds(runner: object, slots: object, n: int) -> float:
        timed.append(n)
        return (1 + 0.1 * n) * (5 if 2 < len(timed) <= 10 else 1)

    monkeypatch.setattr("headstart.policy.costs._seconds", seconds)
    runner = harness.engine(tiny.model("llama"), {"method": "ngram"}).runner
    assert measure(runner, 8).span(1, 8).tolist() == pytest.approx([1 + 0.1 * n for n in range(1, 9)])


# ------------------------------------------------------------------ in the engine
@register("test-always-wrong")
class AlwaysWrong(Drafter):
    def propose(self, view: View) -> Draft:
        return Draft.chains([[(r.tokens[-1] + 1 + i) % 7 for i in range(r.budget)] for r in view.requests])


def test_what_a_policy_takes_to_learn_counts_as_deciding():
    engine = harness.engine(tiny.model("llama"), {"method": "ngram"})
    engine.policy.learn = lambda *args: time.sleep(0.01)
    asked = harness.request(tiny.prompts(1)[0], max_tokens=8, eos=None)
    harness.run(engine, [asked])
    assert asked.stats.time_policy >= 0.01 * (asked.stats.steps - 1) > 0.01, "that of the last step is nobody's"


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("points", [FREE_ROWS, DEAR_ROWS])
def test_auto_with_a_head_gives_the_text_of_plain_decoding(temperature: float, points: dict[int, float]):
    """Several drafters in one tree, requests that come and go, some of them not followed by the head."""
    model, prompts, texts = tiny.model(), tiny.prompts(5), []
    for speculative in (None, {"method": "auto"}):
        head = tiny.eagle(model.config, (0, 1, 2), head_dim=32) if speculative else None
        e = harness.engine(model, speculative, head=head)
        if speculative:
            assert e.drafting.auto == ("ngram", "suffix", "eagle3") and isinstance(e.policy, AdaptivePolicy)
            e.policy.costs = Costs(points)
        asked = [harness.request(p, max_tokens=40, temperature=temperature, seed=i) for i, p in enumerate(prompts)]
        if speculative:
            asked[4].speculation = RequestSpeculation(method="ngram")
        texts.append(harness.run(e, asked, 2))
        e.check_integrity()
        if speculative and points is FREE_ROWS:
            assert sum(r.stats.drafted for r in asked) > 0
            assert set(asked[4].stats.by_drafter) <= {"ngram"}
            assert all(r.stats.speedup_estimate is not None for r in asked)
    assert texts[0] == texts[1]


def test_under_rejection_auto_keeps_to_one_drafter_for_each_draft():
    model = tiny.model()
    e = harness.engine(
        model, {"method": "auto", "verification": "rejection"}, head=tiny.eagle(model.config, (0, 1, 2), head_dim=32)
    )
    e.policy.costs = Costs(FREE_ROWS)
    seen: list[set[str]] = []
    choose = e.policy.choose
    e.policy.choose = lambda *a: (out := choose(*a), seen.extend(set(t.origins or ()) for t in out))[0]
    harness.run(e, [harness.request(p, max_tokens=30, temperature=1.0) for p in tiny.prompts(3)])
    assert any(seen) and all(len(own) <= 1 for own in seen if "eagle3" in own)


def test_a_policy_is_chosen_by_name_and_a_slip_is_said():
    assert isinstance(harness.engine(tiny.model("llama"), {"method": "ngram"}).policy, FixedPolicy)
    config, _ = parse_speculative({"method": "ngram", "policy": "adaptive"})
    assert config.num_speculative_tokens == 16
    with pytest.raises(ConfigError, match="fixed, adaptive or watch"):
        parse_speculative({"method": "ngram", "policy": "clever"})


def test_a_curve_that_was_kept_says_how_far_it_was_measured():
    costs = Costs({1: 0.02, 4: 0.03, 8: 0.05})  # more took too long, when the model was loaded
    kept = Costs.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert kept.of(32) == pytest.approx(costs.of(32))
    for again in (costs, kept, Costs.from_dict(kept.to_dict())):
        behind, before = again._own_unsure[2:][[again._rows.index(32), again._rows.index(8)]]
        assert behind == pytest.approx(before + 2 * OCTAVE**2), "two doublings behind the last one"
    with pytest.raises(ValueError, match="measured_rows"):
        Costs.from_dict(costs.to_dict() | {"measured_rows": 7})


def test_costs_are_numbers():
    assert isinstance(Costs({1: 1.0}).span(1, 3), np.ndarray)


def test_few_requests_are_followed_before_it_is_known_what_that_takes() -> None:
    policy = AdaptivePolicy(SpeculativeConfig("eagle3"), lambda r: ("eagle3",))
    requests = [Request([1], SamplingParams(), 0) for _ in range(3 * STRANGERS)]
    assert [policy.enlist(r, Load(1, 0, 0)) for r in requests] == [True] * STRANGERS + [False] * 2 * STRANGERS
    policy.errands.learn(Errand("eagle3", 1, 2, 2, 1e-3))
    policy.costs = Costs({1: 0.1, 64: 0.1})
    assert policy.enlist(requests[0], Load(1, 0, 0))
