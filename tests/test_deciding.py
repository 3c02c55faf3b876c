"""A policy that decides before drafts are known, on a device that is made up: it has to find out which way to draft is best,
for whom, and that none is."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from headstart.config import parse_speculative
from headstart.core import Request, RequestSpeculation, SamplingParams, Verdict
from headstart.policy import Load, StepTimes
from headstart.policy.ahead import DEAREST, EVERY, LONGEST, PATIENCE, UNDER_WAY, AheadPolicy, steps_of
from headstart.policy.purse import INCOME, LEAST, MOST, START
from headstart.policy.store import Store
from tests import harness, tiny
from tests.made_up import CHAIN, MODES, NGRAM, TREE, Device, policy, request
from tests.test_outcomes import hear

ROOM = Load(4, 0, 0, 100.0, 64)


def never() -> bool:
    return False


def always() -> bool:
    return True


# ------------------------------------------------------------------ what it brings
@pytest.mark.parametrize("load", [1, 4, 16, 64])
@pytest.mark.parametrize("kinds", [["code"], ["poor"], ["noise"], ["code", "poor", "noise"]])
def test_it_never_costs_and_is_about_as_good_as_the_best(kinds: list[str], load: int) -> None:
    count = max(30, 3 * load)
    plain = Device().run(kinds, load, count)
    best = max(Device(way=m).run(kinds, load, count) for m in MODES if load * (1 + m.nodes) <= 1024)
    speeds = []
    for seed in range(3):  # the luck of single drafts moves it by some percent
        device = Device(policy(), rng=random.Random(seed))
        device.run(kinds, load, max(8, 2 * load))  # cold
        speeds.append(device.run(kinds, load, count))
    auto = statistics.mean(speeds)
    assert min(speeds) > 0.98 * plain, speeds
    least = 0.93 if len(kinds) == 1 else 0.9  # of several kinds, they have others beside each other
    assert auto > least * best, speeds


def test_trees_alone_and_chains_in_company() -> None:
    alone, crowd = Device(policy()), Device(policy())
    alone.run(["code"], 1, 12)
    crowd.run(["code"], 64, 128)  # cold
    crowd.used.clear()
    crowd.run(["code"], 64, 128)
    assert max(alone.used, key=alone.used.get) == str(TREE)
    assert max(crowd.used, key=crowd.used.get) in (str(CHAIN), "eagle3 4")


@pytest.mark.parametrize("load", [1, 16])
@pytest.mark.parametrize("seed", range(3))
def test_no_more_is_lost_than_the_purse_bears(load: int, seed: int) -> None:
    """Where nothing ever pays, from the first step on."""
    p = policy()
    device = Device(p, rng=random.Random(seed))
    device.run(["hard"], load, 30 * load)
    steps = sum(device.used.values()) / load
    plain = p.periods.of(None, load)
    assert 0 < device.vain / plain < START + INCOME * steps + 1.0, "and what the last bet lost beyond that"
    assert p.purse.balance > LEAST


def test_a_head_rests_where_it_does_not_serve_and_not_for_the_others() -> None:
    """Both kinds are greedy, so nothing but their own drafts tells them apart."""
    device = Device(policy())
    device.run(["code", "hard"], 32, 64, tokens=128)  # cold
    device.drafts.clear()
    device.run(["code", "hard"], 32, 96, tokens=128)
    share = {kind: sum(drafts) / len(drafts) for kind, drafts in device.drafts.items()}
    assert share["hard"] < 0.6 and share["code"] > 0.8


@pytest.mark.parametrize("load", [4, 16])
@pytest.mark.parametrize("kind", ["code", "copies"])
def test_traffic_that_turns_is_drafted_for_again(kind: str, load: int) -> None:
    """By heads, or by those who look for what was there before."""
    device = Device(policy())
    device.run(["hard"], load, 6 * load)
    used = sum(n for mode, n in device.used.items() if "eagle3" in mode)
    assert used < 0.15 * sum(device.used.values())
    device.run([kind], load, 16 * load)
    device.used.clear()
    auto, plain = device.run([kind], load, 4 * load), Device().run([kind], load, 4 * load)
    assert auto > 1.2 * plain and device.used.get("None", 0) < 0.2 * sum(device.used.values())


@pytest.mark.parametrize("load", [4, 16, 32])
def test_behind_texts_of_another_heat_what_pays_is_begun_again(load: int) -> None:
    """While nobody could draft, nothing was heard of those who can; and what may be lost was not spent on what cannot pay."""
    device = Device(policy())
    device.run(["code"], load, 6 * load)
    device.run(["noise"], load, 20 * load)
    device.used.clear()
    device.run(["code"], load, 6 * load)
    assert device.used.get("None", 0) < 0.3 * sum(device.used.values())


def test_a_text_that_turns_is_drafted_for_again() -> None:
    """n-grams find nothing for a while, and then they do."""
    device = Device(policy())
    device.unread.add("hard 0")
    own = request("hard", 0)
    for _ in range(300):
        device.step([own])
    before = device.used.get("ngram 3", 0) + device.used.get("ngram 6", 0)
    assert before < 150
    own.id = "code 0"
    device.unread.add("code 0")
    for _ in range(300):
        device.step([own])
    assert device.used.get("ngram 3", 0) + device.used.get("ngram 6", 0) - before > 150


# ------------------------------------------------------------------ bets and trials
def test_who_saves_for_what_should_pay_tries_nothing_else() -> None:
    """It is likely to pay, and too much of a bet for what is left."""
    p = policy()
    device, requests = Device(p), [request("code", i) for i in range(16)]
    hear(p.outcomes, CHAIN, 0.45, 400)
    p.outcomes.came += 1000  # others came since
    p.purse.balance, p.purse.curiosity = 0.0, 4.0
    device.step(requests)
    assert device.used == {"None": 16}
    assert p._due > EVERY, "it waits until the purse bears it,"
    while set(device.used) == {"None"}:
        device.step(requests)
    assert device.used.get(str(CHAIN), 0) == 16, "and begins it then"


def test_a_trial_is_for_as_many_as_the_purse_allows_and_ends() -> None:
    p = policy()
    device, requests = Device(p), [request("hard", i) for i in range(16)]
    for mode in (CHAIN, TREE):
        hear(p.outcomes, mode, 0.02, 400)
    hear(p.outcomes, NGRAM, 0.05, 12)  # it does not seem to pay, and may
    p.purse.balance, p.purse.curiosity, counts = 2.0, 1.0, []
    for _ in range(30):
        before = dict(device.used)
        device.step(requests)
        counts.append(16 - (device.used.get("None", 0) - before.get("None", 0)))
    tried = [n for n in counts if n]
    assert tried and p.purse.curiosity < 1.0
    first = counts.index(tried[0])
    length = next(n for n, count in enumerate([*counts[first:], 0]) if not count)
    assert length <= steps_of(tried[0]) + UNDER_WAY + 1
    p.purse.balance = 0.0
    device.used.clear()
    for _ in range(20):
        device.step(requests)
    assert device.used == {"None": 320}, "nothing is tried with nothing"


def test_what_loses_is_thought_about_anew() -> None:
    """Long before the decision is due, and before all is lost that was won."""
    p = policy()
    device, requests = Device(p), [request("code", i) for i in range(4)]
    for _ in range(200):
        device.step(requests)
    assert any(p._answers) and p.purse.balance == MOST
    for i, r in enumerate(requests):
        guest = p._guests.pop(r.id)
        r.id = f"hard {i}"
        p._guests[r.id] = guest
    device.vain, p.purse.curiosity = 0.0, 0.0
    for _ in range(60):
        device.step(requests)
    assert not any(p._answers) and device.vain < (MOST - LEAST + 1) * p.periods.of(None, 4)


def test_one_step_that_takes_wildly_long_is_no_loss_but_those_behind_it_are() -> None:
    p = policy()
    device, requests = Device(p), [request("code", i) for i in range(4)]
    hear(p.outcomes, CHAIN, 0.8, 100)
    for _ in range(9):
        device.step(requests)
    asked, plain = p._answers, p.periods.of(None, 4)
    assert any(asked)
    p._read()
    p.purse.balance, lost = 4.0, []
    for _ in range(3):
        before = p.purse.balance
        times = StepTimes(0, 0, 0, 0, 12, 0, 1e3 * plain, produced=8, asked=asked, drafted=[2] * 4)
        p.learn(times, requests, [Verdict([0], 0)] * 4)
        p._read()
        lost.append(before - p.purse.balance)
    assert lost[0] <= 0 and all(0 < own <= DEAREST for own in lost[1:])


def test_drafts_are_not_blamed_for_steps_that_wait_for_prompts() -> None:
    """Plain ones would have waited, too."""
    p = policy()
    device, requests = Device(p), [request("code", i) for i in range(4)]
    hear(p.outcomes, CHAIN, 0.8, 100)
    for _ in range(9):
        device.step(requests)
    p._read()
    p.purse.balance = 0.0
    before, plain = p.purse.balance, p.periods.of(None, 4)
    for _ in range(20):
        times = StepTimes(0, 0, 0, 0, 12, 64, 2.9 * plain, produced=8, asked=p._answers, drafted=[2] * 4)
        p.learn(times, requests, [Verdict([0], 0)] * 4)
    p._read()
    assert p.purse.balance > before


# ------------------------------------------------------------------ newcomers
def test_a_newcomer_drafts_as_the_others_where_that_pays_for_one_more() -> None:
    p = policy()
    device = Device(p)
    device.run(["code"], 8, 32)
    others = [request("code", 100 + i) for i in range(8)]
    for _ in range(EVERY):
        device.step(others)
    new, unread = request("code", 200), request("code", 201)
    device.unread.add(unread.id)
    *_, last, least = p.ask([*others[:6], new, unread], [{}] * 8, ROOM)
    assert last == p._answers[0] != {} and least == {}, "whom its drafter may serve"
    crowd = [*others, *(request("code", 300 + i) for i in range(200))]
    p.periods._table[p._way] = [50 * s for s in p.periods._table[p._way]]
    assert not any(p.ask(crowd, [{}] * len(crowd), ROOM)[8:]), "and not where it costs more than it brings"


def test_where_the_company_changes_it_is_decided_anew() -> None:
    p = policy()
    device, requests = Device(p), [request("hard", i) for i in range(16)]
    p.purse.curiosity = 0.0
    for mode in MODES:
        hear(p.outcomes, mode, 0.01, 400)
    for _ in range(EVERY):
        device.step(requests)
    assert p._due > p._steps
    p.ask(requests[:8], [{}] * 8, ROOM)
    assert p._due <= p._steps


def test_heads_read_prompts_where_they_may_pay() -> None:
    p = policy()
    Device(p)
    assert p.enlist(request("code", 0), Load(4, 0, 0)), "nothing was heard of it"
    hear(p.outcomes, CHAIN, 0.01, 800)
    for mode in MODES:
        hear(p.outcomes, mode, 0.01, 800)
    p._digest()
    assert not p.enlist(request("code", 1), Load(64, 0, 0)), "and as good as it may be, it is bad"
    hear(p.outcomes, CHAIN, 0.9, 800)
    p._digest()
    assert p.enlist(request("code", 2), Load(64, 0, 0))


def test_who_may_not_be_drafted_for_is_not() -> None:
    p = policy()
    device = Device(p)
    biased = Request([1], SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.2), 0)
    drawn = Request([1], SamplingParams(temperature=1.0, max_tokens=9), 0, id="code 1")
    good = request("code", 2, 9)
    assert [p.enlist(r, Load(3, 0, 0)) for r in (biased, good)] == [False, True]
    p.config = parse_speculative({"method": "auto", "verification": "rejection"})[0]
    assert not p.enlist(drawn, Load(1, 0, 0)) and device.step([biased]) == 1


def test_who_comes_is_told_how_many_may_run_at_once(monkeypatch) -> None:
    model = tiny.model()
    e = harness.engine(model, {"method": "eagle3"}, head=tiny.eagle(model.config, (0, 1, 2)))
    e.scheduler.max_num_seqs, told = 2, []
    monkeypatch.setattr(e.policy, "enlist", lambda request, load: told.append(load.num_running) or True)
    harness.run(e, [harness.request([1, 2, 3], max_tokens=2) for _ in range(5)])
    assert len(told) == 5 and max(told) == 2, "though five wait"


# ------------------------------------------------------------------ when it is decided
def due(p: AheadPolicy) -> None:
    p._steps = p._due = EVERY


def test_what_is_due_is_decided_while_the_device_is_at_work() -> None:
    p = policy()
    device, requests = Device(p), [request("code", i, 64) for i in range(4)]
    hear(p.outcomes, CHAIN, 0.8, 100)
    p.purse.curiosity = 0.0
    for _ in range(40):
        device.step(requests)
    p.ask(requests, [{}] * 4, ROOM)
    made, before = p.decisions, p._answers
    due(p)
    p.catch_up(always)
    assert p.decisions == made + 1 and p._steps == 0
    assert any(before) and p._due <= EVERY and p.holds(), "nothing changes, so it holds from now on"
    for mode in MODES:
        p.periods.put(mode, 4, 1.0)
    due(p)
    p.catch_up(always)
    assert not p.holds(), "something else is wished for, and nobody has asked"
    assert p._due >= EVERY + UNDER_WAY, "it shows only in the step behind those that are under way"
    after = p.ask(requests, [{}] * 4, ROOM)
    assert not any(after) and p.holds()
    due(p)
    made, requests[0].finish_reason = p.decisions, "stop"
    p.catch_up(always)
    assert p.decisions == made, "somebody is about to go"


def test_a_decision_is_taken_piece_by_piece_and_what_is_overdue_at_once() -> None:
    p = policy()
    device, requests = Device(p, pieces=0), [request("code", i, 64) for i in range(4)]
    device.step(requests)
    made = p.decisions
    due(p)
    pieces = 0
    while p.decisions == made:
        p.catch_up(never)
        pieces += 1
    assert 4 <= pieces < 12
    due(p)
    p.catch_up(never)
    assert p.decisions == made + 1, "it has begun,"
    p._steps += PATIENCE
    p.ask(requests, [{}] * 4, ROOM)
    assert p.decisions == made + 2 and p._thinking is None, "and nobody waits for ever"


@pytest.mark.parametrize("pieces", [1, 3])
def test_where_the_host_has_little_time_it_is_as_good(pieces: int) -> None:
    hasty, calm = (Device(policy(), pieces=n) for n in (pieces, 1 << 20))
    speeds = [device.run(["code", "poor"], 16, 128) for device in (hasty, calm)]
    assert speeds[0] > 0.95 * speeds[1]


def test_who_comes_and_goes_while_it_is_decided_does_no_harm() -> None:
    """The decision was for those who were there when it began."""
    p = policy()
    device, requests = Device(p, pieces=1), [request("code", i, 64) for i in range(4)]
    for _ in range(12):
        device.step(requests)
    due(p)
    p.catch_up(never)
    assert p._thinking is not None
    p.release(requests[0])
    there = [*requests[1:], request("code", 9, 64)]
    for _ in range(12):
        device.step(there)
    p._read()
    assert all(p._answers) and set(p._guests) == {r.id for r in there}


def test_nothing_is_decided_where_prompts_fill_the_step() -> None:
    p = policy()
    Device(p)
    requests = [request("code", i, 100) for i in range(4)]
    assert p.ask(requests, [{}] * 4, Load(4, 0, 512, 100.0, 0)) == [{}] * 4
    p._steps = p._due + PATIENCE
    assert all(p.ask(requests, [{}] * 4, ROOM))


def test_while_prompts_fill_the_steps_it_is_not_tried_in_each() -> None:
    p = policy()
    Device(p)
    requests, digests = [request("code", i, 100) for i in range(4)], []
    digest = p._digest
    p._digest = lambda: (digests.append(p._steps), digest())[1]
    for _ in range(100):
        asked = p.ask(requests, [{}] * 4, Load(4, 0, 512, 100.0, 0))
        times = StepTimes(0, 0, 0, 0, 12, 512, 2e-3, produced=4, asked=asked, drafted=[0] * 4)
        p.learn(times, requests, [Verdict([], 0)] * 4)
    assert 1 < len(digests) < 30 and not p.decisions
    p.learn(times._replace(num_prefill_tokens=0), requests, [Verdict([], 0)] * 4)
    p.catch_up(always)
    assert p.decisions == 1, "they are over, so there is room again, though nobody has asked"


def test_where_nothing_pays_it_is_thought_about_rarely() -> None:
    p = policy()
    device, requests = Device(p), [request("noise", i) for i in range(16)]
    for _ in range(100):
        device.step(requests)
    made = p.decisions
    for _ in range(320):
        device.step(requests)
    assert p.decisions - made <= 320 / LONGEST + 3


def test_a_decision_that_changes_nothing_gives_the_same_answer() -> None:
    """So the engine may repeat its step."""
    p = policy()
    device, requests = Device(p), [request("code", i) for i in range(4)]
    for _ in range(60):
        device.step(requests)
    before, made = p.ask(requests, [{}] * 4, ROOM), p.decisions
    due(p)
    p.catch_up(always)
    after = p.ask(requests, [{}] * 4, ROOM)
    assert p.decisions == made + 1 and all(a is b for a, b in zip(before, after, strict=True))


# ------------------------------------------------------------------ what is told and kept
def test_nothing_is_drafted_until_something_was_measured() -> None:
    p = AheadPolicy(parse_speculative({"method": "auto"})[0], lambda r: ("ngram",))
    own = request("code", 0, 9)
    assert p.ask([own], [{}], Load(1, 0, 0)) == [{}] and p.explain().speedup_estimate is None
    assert p.plain_seconds(1) == 0.0


def test_nothing_is_put_aside_where_nobody_decides() -> None:
    """A rehearsal failed, so nobody will ever draft."""
    p = policy()
    p.forget_periods()
    here = request("code", 0, 9)
    p.enlist(here, Load(1, 0, 0))
    for i in range(1, 300):
        own = request("code", i, 9)
        p.enlist(own, Load(2, 0, 0))
        p.ask([here, own], [{}] * 2, Load(2, 0, 0))
        p.release(own)
        p.catch_up(always)
    assert len(p._unread) + len(p._guests) + len(p._gone) < 40


def test_it_says_why() -> None:
    device = Device(policy())
    device.run(["code"], 1, 6)
    assert device.policy is not None
    why = device.policy.explain()
    assert why.speedup_estimate > 1.5 and why.drafters["eagle3"].brings > why.drafters["eagle3"].needs
    text = " ".join(why.sentences())
    assert "eagle3 pays now" in text and "row" not in text


def test_to_explain_changes_nothing() -> None:
    """Another thread may ask, while the engine's own is at work."""
    p = policy()
    device, own = Device(p, pieces=0), request("code", 0)
    for _ in range(31):
        device.step([own])
    before = list(p._unread)
    p.explain()
    assert p._unread == before


def test_what_is_known_is_kept_and_found_again(tmp_path: Path) -> None:
    p, other = policy(), AheadPolicy(parse_speculative({"method": "auto"})[0], lambda r: ())
    store = Store(tmp_path, {"model": "m"})
    assert not store.load(other) and not other.periods.known
    Device(p).run(["code"], 4, 24)
    store.save(p)
    assert store.load(other) and other.periods.covers(MODES, [1, 4, 16, 64])
    fresh = policy().periods
    assert all(other.periods.of(m, n) == fresh.of(m, n) for m in (None, *MODES) for n in (1, 3, 60))
    for mode in (CHAIN, TREE):
        usually = p.outcomes._records["eagle3", 0].usually().tried(p.outcomes._width(mode)).tokens(mode.depth)
        assert other.outcomes.brings(mode, 0) == pytest.approx(usually, rel=0.01)
    said = json.loads(store.path.read_text())
    said["periods"]["points"][0][3]["1"] = -1.0
    store.path.write_text(json.dumps(said))
    assert not store.load(other) and other.periods.known, "what cannot be is not believed"


def test_one_short_answer_is_kept() -> None:
    p = policy()
    Device(p).run(["code"], 1, 2, tokens=60)
    assert p.kept()["outcomes"]["chances"] and not p._gone


def test_steps_that_wait_for_prompts_tell_nothing_about_others() -> None:
    p = policy()
    plain, tree = p.periods.of(None, 1), p.periods.of(TREE, 1)
    own = request("code", 0)
    for i in range(200):
        times = StepTimes(0, 0, 0, 0, 0, 8 * (i % 2), 2 * plain, produced=1, asked=[{}], drafted=[0])
        p.learn(times, [own], [Verdict([], 0)])
    p._digest()
    assert (p.periods.of(None, 1), p.periods.of(TREE, 1)) == (plain, tree)
    asked = [{}]
    for _ in range(200):
        p.learn(StepTimes(0, 0, 0, 0, 0, 0, 2 * plain, produced=1, asked=asked, drafted=[0]), [own], [Verdict([], 0)])
    p._digest()
    assert p.periods.of(None, 1) > 1.9 * plain


def test_a_cap_that_no_rehearsal_has_met_does_no_harm() -> None:
    """So large a draft was never timed."""
    p = policy()
    device = Device(p)
    hear(p.outcomes, CHAIN, 0.9, 200)
    hear(p.outcomes, TREE, 0.95, 200)
    requests = [request("code", i) for i in range(2)]
    for r in requests:
        r.speculation = RequestSpeculation(max_tokens=3)
    for _ in range(100):
        device.step(requests)
    assert any(not p.periods.knows(mode) for mode in p._ways), p._ways
