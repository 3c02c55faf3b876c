"""A policy that decides before drafts are known, on a device that is made up: periods and chances are given, and it has to find
out which way to draft is best, for whom, and that none is."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart import rehearse
from headstart.config import parse_speculative
from headstart.core import Request, RequestSpeculation, SamplingParams, Verdict
from headstart.errors import BadInput
from headstart.policy import Load, StepTimes, Wish, trials
from headstart.policy.ahead import EVERY, LATEST, LOOK, PASSED, QUIET, UNDER_WAY, AheadPolicy
from headstart.policy.outcomes import HARDER, Guest, Outcomes, Own, Survival
from headstart.policy.periods import Bustle, Mode, Periods, modes_of
from headstart.policy.readings import STRANGERS, Readings
from headstart.policy.shares import Share
from headstart.policy.store import Store
from headstart.policy.stretches import Watch
from headstart.policy.trials import BEARABLE, DEARER, DEAREST, LESS, PROBES, Trials, drafts_of
from headstart.shapes import within
from headstart.tryouts import QUESTIONS, questions
from tests import harness, tiny

NGRAM, CHAIN, TREE = Mode("ngram", 3, 3), Mode("eagle3", 2, 2), Mode("eagle3", 15, 5)
MODES = [NGRAM, Mode("ngram", 6, 6), CHAIN, Mode("eagle3", 4, 4), TREE]
PROMPT = 2e-4  # seconds that a prompt takes in its own step; behind it, more
CHANCES = {  # that the next token of a draft is right, by kind of text
    "code": {"eagle3": 0.8, "ngram": 0.3},
    "poor": {"eagle3": 0.35, "ngram": 0.05},
    "hard": {"eagle3": 0.02, "ngram": 0.0},
    "copies": {"eagle3": 0.02, "ngram": 0.9},
    "both": {"eagle3": 0.6, "ngram": 0.95},
    "noise": {"eagle3": 0.02, "ngram": 0.0},  # as hard, at a high temperature
}


def seconds(mode: Mode | None, count: int, company: int) -> float:
    """Of a step of this company, of whom so many draft."""
    plain = 1.2e-3 + 12e-6 * company
    if mode is None:
        return plain
    own = 30e-6 if mode.drafter == "ngram" else (1.3 if mode.nodes > mode.depth else 1.0) * (20e-6 + 75e-6 * mode.depth)
    return plain + own + 5e-6 * mode.nodes * count


@dataclass
class Device:
    """Steps of made-up requests; drafts are right as often as their text's kind says."""

    policy: AheadPolicy | None = None
    way: Mode | None = None  # without a policy, all draft like this
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    came: int = 0  # requests so far
    clock: float = 0.0
    vain: float = 0.0  # seconds that drafts took which brought nothing
    around: float = 0.0  # seconds that a step takes longer where drafts begin or end
    drafted: bool = False  # in the last step
    last: tuple[StepTimes, list[Request], list[Verdict]] | None = None  # a step that the policy has not heard of
    asked: tuple[list[Request], list[Any]] = ([], [])  # for whom and what, in the last step
    repeats: bool = False  # the last step was like the one before it
    delay: float = 0.0  # by which it is longer
    getting_ready: float = 0.0  # seconds that a step takes longer while the host gets a newcomer ready,
    reading: float = 0.0  # and how much longer than that where a head is to read it
    late: float = 0.0  # seconds that the step behind prompts takes longer; not counted, since all have the same prompts
    used: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[bool]] = field(default_factory=dict)  # by kind of text: whether it had one, step by step
    unread: set[str] = field(default_factory=set)  # requests whose prompt no head has read
    resting: set[str] = field(default_factory=set)  # those that it has left alone, and would have to join again

    def __post_init__(self) -> None:
        if self.policy is not None:
            self.policy.choices = self.policy.fixed.choices = self._choices

    def _choices(self, request: Request) -> tuple[str, ...]:
        return ("ngram",) if request.id in self.unread else ("ngram", "eagle3")

    def run(self, kinds: list[str], load: int, count: int, tokens: int = 64) -> float:
        """Tokens per second over so many requests, of these kinds in turn, as long as some of them wait."""
        waiting = [self._request(kinds[i % len(kinds)], self.came + i, tokens) for i in range(count)]
        self.came += count
        running: list[Request] = []
        began, made = self.clock, 0
        while waiting:
            prompts = 0
            self.delay = 0.0
            while waiting and len(running) < load:
                running.append(waiting.pop(0))
                prompts += 1
                self.delay += self.getting_ready + self.reading
                company = min(load, len(running) + len(waiting))
                if self.policy and not self.policy.enlist(running[-1], Load(company, len(waiting), 0)):
                    self.unread.add(running[-1].id)
                    self.delay -= self.reading
            made += self._step(running, prompts)
            for r in [r for r in running if r.num_output >= tokens]:
                running.remove(r)
                if self.policy:
                    self.policy.release(r)
        for r in running if self.policy else ():
            self.policy.release(r)
        return made / (self.clock - began)

    @staticmethod
    def _request(kind: str, seed: int, tokens: int) -> Request:
        heat = 1.5 if kind == "noise" else 0.0
        return Request([1] * 8, SamplingParams(temperature=heat, max_tokens=tokens), seed, id=f"{kind} {seed}")

    def _step(self, running: list[Request], prompts: int = 0) -> int:
        company = len(running)
        wishes = [{} for _ in running]
        if self.policy is not None:
            wishes = self.policy.ask(running, [{} for _ in running], Load(company, 0, 0, 100.0, 1024 // company - 1))
            self.resting |= {r.id for r, w in zip(running, wishes, strict=True) if not w and self.policy.rests(r)}
            joining = {r.id for r, w in zip(running, wishes, strict=True) if "eagle3" in w} & self.resting
            self.resting -= joining
            wishes = [{} if r.id in joining else w for r, w in zip(running, wishes, strict=True)]
            self.repeats = self.asked == (running, wishes) and not prompts
            if not self.repeats:
                self.asked = list(running), wishes
            wishes = self.asked[1]
        modes = [
            Mode(n, w.nodes, w.depth) if own else None for own in wishes for n, w in (*own.items(), ("", None))[:1]
        ]
        modes = modes if self.policy is not None else [self.way] * company
        took = seconds(None, 0, company)
        for mode in {m for m in modes if m}:
            took += seconds(mode, modes.count(mode), company) - seconds(None, 0, company)
        took *= 1 + self.rng.gauss(0, 0.03)
        took += self.around * (any(modes) != self.drafted)
        self.drafted = any(modes)
        period, self.late = took + self.late + PROMPT * prompts, 3 * PROMPT * prompts
        got = [self._accepted(r, m) for r, m in zip(running, modes, strict=True)]
        for r, n, m in zip(running, got, modes, strict=True):
            r.tokens += [1] * (n + 1)
            self.used[str(m)] = self.used.get(str(m), 0) + 1
            self.drafts.setdefault(r.id.split()[0], []).append(m is not None)
        self.clock += took
        self.vain += 0.0 if any(got) else took - seconds(None, 0, company)
        if self.policy is not None:
            sizes, made = [m.nodes if m else 0 for m in modes], company + sum(got)
            times = StepTimes(0, 0, 0, 0, 0, 8 * prompts, period, produced=made, asked=wishes, drafted=sizes)
            self._settle_last()
            self.last = times, list(running), [Verdict(list(range(n)), 0) for n in got]
            if not self.getting_ready:
                self._settle_last()
        return company + sum(got)

    def _settle_last(self) -> None:
        """Where the host gets newcomers ready, a step is over when the next one has been launched."""
        if self.last is not None and self.policy is not None:
            times, running, verdicts = self.last
            self.clock += self.delay
            self.policy.learn(times._replace(period=times.period + self.delay), running, verdicts)
            if self.repeats:  # so the host has nothing to do
                self.policy.catch_up()
            self.last, self.delay = None, 0.0

    def _accepted(self, request: Request, mode: Mode | None) -> int:
        if mode is None:
            return 0
        chance = CHANCES[request.id.split()[0]][mode.drafter]
        chance = 1 - (1 - chance) ** 1.45 if mode.nodes > mode.depth else chance
        n = 0
        while n < mode.depth and self.rng.random() < chance:
            n += 1
        return n


def policy() -> AheadPolicy:
    out = AheadPolicy(parse_speculative({"method": "auto"})[0], lambda r: ())
    out.clock = lambda: 0.0  # here the policy thinks fast
    for company in (1, 4, 16, 64):
        for mode in (None, *MODES):
            if company * (1 + (mode.nodes if mode else 0)) <= 1024:
                out.periods.put(mode, company, seconds(mode, company, company))
    return out


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


def vain_share(p: AheadPolicy, around: float = 0.0, seed: int = 1) -> float:
    """Of the time, with noise alone, once the policy knows it."""
    device = Device(p, around=around, rng=random.Random(seed))
    device.run(["noise"], 1, 8)
    before, vain = device.clock, device.vain
    device.run(["noise"], 1, 60)
    return (device.vain - vain) / (device.clock - before)


def test_what_does_not_pay_is_tried_within_a_bound() -> None:
    assert 0 < vain_share(policy()) < 2.5 * PROBES


def test_trials_that_take_longer_than_was_thought_are_fewer() -> None:
    assert 0 < vain_share(policy(), around=2e-3) < 3 * PROBES, "each takes three steps more"


@pytest.mark.parametrize("seed", range(4))
def test_a_trial_ends_and_what_it_began_though_there_is_no_time_to_decide(seed: int) -> None:
    slow = policy()
    ticks = itertools.count()
    slow.clock = lambda: 5e-4 * next(ticks)  # each decision takes as long as half a step
    assert 0 < vain_share(slow, seed=seed) < 1.5 * PROBES


def test_what_steps_take_is_not_learned_where_the_host_gets_newcomers_ready() -> None:
    p = policy()
    slow_clock(p, 5e-4)  # else there is a decision whenever somebody comes, and behind one nothing is learned
    device = Device(p, getting_ready=2e-3)
    device.run(["code"], 16, 200, tokens=200)
    for mode in (None, CHAIN, Mode("eagle3", 4, 4)):
        assert p.periods.of(mode, 16) == pytest.approx(seconds(mode, 16, 16), rel=0.05)


def steps_of(took: list[float], repeat: bool) -> AheadPolicy:
    """A policy for whose two requests chains of 2 brought one token each, in steps that took so long; after the first one the
    others repeat it, or not."""
    p = policy()
    requests = [Device._request("code", i, 1 << 20) for i in range(2)]
    for r in requests:
        p.enlist(r, Load(2, 0, 0))
        p._guest(r)
        p._set(r, CHAIN, 15)
    wishes = [p._guest(r).wishes for r in requests]
    for s in took:
        asked = wishes if repeat else list(wishes)
        times = StepTimes(0, 0, 0, 0, 6, period=s, produced=4, policy=s / 50, asked=asked, drafted=[2, 2])
        p.learn(times, requests, [Verdict([0], 7)] * 2)
    for r in requests:
        p.release(r)
    return p


def test_steps_that_repeat_one_another_are_learned_together_as_one_by_one() -> None:
    usual = seconds(CHAIN, 2, 2)
    took = [1.3 * usual] * 10 + [50 * usual] + [1.3 * usual] * 10
    one, all_ = steps_of(took, False), steps_of(took, True)
    before = policy().periods.of(CHAIN, 2)
    assert one.periods.of(CHAIN, 2) == pytest.approx(all_.periods.of(CHAIN, 2), rel=0.02)
    assert 1.1 * before < all_.periods.of(CHAIN, 2) < 1.3 * before, "one that took far too long tells nothing"
    a, b = one.explain(), all_.explain()
    assert a.drafters["eagle3"].asked == b.drafters["eagle3"].asked == 21
    assert a.drafters["eagle3"].verified == b.drafters["eagle3"].verified == 84
    assert a.deciding == pytest.approx(b.deciding, rel=1e-6) == pytest.approx(0.02)
    assert a.speedup_estimate == pytest.approx(b.speedup_estimate, rel=0.2)
    for p in (one, all_):
        p.outcomes.digest(p._gone, p._ways, len(took))
    general = [p.outcomes.general(CHAIN, 0) for p in (one, all_)]
    assert general[0] == pytest.approx(general[1]) and general[0][0] > 0.9 and general[0][1] < 0.1


def test_plain_steps_that_are_passed_over_count_and_a_change_is_noticed_all_the_same() -> None:
    p, requests, asked = policy(), [Device._request("code", i, 1 << 20) for i in range(4)], [{}] * 4
    p._due, plain, count = 1 << 30, p.periods.of(None, 4), QUIET + PASSED // 2
    for _ in range(count):
        p.learn(StepTimes(0, 0, 0, 0, 4, period=plain, produced=4, asked=asked), requests, [Verdict([], 7)] * 4)
        p.catch_up()
    assert p._passing == PASSED - PASSED // 2
    p._learn_seen()
    assert p.plain_steps == p._now == count, "those that nobody looked at, too"
    for _ in range(20 * (QUIET + PASSED)):
        p.learn(StepTimes(0, 0, 0, 0, 4, period=2 * plain, produced=4, asked=asked), requests, [Verdict([], 7)] * 4)
    p._learn_seen()
    assert p.periods.of(None, 4) == pytest.approx(2 * plain, rel=0.1)


@pytest.mark.parametrize("waits", [True, False])
def test_steps_are_read_where_the_host_waits_for_the_device_else_later(waits: bool) -> None:
    p, requests, asked = policy(), [Device._request("code", i, 1 << 20) for i in range(4)], [{}] * 4
    p._due = 1 << 30  # nothing is to be decided
    for _ in range(QUIET if waits else LATEST * QUIET):
        assert p._now == 0, "nothing was read yet"
        p.learn(StepTimes(0, 0, 0, 0, 4, period=1e-3, produced=4, asked=asked), requests, [Verdict([], 7)] * 4)
        if waits:
            p.catch_up()
    assert p._now == (QUIET if waits else LATEST * QUIET)


def test_those_that_a_head_could_serve_one_day_are_read_now_and_then_beside_others_that_draft() -> None:
    """Though it is never seen what a newcomer takes that nobody reads: somebody always drafts."""
    p = policy()
    p.periods.put_reading("eagle3", 1, 1e-5)
    device = Device(p, getting_ready=1e-4)
    device.run(["code", "noise"], 8, 200)
    unread = sum(id.startswith("noise") for id in device.unread)
    assert unread < 90, "of a hundred"


def reads(reading: float, time: bool = True) -> float:
    """The share of requests whose prompts are read in hope, of a head that brings nothing, where that takes so long, and where
    there is always time to try what it brings, or never."""
    p = policy()
    p._trials.may_pay = lambda drafters, company, won=False: time  # type: ignore[method-assign]
    for company in (1, 64):
        p.periods.put_reading("eagle3", company, 1e-5)
    device = Device(p, getting_ready=1e-4, reading=reading)
    device.run(["hard"], 16, 100)
    before, came = len(device.unread), device.came
    device.run(["hard"], 16, 300)
    return 1 - (len(device.unread) - before) / (device.came - came)


def test_prompts_whose_reading_takes_longer_than_was_thought_are_fewer() -> None:
    """Else the time that may be spent in hope would be spent many times over."""
    assert 0.0 < 2 * reads(2e-3) < reads(1e-5)


def test_prompts_are_read_in_hope_only_where_there_is_time_to_try_what_that_brings() -> None:
    """But for those that are read since what is thought of drafts has gone back to what is usual."""
    assert 3 * reads(1e-5, time=False) < reads(1e-5)


def test_nobody_is_read_where_that_disturbs_the_others_too_much() -> None:
    p = policy()
    Device(p)
    assert p.enlist(Device._request("code", 0, 64), Load(64, 0, 0))
    p.periods.put_reading("eagle3", 1, 1e-5)
    p.periods.put_reading("eagle3", 64, 5e-3)
    p._promises.clear()
    assert [p.enlist(Device._request("code", n, 64), Load(n, 0, 0)) for n in (1, 64)] == [True, False]


def test_prompts_are_read_where_that_is_cheap_though_nobody_drafts() -> None:
    p = policy()
    Device(p).run(["hard"], 16, 64)
    p.periods.put_reading("eagle3", 16, 1e-5)
    p._promises.clear()
    assert not p.enlist(Device._request("hard", 999, 64), Load(16, 0, 0)), "there is no time to try what that brings"
    p._trials.saved = 1.0
    assert p.enlist(Device._request("hard", 998, 64), Load(16, 0, 0))
    p.periods.put_reading("eagle3", 16, 1e-3)
    p._promises.clear()
    assert not p.enlist(Device._request("hard", 997, 64), Load(16, 0, 0))


def test_what_reading_takes_does_not_fall_as_requests_become_more() -> None:
    """One point that was measured badly is not believed against its neighbours."""
    periods = Periods()
    for company, milliseconds in {1: 0.1, 4: 0.3, 16: 1.0, 32: 0.0, 64: 1.1}.items():
        periods.put_reading("eagle3", company, milliseconds / 1e3)
    found = [periods.reading("eagle3", n) * 1e3 for n in (1, 4, 16, 24, 32, 64)]
    assert found == pytest.approx([0.1, 0.3, 0.5, 0.5, 0.5, 1.1])


def test_a_decision_holds_until_there_is_time_for_the_next() -> None:
    p = policy()
    p.catch_up = lambda: None  # the host has no time to spare
    device = Device(p)
    request = Device._request("code", 0, 1 << 20)
    device._step([request])
    assert p.holds()
    asked = p.ask([request], [{}], Load(1, 0, 0))
    assert p.ask([request], [{}], Load(1, 0, 0)) is asked
    for time in (1e9, 0.0):  # in between, what has begun is looked at again
        p._time, p._cost = time, 1e9
        for _ in range(40):
            device._step([request])
    assert p.holds()
    p._cost = 0.0
    assert not p.holds()


def test_what_has_just_begun_is_looked_at_again_whatever_that_takes() -> None:
    """Else it would go on for as long as it takes to save up the time. Once; but each shape that is new as well."""
    p, made = policy(), []
    p.catch_up = lambda: None
    device, request, decide = Device(p), Device._request("code", 0, 1 << 20), p._decide
    p._decide = lambda *args: (
        made.append(p._steps) if not p._trying else None,
        decide(*args),
    )  # not those that end a trial
    device._step([request])
    assert p._way is not None and len(made) == 1
    p.clock = itertools.count(0.0, 1e3).__next__
    p._time, p._cost = 0.0, 1e3
    for _ in range(100):
        device._step([request])
    assert made[:2] == [0, LOOK] and len(made) <= 4 and sum(made) < 40


def test_what_is_due_is_decided_while_the_device_is_at_work() -> None:
    """And costs none of the time for decisions, unless the device had to wait."""
    p = policy()
    device, requests = Device(p), [Device._request("hard", i, 64) for i in range(4)]

    def due() -> None:
        p._steps, p._due, p._time, p._aside, p._began = EVERY, EVERY, 0.0, 0.0, False

    def learn(seconds: float) -> None:
        times = StepTimes(0, 0, 0, 0, 0, 0, 1e-3, produced=4, late=seconds, asked=p._answers, drafted=[0] * 4)
        p.learn(times, requests, [Verdict([], 0)] * 4)

    device._step(requests)
    p.clock, p._cost = itertools.count(0.0, 1e-4).__next__, 1e-4
    due()
    before = p.ask(requests, [{}] * 4, Load(4, 0, 0))
    p.catch_up()
    assert p._steps == 0 and p._time == 0.0, "it was decided"
    learn(1.0)
    assert p._shows == 0.0 and p._time > 0.0, "this step has shown what was done before"
    learn(0.0)
    assert p._shows == 0.0 and p._time > 0.0
    assert any(before) and p._due <= EVERY, "nothing changes, so it holds from now on"
    p.ask(requests, [{}] * 4, Load(4, 0, 0))
    for mode in MODES:
        hear(p.outcomes, mode, 0.01, 400)
    due()
    p.catch_up()
    assert not p.holds(), "something else is wished for, and nobody has asked"
    assert p._due == EVERY + UNDER_WAY, "it shows only in the step behind those that are under way"
    after = p.ask(requests, [{}] * 4, Load(4, 0, 0))
    assert not any(after) and p.holds()
    learn(0.0)
    learn(1.0)
    assert 0.0 < p._shows < 0.5 and p._time < 0.0, "the device had waited"
    due()
    p.catch_up()
    assert p._steps == EVERY, "so it takes time that was saved up"
    p._time, p._shows = -1.0, 0.0
    p.catch_up()
    assert p._steps == 0, "what takes nothing is owed nothing"
    due()
    p._time, requests[0].finish_reason = 1.0, "stop"
    p.catch_up()
    assert p._steps == EVERY, "somebody is about to go"


def test_a_trial_that_is_decided_on_aside_makes_the_drafts_it_is_for() -> None:
    """Two steps still run as before it; neither do they count as steps of the trial, nor for what it took."""
    p = policy()
    requests, device = [Device._request("hard", i, 1 << 20) for i in range(16)], Device(p)
    device._step(requests)
    hear(p.outcomes, CHAIN, 0.01, 400)
    plain = p.periods.of(None, 16)

    def learn(asked: list[dict[str, Wish]]) -> None:
        drafted = [own["eagle3"].nodes if "eagle3" in own else 0 for own in asked]
        times = StepTimes(0, 0, 0, 0, 0, 0, plain, produced=16, asked=asked, drafted=drafted)
        p.learn(times, requests, [Verdict([], 0)] * 16)

    for _ in range(200):  # it is due while nobody drafts, and there is time for a trial
        p._steps, p._due, p._time, p._began, p._trying, p._trials.bill = EVERY, EVERY, 0.0, False, False, None
        before, p._trials.saved = p._answers, 1.0
        p.catch_up()
        if p._trying and any("eagle3" in own for own in p._answers):
            break
        p._decided = False
        learn(p._answers)
    count = sum("eagle3" in own for own in p._answers)
    assert p._trying and 0 < count <= 16
    bill = p._trials.bill
    assert bill is not None and bill.left == bill.steps
    for _ in range(UNDER_WAY):
        learn(before)
    p._read()
    assert bill.left == bill.steps and bill.seconds == 0.0
    asked = p.ask(requests, [{}] * 16, Load(16, 0, 0))
    steps = 0
    while p.holds():
        learn(asked)
        steps += 1
    assert steps == trials.steps_of(count)


def test_one_step_that_takes_wildly_long_does_not_fill_what_was_lost() -> None:
    p = policy()
    requests, device = [Device._request("code", i, 1 << 20) for i in range(4)], Device(p)
    device._step(requests)
    asked, plain = p._answers, p.periods.of(None, 4)
    assert any(asked)
    p._read()
    p._losses.steps = 0.0
    p.learn(
        StepTimes(0, 0, 0, 0, 12, 0, 1e3 * plain, produced=4, asked=asked, drafted=[2] * 4),
        requests,
        [Verdict([], 0)] * 4,
    )
    p._read()
    assert 0.0 < p._losses.steps <= DEAREST


def test_what_is_thought_of_drafts_goes_back_to_what_is_usual_as_others_come() -> None:
    """Many good texts, then one kind that is bad: while nobody is asked about those who come, they may be good again."""
    outcomes = Outcomes()
    for seed in range(40):
        hear(outcomes, CHAIN, 0.7, 16, seed)
    good = outcomes.brings(CHAIN, 0)
    for seed in range(20):
        hear(outcomes, CHAIN, 0.05, 16, seed)
    bad = outcomes.brings(CHAIN, 0)
    assert bad < 0.5 * good
    outcomes.digest([], [CHAIN], 400)
    assert outcomes.brings(CHAIN, 0) == pytest.approx(bad, rel=0.01), "nobody came"
    for came in (8, 40):
        outcomes.came += came
        before = outcomes.brings(CHAIN, 0)
        outcomes.digest([], [CHAIN], 400)
        assert before < outcomes.brings(CHAIN, 0) < good
    back = outcomes.brings(CHAIN, 0)
    assert back > 0.5 * good > 2 * bad
    hear(outcomes, CHAIN, 0.05, 16)
    assert outcomes.brings(CHAIN, 0) < 0.7 * back, "a few drafts tell that they are not"


def test_what_was_tried_out_is_the_first_guess_and_no_more() -> None:
    outcomes = Outcomes()
    assert not outcomes.knows(CHAIN)
    outcomes.expect(Mode("eagle3", 4, 4), [40, 30, 20, 6, 4, 0, 0, 0, 0])
    outcomes.expect(TREE, [20, 25, 25, 10, 10, 10, 0, 0, 0])
    assert outcomes.knows(CHAIN) and outcomes.knows(TREE) and not outcomes.knows(NGRAM)
    assert outcomes.is_new(CHAIN, 0), "real texts are still to be seen"
    first, second = outcomes.general(CHAIN, 0)
    assert first == pytest.approx(0.6 * HARDER) and second == pytest.approx(0.3 * HARDER**2)
    assert outcomes.brings(TREE, 0) > outcomes.brings(CHAIN, 0) > outcomes.brings(CHAIN, 3) > 0
    outcomes.expect(NGRAM, [1, 1, 0, 0, 0, 0, 0, 0, 0])
    assert not outcomes.knows(NGRAM), "two drafts tell nothing"
    again = Outcomes.recall(json.loads(json.dumps(outcomes.kept())))
    assert again.knows(TREE) and again.brings(TREE, 0) == pytest.approx(outcomes.brings(TREE, 0))
    hear(outcomes, CHAIN, 0.02, 40)
    assert outcomes.brings(CHAIN, 0) < 0.3 * again.brings(CHAIN, 0)


def test_one_long_text_does_not_make_forgotten_what_was_tried_out() -> None:
    outcomes, guest = Outcomes(), Guest(0, True)
    outcomes.expect(Mode("eagle3", 4, 4), [5, 10, 15, 30, 40, 0, 0, 0, 0])
    outcomes.expect(TREE, [2, 8, 10, 20, 25, 35, 0, 0, 0])
    first, width = outcomes.brings(CHAIN, 0), outcomes._width("eagle3")
    usual = list(outcomes._survival["eagle3", False, 0].usual.first)
    for _ in range(60):
        guest.logs[0][2] += 10
        outcomes.digest([guest], [CHAIN], 10)
        outcomes.brings(CHAIN, 0)
    assert outcomes.brings(CHAIN, 0) >= first, "it was right all the time"
    assert outcomes._survival["eagle3", False, 0].usual.first == usual
    again = Outcomes.recall(json.loads(json.dumps(outcomes.kept())))
    assert again.knows(CHAIN) and again._width("eagle3") != Outcomes()._width("eagle3") and width > 1


def test_questions_are_asked_plainly_where_a_chat_template_refuses_them() -> None:
    class Refuses:
        def has_chat_template(self) -> bool:
            return True

        def chat(self, messages: object) -> list[int]:
            raise BadInput("This template wants a system message.")

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    assert len(questions(Refuses(), 1000, 256)) == len(QUESTIONS)
    assert questions(Refuses(), 1000, 100) == [] == questions(None, 1000, 256)


def test_what_copies_from_the_text_tells_of_the_others_that_do_until_these_are_seen() -> None:
    suffix = Mode("suffix", 7, 7)
    for chance in (0.02, 0.6):
        outcomes = Outcomes()
        first, head = outcomes.brings(suffix, 0), outcomes.brings(CHAIN, 0)
        hear(outcomes, NGRAM, chance, 40)
        assert (outcomes.brings(suffix, 0) > 1.5 * first) if chance > 0.5 else (outcomes.brings(suffix, 0) < first / 2)
        assert outcomes.brings(CHAIN, 0) == head, "heads do not copy"
        hear(outcomes, suffix, 0.3, 40)
        own = outcomes.brings(suffix, 0)
        hear(outcomes, NGRAM, 1 - chance, 40)
        assert outcomes.brings(suffix, 0) == pytest.approx(own), "now it was seen itself"


def test_the_first_trial_is_free_unless_it_is_as_good_as_hopeless() -> None:
    for chance, tries in ((0.3, True), (0.01, False)):
        p = policy()
        hear(p.outcomes, NGRAM, chance, 100)
        p.outcomes._survival["ngram", False, 0].seen = 0  # as if by hearsay
        p._trials.share_out({"ngram": 1})
        guests, requests = [Guest(0, True) for _ in range(16)], range(16)
        chosen = p._try([NGRAM], guests, {i: ["ngram"] for i in requests}, 16)
        assert bool(chosen) is tries, (chance, p._trials.purses)


def test_what_is_new_is_tried_at_once_beside_other_drafts_where_more_was_won_than_lost() -> None:
    """A head that brings a little should not keep n-grams waiting that would bring three times as much."""
    for lost, tries in ((-0.1, True), (0.1, False)):
        p = policy()
        hear(p.outcomes, CHAIN, 0.6, 400)
        guests, members = [Guest(0, True) for _ in range(16)], {i: ["ngram"] for i in range(16)}
        p._way, p._losses.steps = CHAIN, lost
        p._trials._short["ngram"] = 1.0, 16  # it was too dear lately
        assert bool(p._trial(guests, members, 16, Load(16, 0, 0, 100.0, 63), 300)) is tries


def test_who_has_lost_spends_less_on_what_does_not_seem_to_pay_and_counts_what_takes_long_dearer() -> None:
    p = policy()
    for lost in (0.0, 6.0):
        before, p._losses.steps = p._trials.saved, lost
        p._save_up(1.0)
        assert p._trials.saved - before == pytest.approx(PROBES / (1 + LESS * max(0.0, lost - BEARABLE)))
    extra, plain = p.periods.extra(TREE, 1, 1), p.periods.of(None, 1)
    dear = p._speed(TREE, [[4.0] * TREE.depth], [False], 1)[0]
    p._losses.steps = 0.0
    assert p._speed(TREE, [[4.0] * TREE.depth], [False], 1)[0] / dear == pytest.approx(
        (plain + (1 + DEARER * (6.0 - BEARABLE)) * extra) / (plain + extra)
    )


def test_who_has_lost_tries_for_free_only_what_may_well_pay() -> None:
    for more, lost, tries in ((1.8, 0.0, True), (1.2, 2.0, False), (0.7, 2.0, True)):
        p = policy()
        guests, own = [Guest(0, True) for _ in range(16)], {i: ["ngram"] for i in range(16)}
        needs = p.periods.extra(NGRAM, 16, 16) / p.periods.of(None, 16)
        p.outcomes.worths = lambda guests, mode, each=needs / more: [[each] * mode.depth] * len(guests)
        p._losses.steps = lost
        assert bool(p._trial(guests, own, 16, Load(16, 0, 0, 100.0, 63))) is tries, (more, lost)


def test_what_brings_a_little_more_than_it_takes_is_begun() -> None:
    """To begin costs a step or two, once: that is no reason to leave a few percent for good."""
    p = policy()
    needs = p.periods.extra(CHAIN, 16, 16) / p.periods.of(None, 16)
    guests, members = [Guest(0, True) for _ in range(16)], {i: ["eagle3"] for i in range(16)}
    for gain, begins in ((1.01, False), (1.03, True)):
        tokens = gain * (1 + needs) - 1
        p.outcomes.worths = lambda guests, mode, t=tokens: [[t * (not mode.branches)] * mode.depth] * len(guests)
        p.outcomes.is_new = lambda mode, heat: False
        assert (p._best(guests, members, 63)[1] == CHAIN) is begins


def test_n_grams_that_were_never_tried_are_left_to_trials() -> None:
    """By a guess alone, they do not get a whole company."""
    for tried, begins in ((False, False), (True, True)):
        p = policy()
        needs = p.periods.extra(NGRAM, 16, 16) / p.periods.of(None, 16)
        tokens = 1.05 * (1 + needs) - 1
        p.outcomes.worths = lambda guests, mode, t=tokens: [[t] * mode.depth] * len(guests)
        p.outcomes.is_new = lambda mode, heat, tried=tried: not tried
        guests, members = [Guest(0, True) for _ in range(16)], {i: ["ngram"] for i in range(16)}
        assert (p._best(guests, members, 63)[1] == NGRAM) is begins


def test_what_the_next_in_line_will_be_asked_is_foretold_while_it_waits() -> None:
    for waits in (True, False):
        p, coming, told = policy(), Device._request("code", 9, 64), []
        Device(p)
        p._load, promise = Load(4, 1, 0), p._promise
        p._promise = lambda *like, promise=promise, told=told: told.append(like) or promise(*like)
        p.catch_up(coming if waits else None)
        assert len(told) == waits
        p.enlist(coming, Load(4, 0, 0))
        assert len(told) == 1


def test_what_is_known_is_taken_in_a_step_before_it_is_decided() -> None:
    """So neither takes the device's next step long enough to be waited for; behind a trial, the last step counts."""
    for trying in (False, True):
        p = policy()
        Device(p)
        p._ran, p._load = [Device._request("code", n, 64) for n in range(4)], Load(4, 0, 0, 100.0, 63)
        for request in p._ran:
            p._guest(request)
        p._trying, p._due, p._steps, p._undigested = trying, 16, 15, 15
        p.catch_up()
        assert p._undigested == (15 if trying else 0)
        weighed, weigh = [], p.outcomes._weigh
        p.outcomes._weigh = lambda *args, weigh=weigh, weighed=weighed: weighed.append(args) or weigh(*args)
        p._steps, p._undigested = 16, p._undigested + 1
        p._think(p._ran, p._load)
        assert p._undigested == int(not trying) and bool(weighed) is trying


def test_what_drafts_should_bring_is_weighed_anew_when_more_is_known() -> None:
    p, guest = policy(), Guest(0, True)
    hear(p.outcomes, CHAIN, 0.6, 100)
    guest.of("eagle3").add([0.6, 0.36], [20, 19, 18])
    first = p.outcomes.worths([guest], CHAIN)
    assert p.outcomes.worths([guest], CHAIN)[0] is first[0]
    p.outcomes.rest([guest], 500)
    second = p.outcomes.worths([guest], CHAIN)
    assert second[0][-1] < first[0][-1], "by now it is like the others"
    hear(p.outcomes, CHAIN, 0.9, 300)
    assert p.outcomes.worths([guest], CHAIN)[0][-1] > second[0][-1]


def test_a_step_full_of_prompts_does_not_decide_for_those_behind_it() -> None:
    """Drafts hardly fit there, but a decision holds for many steps."""
    p = policy()
    hear(p.outcomes, CHAIN, 0.8, 200)
    Device(p)
    wishes = p.ask([Device._request("code", i, 64) for i in range(4)], [{}] * 4, Load(4, 0, 500, 100.0, 1))
    assert all(wishes)
    p = policy()
    hear(p.outcomes, CHAIN, 0.8, 200)
    Device(p)
    wishes = p.ask([Device._request("code", i, 64) for i in range(4)], [{}] * 4, Load(4, 0, 0, 100.0, 1))
    assert not any(wishes), "there is no more room behind this one"


def test_who_comes_behind_the_first_drafts_is_judged_by_what_these_brought() -> None:
    p = policy()
    Device(p)
    p.periods.put_reading("eagle3", 1, 1e-4)
    first = Device._request("code", 0, 64)
    assert p.enlist(first, Load(4, 0, 0)) and p._promised(p.choices(first), 0, 4).new
    p._set(first, CHAIN, CHAIN.nodes)
    p._guests[first.id].logs[0][0] += 40  # drafts that brought nothing
    p._drafts = True
    assert not p.enlist(Device._request("code", 1, 64), Load(4, 0, 0))
    assert not p._promised(p.choices(first), 0, 4).new


def slow_clock(p: AheadPolicy, *ticks: float) -> None:
    """Its decisions take so long, in turn."""
    times = itertools.accumulate(itertools.chain.from_iterable((0.0, t) for t in itertools.cycle(ticks)))
    p.clock = lambda: next(times)


def decisions(p: AheadPolicy, steps: int) -> int:
    device, made = Device(p), []
    decide = p._decide
    p._decide = lambda *args: (made.append(1), decide(*args))[1]
    running = [device._request("code", i, 10_000) for i in range(8)]
    for _ in range(steps):
        device._step(running)
    p._decide = decide
    return len(made)


def test_decisions_of_a_rehearsal_are_not_owed() -> None:
    p = policy()
    slow_clock(p, 2e-4)
    rehearsed = policy()
    slow_clock(rehearsed, 2e-4)
    rehearsed.rehearses = True
    for _ in range(100):
        rehearsed.order([CHAIN])
        decisions(rehearsed, 1)
    rehearsed.rehearses, rehearsed._due = False, 0
    assert decisions(rehearsed, 1000) >= 0.9 * decisions(p, 1000) > 10


def test_a_decision_that_something_held_up_does_not_put_off_the_next() -> None:
    p, often = policy(), policy()
    slow_clock(often, 2e-4)
    slow_clock(p, *[2e-4] * 9, 2e-2)
    assert decisions(p, 1000) >= 0.6 * decisions(often, 1000)


def test_nothing_is_decided_where_prompts_fill_the_step() -> None:
    p = policy()
    Device(p)
    requests = [Device._request("code", i, 100) for i in range(4)]
    assert p.ask(requests, [{}] * 4, Load(4, 0, 512, 100.0, 0)) == [{}] * 4
    assert all(p.ask(requests, [{}] * 4, Load(4, 0, 0, 100.0, 64)))


def test_prompts_are_not_read_where_prompts_fill_the_steps() -> None:
    """There is no room for drafts then. One such step does not tell; those that come together behind it count once."""

    def reads(p: AheadPolicy, number: int, room: int) -> bool:
        p._ran = []  # another step is over
        together = [Device._request("code", 100 * number + i, 64) for i in range(5)]
        return all(p.enlist(r, Load(16, 0, 0, 8, room)) for r in together)

    p = policy()
    Device(p)
    p.periods.put_reading("eagle3", 16, 5e-4)
    hear(p.outcomes, CHAIN, 0.8, 200)
    assert reads(p, 0, 64) and reads(p, 1, 0)
    p._ran = []
    assert all(p.enlist(Device._request("code", 50_000 + i, 64), Load(16, 0, 0, 8, 0)) for i in range(30)), "one step"
    full = [reads(p, 2 + n, 0) for n in range(60)]
    assert not full[-1] and any(full)
    assert [reads(p, 100 + n, 64) for n in range(60)][-1], "until there is room again"


def test_drafts_are_not_blamed_for_steps_in_which_somebody_came_or_went() -> None:
    """The device waits for the host then, behind plain steps too."""

    def blamed(changed: float, quiet: float, every: int, made: int) -> bool:
        """Steps for four that are so many times as long as plain ones bring so many tokens; in one of `every`, somebody came or
        went."""
        p = policy()
        requests, plain = [Device._request("code", i, 1 << 20) for i in range(5)], p.periods.of(None, 4)
        Device(p)
        for n in range(100):
            there = requests[n % 2 : n % 2 + 4]
            asked = p.ask(there, [{}] * 4, Load(4, 0, 0))
            for k in range(every):
                took, brought = (quiet if k else changed) * plain, [0] * (made - 4)
                times = StepTimes(0, 0, 0, 0, 0, period=took, produced=made, asked=asked, drafted=[2] * 4)
                p.learn(times, there, [Verdict(brought[i : i + 1], 0) for i in range(4)])
        p._read()
        return bool(p._doubts) or p._losses.steps > 0

    assert not blamed(2.8, 1.2, 3, 6)
    assert blamed(2.8, 1.2, 3, 4), "but for what is lost in the others"
    assert blamed(2.8, 1.2, 1, 6), "and where somebody comes or goes in every step"


def test_a_head_rests_where_it_does_not_serve_and_not_for_the_others() -> None:
    """Both kinds are greedy, so nothing but their own drafts tells them apart."""
    device = Device(policy())
    device.run(["code", "hard"], 32, 64, tokens=128)  # cold
    device.drafts.clear()
    device.run(["code", "hard"], 32, 96, tokens=128)
    share = {kind: sum(drafts) / len(drafts) for kind, drafts in device.drafts.items()}
    assert share["hard"] < 0.6 and share["code"] > 0.9


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


def test_a_text_that_turns_is_drafted_for_again() -> None:
    """n-grams find nothing for a while, and then they do."""
    device = Device(policy())
    device.unread.add("hard 0")
    request = Device._request("hard", 0, 1 << 20)
    for _ in range(300):
        device._step([request])
    before = device.used.get("ngram 3", 0) + device.used.get("ngram 6", 0)
    assert before < 150
    request.id = "code 0"
    device.unread.add("code 0")
    for _ in range(300):
        device._step([request])
    assert device.used.get("ngram 3", 0) + device.used.get("ngram 6", 0) - before > 150


def test_who_may_not_be_drafted_for_is_not() -> None:
    p = policy()
    device = Device(p)
    biased = Request([1], SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.2), 0)
    drawn = Request([1], SamplingParams(temperature=1.0, max_tokens=9), 0, id="code 1")
    good = Device._request("code", 2, 9)
    assert [p.enlist(r, Load(3, 0, 0)) for r in (biased, good)] == [False, True]
    p.config = parse_speculative({"method": "auto", "verification": "rejection"})[0]
    assert not p.enlist(drawn, Load(1, 0, 0)) and device._step([biased]) == 1


def test_nothing_is_drafted_until_something_was_measured() -> None:
    p = AheadPolicy(parse_speculative({"method": "auto"})[0], lambda r: ("ngram",))
    request = Device._request("code", 0, 9)
    assert p.ask([request], [{}], Load(1, 0, 0)) == [{}] and p.explain().speedup_estimate is None
    assert p.plain_seconds(1) == 0.0


def test_it_says_why() -> None:
    device = Device(policy())
    device.run(["code"], 1, 6)
    assert device.policy is not None
    why = device.policy.explain()
    assert why.speedup_estimate > 1.5 and why.drafters["eagle3"].brings > why.drafters["eagle3"].needs
    text = " ".join(why.sentences())
    assert "eagle3 pays now" in text and "row" not in text


# ------------------------------------------------------------------ periods
def test_periods_lie_on_a_line_between_what_was_measured() -> None:
    periods = Periods()
    for company, s in ((1, 1.0), (3, 2.0), (5, 2.0)):
        periods.put(None, company, s)
    assert [periods.of(None, n) for n in (1, 2, 4, 9)] == [1.0, 1.5, 2.0, 2.0]


def test_periods_are_kept_and_found_again(tmp_path: Path) -> None:
    p, other = policy(), AheadPolicy(parse_speculative({"method": "auto"})[0], lambda r: ())
    p.periods.put_reading("eagle3", 4, 1e-4)
    store = Store(tmp_path, {"model": "m"})
    assert not store.load(other) and not other.periods.known
    store.save(p)
    assert store.load(other) and other.periods.covers(MODES, [1, 4, 16, 64])
    assert all(other.periods.of(m, n) == p.periods.of(m, n) for m in (None, *MODES) for n in (1, 3, 60))
    assert other.periods.reading("eagle3", 4) == 1e-4
    store.path.write_text(store.path.read_text().replace("0.0", "-0.0"))
    assert not store.load(other) and other.periods.known, "what cannot be is not believed"


def test_what_drafts_brought_is_kept_too(tmp_path: Path) -> None:
    p, other, store = policy(), policy(), Store(tmp_path, {"model": "m"})
    Device(p).run(["code"], 4, 24)
    store.save(p)
    assert store.load(other)
    for mode in (CHAIN, TREE):
        usual = p.outcomes._of(mode, 0).usual.by_depth()[: mode.depth]
        assert other.outcomes.brings(mode, 0) == pytest.approx(sum(usual), rel=0.01)
    Device(other)
    assert all(other.enlist(Device._request("code", n, 64), Load(4, 0, 0)) for n in range(2 * STRANGERS))
    said = json.loads(store.path.read_text())
    for chances in ([2.0, 1, 1, 1, 1], [0.5], [0.5] * 9, [0.1, 0.2, 0.1, 0.1, 0.1]):
        said["outcomes"][0]["chances"] = chances
        store.path.write_text(json.dumps(said))
        assert not store.load(policy()), "what cannot be is not believed"


def test_one_short_answer_is_kept() -> None:
    p = policy()
    Device(p).run(["code"], 1, 2, tokens=60)
    assert p.kept()["outcomes"] and not p._gone


def test_few_prompts_are_read_before_anything_is_known() -> None:
    """Nor more than may be lost."""
    for seconds in (5e-5, 4e-4):
        p = policy()
        Device(p)
        p.periods.put_reading("eagle3", 1, seconds)
        each = seconds / p.periods.of(None, 4)
        read = sum(p.enlist(Device._request("code", n, 64), Load(4, 0, 0)) for n in range(40))
        assert read == min(STRANGERS, math.ceil(BEARABLE / each))
        assert p._losses.few is (read == STRANGERS)


def test_the_first_few_are_read_even_where_that_would_not_come_back() -> None:
    """Answers are short, so that it would not come back; but it is not known yet what it brings."""
    p = policy()
    Device(p)
    p.periods.put_reading("eagle3", 16, 1e-3)
    one = Device._request("code", 0, 24)
    promise = p._promised(p.choices(one), 0, 16)
    assert promise.new and 24 * promise.seconds * (1 - 1 / promise.gain) < promise.cost < 24 * promise.seconds
    assert p.enlist(one, Load(16, 0, 0))


def test_trials_for_more_requests_are_preferred_where_they_cost_less_for_each_draft() -> None:
    assert [drafts_of(n) for n in (1, 2, 4, 16)] == [2, 4, 8, 16]
    p = policy()
    Device(p)
    p._trials.share_out({"eagle3": 1})
    guests = [p._guest(Device._request("code", n, 64)) for n in range(16)]
    members = dict.fromkeys(range(16), ("eagle3",))
    for guest in guests[1:]:
        guest.decided = True
    assert len(p._try([CHAIN], guests, members, 16)) == 16


def test_what_is_thought_of_drafts_stays_while_there_are_none() -> None:
    outcomes, guest = Outcomes(), Guest(0, True)
    guest.logs[0][0] += 40
    outcomes.digest([guest], [CHAIN], 40)
    thought = outcomes.brings(CHAIN, 0)
    known = outcomes._of(CHAIN, 0)
    known.wane(2000)
    assert thought < 0.2 and sum(known.by_depth(2)) == pytest.approx(thought) and known.tries < 5
    for _ in range(20):
        outcomes.digest([], [CHAIN], 100)
    assert outcomes.brings(CHAIN, 0) == pytest.approx(thought)
    guest.logs[0][2] += 6
    outcomes.digest([Guest(0, True, logs=guest.logs)], [CHAIN], 6)
    assert outcomes.brings(CHAIN, 0) > 0.8, "it is given up sooner, though"


def test_steps_in_which_little_was_found_to_say_tell_nothing_about_the_machine() -> None:
    p = policy()
    plain, head = p.periods.of(None, 4), p.periods.of(CHAIN, 4)
    for _ in range(40):
        p.periods.learn(NGRAM, 4, 4, 0.9 * p.periods.of(NGRAM, 4))
    assert p.periods.of(NGRAM, 4) < 0.9 * seconds(NGRAM, 4, 4)
    assert (p.periods.of(None, 4), p.periods.of(CHAIN, 4)) == (plain, head)


def test_drafts_that_lose_are_thought_about_anew_whatever_that_takes() -> None:
    p = policy()
    device, request = Device(p), Device._request("code", 0, 1 << 20)
    for _ in range(60):
        device._step([request])
    p.clock = itertools.count(0.0, 1e3).__next__
    p._time, p._cost = -1e6, 1e3
    assert p._way is not None and p.holds()
    request.id = "hard 0"
    p._guests["hard 0"], p._plans["hard 0"] = p._guests.pop("code 0"), p._plans.pop("code 0")
    steps = next(n for n in range(200) if device._step([request]) and p._way is None)
    assert steps < 100


def test_one_step_that_something_held_up_is_no_loss() -> None:
    p = policy()
    device, requests = Device(p), [Device._request("code", i, 1 << 20) for i in range(4)]
    for n in range(300):
        device.late = 0.02 if n % 60 == 59 else 0.0
        device._step(requests)
    assert not p._doubts and p._way is not None


def test_a_request_that_never_drafts_stays_as_it_was_known() -> None:
    own = Own()
    own.add([0.6, 0.4], [20, 2, 0])
    before = own.worths([0.6, 0.4])
    for _ in range(10_000):
        own.fade(16)
    assert before[-1] < own.worths([0.6, 0.4])[-1] == pytest.approx(1.0, abs=1e-3), "like the others, in the end"


def test_a_bill_is_for_the_company_of_each_step() -> None:
    for companies in ((4, 8, 8, 8), (4, 2, 2, 1)):
        trials = Trials()
        trials.share_out({"ngram": 1})
        trials.pay("ngram", 2e-3, 1.0, 6, 1.0, free=True)
        for company in companies:
            times = StepTimes(0, 0, 0, 0, 4, period=1e-3 * company, produced=company)
            trials.watch(times, company, 1e-3 * company, prompts=False)
        assert trials.purses["ngram"] == pytest.approx(-0.25 * 2e-3)


def test_another_drafter_is_tried_now_and_then_where_one_pays() -> None:
    """From code, where heads pay, to copies, where n-grams pay more, and heads a little."""
    device = Device(policy())
    device.run(["code"], 4, 40)
    device.run(["both"], 4, 160)
    device.used.clear()
    device.run(["both"], 4, 40)
    assert device.used.get("ngram 6", 0) > 0.7 * sum(device.used.values()), device.used


def test_a_trial_costs_what_it_took_and_as_was_thought_in_steps_with_prompts() -> None:
    plain = 2e-3
    for took, left in ((plain, 0.5), (1.5 * plain, 0.0), (9 * plain, -1.5)):
        trials = Trials()
        trials.saved = 1.0
        trials.share_out({"ngram": 1})
        assert trials.pay("ngram", plain, 1.0, 6, 1.0, free=False) and trials.bill is not None
        before, paid = trials.purses["ngram"], trials.bill.paid
        for period, prompts in ((1.0, True), (1.0, True), (plain, False), (took, False)):
            trials.watch(StepTimes(0, 0, 0, 0, 4, period=period, produced=4), 4, plain, prompts)
        assert trials.bill is None
        assert trials.purses["ngram"] - before == pytest.approx(paid - (1 - left) * plain)


def test_a_trial_waits_for_its_price_unless_it_is_free() -> None:
    trials = Trials()
    trials.share_out({"ngram": 1, "eagle3": 2})
    assert not trials.pay("eagle3", 1e-3, 1.0, 1, 1.0, free=False) and trials.pay(
        "eagle3", 1e-3, 1.0, 1, 1.0, free=True
    )
    trials.saved = 3e-3
    trials.share_out({"ngram": 1, "eagle3": 2})
    assert trials.purses == pytest.approx({"ngram": 1e-3, "eagle3": 2e-3}) and trials.saved == 0.0
    assert not trials.pay("ngram", 1e-3, 1.0, 1, 1.0, free=False), "not before it is known what the last one took"
    trials.bill = None
    assert not trials.pay("ngram", 3e-3, 1.0, 1, 1.0, free=False) and trials.pay("ngram", 1e-3, 1.0, 1, 1.0, free=False)


def test_real_steps_move_all_modes_and_their_own_most() -> None:
    p = policy()
    plain, tree = p.periods.of(None, 4), p.periods.of(TREE, 4)
    for _ in range(40):
        p.periods.learn(TREE, 4, 4, 1.3 * tree)
    assert p.periods.of(TREE, 4) > 1.2 * tree and plain < p.periods.of(None, 4) < 1.3 * plain
    steady = p.periods.of(TREE, 4)
    p.periods.learn(TREE, 4, 4, 50 * tree)
    assert p.periods.of(TREE, 4) == steady


def test_sizes_stay_within_what_a_user_allows() -> None:
    assert modes_of(["eagle3"], 16, 16) == [CHAIN, Mode("eagle3", 4, 4), TREE]
    assert within(((2, 2), (4, 4), (15, 5)), 3, 6) == [(2, 2), (3, 3), (6, 3)]
    assert within(((2, 2), (15, 5)), 1, 1) == [(1, 1)] and within(((2, 2),), 0, 4) == []


def test_steps_that_wait_for_prompts_tell_nothing_about_others() -> None:
    p = policy()
    plain, tree = p.periods.of(None, 1), p.periods.of(TREE, 1)
    request = Device._request("code", 0, 1 << 20)
    for i in range(200):
        times = StepTimes(0, 0, 0, 0, 0, 8 * (i % 2), 2 * plain, produced=1, asked=[{}], drafted=[0])
        p.learn(times, [request], [Verdict([], 0)])
    p.release(request)
    assert (p.periods.of(None, 1), p.periods.of(TREE, 1)) == (plain, tree)
    for _ in range(200):
        p.learn(
            StepTimes(0, 0, 0, 0, 0, 0, 2 * plain, produced=1, asked=[{}], drafted=[0]), [request], [Verdict([], 0)]
        )
    p.release(request)
    assert p.periods.of(None, 1) > 1.9 * plain


def test_who_comes_is_told_how_many_may_run_at_once(monkeypatch) -> None:
    model = tiny.model()
    e = harness.engine(model, {"method": "eagle3"}, head=tiny.eagle(model.config, (0, 1, 2)))
    e.scheduler.max_num_seqs, told = 2, []
    monkeypatch.setattr(e.policy, "enlist", lambda request, load: told.append(load.num_running) or True)
    harness.run(e, [harness.request([1, 2, 3], max_tokens=2) for _ in range(5)])
    assert len(told) == 5 and max(told) == 2, "though five wait"


def test_drafts_for_some_teach_nothing_about_drafts_for_all() -> None:
    p = Periods()
    for mode, seconds in ((None, {1: 1.0, 8: 1.2}), (CHAIN, {1: 1.4, 8: 1.8})):
        for company, s in seconds.items():
            p.put(mode, company, s)
    before = p.extra(CHAIN, 2, 8)
    for _ in range(60):
        p.learn(CHAIN, 2, 8, 1.2 + 1.5 * before)
    assert p.extra(CHAIN, 2, 8) == pytest.approx(1.5 * before, rel=0.1)
    assert p.of(CHAIN, 8) == 1.8 and p.of(None, 8) == 1.2 and p.extra(CHAIN, 8, 8) == pytest.approx(0.6)
    for _ in range(200):
        p.learn(CHAIN, 8, 8, 2.7)
    assert p.of(CHAIN, 8) == pytest.approx(2.7, rel=0.05)
    p.learn(CHAIN, 2, 8, 0.6)  # less than a plain step: noise
    assert p.extra(CHAIN, 2, 8) > 0


# ------------------------------------------------------------------ rehearsals where texts are short
def stage(max_len: int, seqs: int = 8) -> Any:
    config = SimpleNamespace(max_num_seqs=seqs, max_batch_tokens=512, page_size=16)
    return SimpleNamespace(config=config, max_len=max_len, pool=SimpleNamespace(num_slots=seqs * (max_len + 16)))


@pytest.mark.parametrize(("max_len", "texts"), [(4096, 1), (600, 3), (264, 5)])
def test_modes_that_one_text_has_no_room_for_are_tried_in_several(monkeypatch, max_len, texts) -> None:
    modes, played = [Mode("eagle3", n, n) for n in range(1, 6)], []

    @contextmanager
    def running(engine, requests):
        played.append([])
        yield []

    monkeypatch.setattr(rehearse, "running", running)
    monkeypatch.setattr(rehearse, "_made_up", lambda *args: ())
    monkeypatch.setattr(rehearse, "_seconds", lambda engine: 0.5)
    own = SimpleNamespace(order=lambda ordered: played[-1].extend(ordered), ordered=())
    assert rehearse.companies(stage(max_len), {"eagle3": modes}) == [1, 2, 4, 8]
    found = rehearse._play(stage(max_len), own, [], 2, "eagle3", modes)
    assert found == dict.fromkeys(modes, 0.5) and [*itertools.chain(*played)] == modes and len(played) == texts


def test_texts_without_any_room_are_no_rehearsal() -> None:
    assert rehearse.companies(stage(263), {"eagle3": [Mode("eagle3", 1, 1)]}) == []


def test_each_request_drafts_the_first_way_of_a_rehearsal_that_it_may() -> None:
    p = policy()
    p.choices = p.fixed.choices = lambda r: [("eagle3",), ("ngram", "eagle3"), ("ngram",), ()][r.seed]
    p.rehearses, requests = True, [Device._request("code", i, 64) for i in range(4)]
    for ordered, names in (([NGRAM, TREE], ["eagle3", "ngram", "ngram"]), ([TREE], ["eagle3", "eagle3"]), ([], [])):
        p.order(ordered)
        wishes = p.ask(requests, [{}] * 4, Load(4, 0, 0, 100.0, 64))
        assert [name for own in wishes for name in own] == names


def test_heads_are_mixed_with_drafters_on_the_host_where_there_are_both_and_room() -> None:
    def drafter(ahead: bool, layers: tuple[int, ...] = ()) -> Any:
        return SimpleNamespace(ahead=ahead, needs=SimpleNamespace(hidden_layers=layers))

    suffix, modes, sizes = Mode("suffix", 7, 7), {"ngram": MODES[:2], "eagle3": MODES[2:]}, [1, 2, 4, 8]
    drafters = {"ngram": drafter(True), "eagle3": drafter(True, (1, 2)), "suffix": drafter(False)}
    own = stage(4096)
    own.drafting = SimpleNamespace(drafters=drafters)
    assert rehearse._mixtures(own, modes, sizes) == []
    assert rehearse._mixtures(own, {"ngram": MODES[:2], "suffix": [suffix]}, sizes) == []
    both = modes | {"suffix": [suffix]}
    assert rehearse._mixtures(own, both, sizes) == [(n, m, suffix) for n in (2, 4) for m in (CHAIN, TREE)]
    own.config.max_batch_tokens = 40  # there is room for 2 · 16 rows, and for 4 · 8
    assert [(n, m) for n, m, _ in rehearse._mixtures(own, both, sizes)] == [(2, CHAIN), (2, TREE), (4, CHAIN)]


def test_what_steps_take_in_one_company_says_little_about_others() -> None:
    """Else what a crowd's host takes would be thought of a single request, too, and drafts for it would seem free."""
    p = policy()
    alone, crowd = p.periods.of(None, 1), p.periods.of(None, 64)
    for _ in range(200):
        p.periods.learn(None, 64, 64, 1.3 * crowd)
    assert p.periods.of(None, 64) == pytest.approx(1.3 * crowd, rel=0.01)
    assert alone < p.periods.of(None, 1) < 1.06 * alone


def test_another_shape_of_what_drafts_is_tried_too() -> None:
    """Trees were unlucky when they were seen last, and pay most."""
    p = policy()
    device = Device(p)
    device.run(["code"], 1, 4)
    for wide, chances in ((False, [0.8, 0.62, 0.48, 0.38, 0.3]), (True, [0.75, 0.4, 0.2, 0.1, 0.05])):
        p.outcomes._survival["eagle3", wide, 0] = Survival(chances, seen=100)
        p.outcomes._survival["eagle3", wide, 0].add([30 * c for c in (1.0, *chances)])
    device.run(["code"], 1, 30)
    device.used.clear()
    device.run(["code"], 1, 10)
    assert device.used.get(str(TREE), 0) > 0.6 * sum(device.used.values()), device.used


def test_what_brings_far_too_little_is_tried_less_often() -> None:
    def tries(needs: float) -> bool:
        trials = Trials()
        trials.saved = 1e-3
        trials.share_out({"ngram": 1})
        return trials.pay("ngram", 1.5e-3, 1.0, 6, needs, free=False)

    assert tries(1.0) and tries(2.0) and not tries(4.0)


def test_newcomers_that_come_together_all_count() -> None:
    p = policy()
    requests = [Device._request("hard", i, 9) for i in range(3)]
    for r in requests:
        p.enlist(r, Load(3, 0, 0))
    p._read()
    assert p._readings.arrival is not None and p._readings.arrival.count == 3
    for r in requests:
        p.release(r)
    assert not p._guests and p._leaving == 0


def test_what_steps_take_is_learned_beyond_what_was_rehearsed_too() -> None:
    p = policy()
    true = 1.3 * p.periods.of(None, 256)
    for _ in range(20):
        p.periods.learn(None, 256, 256, true, 64)
    assert p.periods.of(None, 256) == pytest.approx(true, rel=0.01)


def test_nothing_is_put_aside_where_nobody_decides() -> None:
    """A rehearsal failed, so nobody will ever draft."""
    p = policy()
    p.forget_periods()
    here = Device._request("code", 0, 9)
    p.enlist(here, Load(1, 0, 0))
    for i in range(1, 100):
        request = Device._request("code", i, 9)
        p.enlist(request, Load(2, 0, 0))
        p.release(request)
    assert len(p._unread) + len(p._guests) < 4


def test_to_explain_changes_nothing() -> None:
    """Another thread may ask, while the engine's own is at work."""
    p = policy()
    device, request = Device(p), Device._request("code", 0, 1 << 20)
    for _ in range(30):
        device._step([request])
    before = list(p._unread)
    p.explain()
    assert before and p._unread == before


def test_what_is_hardly_known_is_looked_at_again_but_not_for_ever() -> None:
    p = policy()
    device, request = Device(p), Device._request("code", 0, 1 << 20)
    p.outcomes.is_new = lambda mode, heat: True  # type: ignore[method-assign]
    p.clock, soon = itertools.count(0.0, 1e3).__next__, 0
    p._time = p._cost = 1e-4
    for _ in range(200):
        device._step([request])
        soon += p._began
    assert 0 < soon < 80


def hear(outcomes: Outcomes, mode: Mode, chance: float, drafts: int, seed: int = 0) -> None:
    """Drafts of this mode, each for a request of its own, whose tokens are right so often."""
    rng, guests = random.Random(seed), []
    for _ in range(drafts):
        guest, right = Guest(0, True), 0
        while right < mode.depth and rng.random() < chance:
            right += 1
        guest.logs[0][right] += 1
        guests.append(guest)
    outcomes.digest(guests, [mode], 16)


def test_what_chains_bring_tells_what_trees_would_and_the_other_way_round() -> None:
    for seen, other in ((CHAIN, TREE), (TREE, CHAIN)):
        outcomes = Outcomes()
        for mode in (other, seen):
            hear(outcomes, mode, 0.4, 100)
        before = outcomes.brings(other, 0)
        for seed in range(5):
            hear(outcomes, seen, 0.9, 100, seed)
        assert outcomes.brings(other, 0) > 1.3 * before
        for seed in range(25):
            hear(outcomes, seen, 0.1, 100, seed)
        assert outcomes.brings(other, 0) < 0.7 * before


def test_what_short_drafts_bring_tells_of_deeper_tokens_that_nobody_tried() -> None:
    """Else long drafts would seem as bad as they were on the last texts, for as long as short ones are used."""
    long = Mode("eagle3", 5, 5)

    def later(outcomes: Outcomes) -> float:
        """That the third token is right where the second one was."""
        chances = outcomes.general(long, 0)
        return chances[2] / chances[1]

    def draft(outcomes: Outcomes, mode: Mode, chance: float, requests: int) -> float:
        """In every step, for one request after the other."""
        rng = random.Random(requests)
        for _ in range(requests):
            guest = Guest(0, True)
            for _ in range(16):
                right = next((n for n in range(mode.depth) if rng.random() > chance), mode.depth)
                guest.logs[0][right] += 1
            outcomes.digest([guest], [mode], 16)
        return later(outcomes)

    for thought, right in ((0.4, 0.8), (0.8, 0.4), (0.6, 0.6)):
        outcomes = Outcomes()
        assert draft(outcomes, long, thought, 60) == pytest.approx(thought, abs=0.15)
        found = [draft(outcomes, CHAIN, right, n) for n in (40, 41, 42, 43, 44)]
        assert found == pytest.approx([right] * 5, abs=0.25), "and it comes to rest there"


@given(
    st.lists(st.floats(0.0, 2.0), min_size=1, max_size=16),
    st.sampled_from([CHAIN, TREE, NGRAM]),
    st.integers(0, 3),
    st.floats(0.4, 2.5),
)
def test_no_way_is_passed_over_that_could_be_the_best(worths: list[float], mode: Mode, others: int, few: float) -> None:
    p, company = policy(), len(worths) + others
    p.periods._few[mode] = few
    own = [[w] * mode.depth for w in worths]
    speed, _ = p._speed(mode, own, [True] * len(own), company)
    assert speed <= p._at_most(mode, own, company) * (1 + 1e-9)


def test_what_trees_are_worth_beside_chains_is_learned() -> None:
    widths = []
    for chance in (0.4, 0.7):  # of a tree's tokens, where a chain's are right in 0.4
        outcomes = Outcomes()
        for seed in range(100):
            hear(outcomes, CHAIN, 0.4, 20, seed)
            hear(outcomes, TREE, chance, 20, 100 + seed)
        widths.append(outcomes._width("eagle3"))
    assert widths[0] == pytest.approx(1.0, abs=0.1) and 2.0 < widths[1] < 2.5, widths  # 1 - 0.6 ** 2.36 = 0.7


def test_a_text_that_turns_says_nothing_about_trees_beside_chains() -> None:
    outcomes = Outcomes()
    for seed, (mode, chance) in enumerate([(TREE, 0.5), (CHAIN, 0.4), *[(CHAIN, 0.9)] * 8, *[(CHAIN, 0.1)] * 8]):
        hear(outcomes, mode, chance, 50, seed)
    assert 1.2 < outcomes._width("eagle3") < 1.5


@pytest.mark.parametrize(("company", "drafts"), [(1, True), (64, False)])
def test_a_newcomer_drafts_as_heads_promise_where_that_pays_for_it_alone(company: int, drafts: bool) -> None:
    """The others draft in another way, or not at all, and there is no time to decide."""
    p = policy()
    hear(p.outcomes, CHAIN, 0.8, 200)
    Device(p)
    others = [Device._request("hard", i, 64) for i in range(company - 1)]
    p.ask([*others, Device._request("hard", 999, 64)], [{}] * company, Load(company, 0, 0))
    p._way = p._common = None
    p._time, p._due, p._began, p._trying = -1.0, 1 << 20, False, False
    p._trials.purses = dict.fromkeys(p._trials.purses, -1.0)
    new = Device._request("code", 1000, 64)
    wishes = p.ask([*others, new], [{}] * company, Load(company, 0, 0))
    assert bool(wishes[-1]) == drafts and p.rests(new) != drafts


def test_a_newcomer_does_not_draft_as_few_did_where_there_are_many_now() -> None:
    """One request was left, and drafted with a head. Of the many that have come since, one was read."""
    p = policy()
    hear(p.outcomes, CHAIN, 0.8, 200)
    Device(p)
    others = [Device._request("hard", i, 64) for i in range(63)]
    p.ask([*others, Device._request("hard", 999, 64)], [{}] * 64, Load(64, 0, 0))
    p._way, p._common = CHAIN, CHAIN
    p._plans |= {r.id: {} for r in p._asked}
    p._time, p._due, p._began, p._trying = -1.0, 1 << 20, False, False
    new = Device._request("code", 1000, 64)
    assert not p.ask([*others, new], [{}] * 64, Load(64, 0, 0))[-1]
    p._plans |= {r.id: {"eagle3": Wish(2, 2)} for r in p._asked}  # but if the others draft, too
    newer = Device._request("code", 1001, 64)
    assert p.ask([*others, newer], [{}] * 64, Load(64, 0, 0))[-1]
    p._plans |= {r.id: {"ngram": Wish(3, 3)} for r in p._asked}  # and not in another way
    assert not p.ask([*others, Device._request("code", 1002, 64)], [{}] * 64, Load(64, 0, 0))[-1]


def test_who_comes_as_most_of_the_company_is_decided_for_whatever_that_takes() -> None:
    p = policy()
    hear(p.outcomes, CHAIN, 0.8, 200)
    Device(p)
    p._time, p._due, p._company = -1.0, 1 << 20, 3
    wishes = p.ask([Device._request("code", i, 64) for i in range(4)], [{}] * 4, Load(4, 0, 0))
    assert all(wishes) and p._company == 4


def test_what_lost_is_doubted_where_most_drafted_and_is_not_read_for() -> None:
    p = policy()
    hear(p.outcomes, CHAIN, 0.8, 200)
    Device(p)
    p.periods.put_reading("eagle3", 16, 1e-5)
    p._ways.append(CHAIN)

    def look(steps: int, count: int) -> None:
        p._due, watch = 9, Watch()
        for _ in range(steps):
            watch.add(count, 16, 20.0)
        p._look_at(watch, (0, count, 16))
        assert p._due == 0, "it is thought about"

    look(16, 1)
    assert not p._doubts, "but that only some draft may be why it lost"
    look(3, 16)
    assert not p._doubts, "and these were too few steps"
    assert p.enlist(Device._request("code", 0, 64), Load(16, 0, 0))
    for _ in range(9):
        look(8, 16)
    p._readings.saved = 0.0
    assert not p.enlist(Device._request("code", 1, 64), Load(16, 0, 0))
    assert p._trusted("eagle3", 4) == 1.0, "it is another thing in other company"
    doubt, p._steps = p._trusted("eagle3", 16), 160
    requests = [Device._request("hard", i, 64) for i in range(16)]
    p._decide(requests, [p._guest(r) for r in requests], Load(16, 0, 0))
    assert p._trusted("eagle3", 16) == pytest.approx(doubt * 1.02**10), "it is forgotten by steps"


def test_answers_that_were_cut_off_do_not_tell_that_answers_are_short() -> None:
    def answered(p: AheadPolicy, count: int, tokens: int, reason: str) -> float:
        for i in range(count):
            request = Device._request("code", i, tokens)
            request.tokens, request.finish_reason = [*request.tokens, *[1] * tokens], reason
            p.release(request)
        return p._tokens_of(128)

    assert policy()._tokens_of(128) == pytest.approx(100, abs=2)
    assert answered(policy(), 50, 24, "length") > 120, "nobody knows how long they would have been"
    assert answered(policy(), 50, 24, "stop") == pytest.approx(24, abs=2)
    assert answered(policy(), 50, 24, "abort") == policy()._tokens_of(128), "somebody went"
    assert policy()._tokens_of(1) == pytest.approx(1, abs=0.01)


def test_prompts_are_read_for_all_or_for_nobody_where_it_does_not_pay_for_one_alone() -> None:
    p = policy()
    hear(p.outcomes, CHAIN, 0.6, 200)
    Device(p)
    promise = p._promised(("eagle3",), 0, 32)
    assert promise.alone < 1 < promise.gain
    saves = promise.seconds * (1 - 1 / promise.gain)
    p.periods.put_reading("eagle3", 32, 64 * saves)  # it comes back with answers of 64 tokens and more
    p._promises.clear()
    p._readings.saved = -1e9
    p._ends = Share(0.0, 1e9, 1.0)
    for usual, read in ((128, True), (32, False)):
        p._usual_tokens = usual
        lengths = (40, 100, 400)
        assert [p.enlist(Device._request("code", n, n), Load(32, 0, 0)) for n in lengths] == [read] * 3
    p._usual_tokens = 128.0
    assert not p.enlist(Device._request("code", 1, 1), Load(32, 0, 0)), "reading takes longer than all of it"


def test_what_drafts_for_few_of_many_take_says_little_about_drafts_for_most() -> None:
    periods = policy().periods
    few, most = periods.extra(CHAIN, 2, 16), periods.extra(CHAIN, 15, 16)
    for _ in range(200):
        periods.learn(CHAIN, 2, 16, periods.of(None, 16) + 2 * few)
    assert periods.extra(CHAIN, 2, 16) == pytest.approx(2 * few, rel=0.05)
    assert most < periods.extra(CHAIN, 15, 16) < 1.1 * most
    assert periods.extra(CHAIN, 16, 16) == periods.of(CHAIN, 16) - periods.of(None, 16)
    periods = policy().periods
    for _ in range(2000):
        periods.learn(CHAIN, 15, 16, periods.of(None, 16) + 1.25 * most)
    assert periods.extra(CHAIN, 15, 16) == pytest.approx(1.25 * most, rel=0.1), "and of most is learned as of all"
    assert periods.extra(CHAIN, 2, 16) < 1.5 * few


def test_coming_and_going_counts_as_far_as_it_was_seen_with_drafts_and_without() -> None:
    bustle = Bustle()
    bustle.add("eagle3", 32, 2e-3, [3e-3] * 1000)
    assert bustle.holds_up("eagle3", 32) == 1.0, "nobody knows whether it is the drafts"
    bustle.add(None, 32, 1e-3, [1e-3] * 1000)
    assert bustle.holds_up("eagle3", 33) == pytest.approx(1.5, abs=0.1) and bustle.holds_up("eagle3", 8) == 1.0
    assert bustle.holds_up("suffix", 32) == 1.0, "another drafter was not seen"
    bustle.add(None, 32, 1e-3, [2e-3] * 3000)
    assert bustle.holds_up("eagle3", 32) == 1.0, "it is no reason to draft"


def test_trials_are_not_thought_about_where_there_was_far_too_little_time_lately() -> None:
    trials = Trials()
    trials.share_out({"eagle3": 1})
    assert trials.may_pay(["eagle3"], 16) and not trials.pay("eagle3", 1e-2, 1.0, 1, 1.0, free=False, company=16)
    assert not trials.may_pay(["eagle3"], 16) and trials.may_pay(["eagle3", "ngram"], 16)
    assert trials.may_pay(["eagle3"], 32), "it may cost less there"
    trials.saved = 5e-3
    assert trials.may_pay(["eagle3"], 16)
    trials.share_out({"eagle3": 1})
    assert trials.pay("eagle3", 1e-2, 1.0, 1, 1.0, free=False, company=16) and not trials.may_pay(["ngram"], 16)


def test_the_first_real_steps_move_what_was_rehearsed_furthest() -> None:
    periods = Periods()
    for mode, own in ((None, 1e-3), (CHAIN, 2e-3)):
        periods.put(mode, 8, own)
    periods.learn(CHAIN, 8, 8, 3e-3, 4)
    first = periods.of(CHAIN, 8)
    assert first > 2.4e-3
    for _ in range(10):
        periods.learn(CHAIN, 8, 8, 3e-3, 4)
    before = periods.of(CHAIN, 8)
    periods.learn(CHAIN, 8, 8, 2e-3, 4)
    assert before == pytest.approx(3e-3, rel=0.02) and periods.of(CHAIN, 8) > 0.9 * before


def come(readings: Readings, count: int, read: int, seconds: float, company: int) -> None:
    """So many together, some of whom a head reads; the step that they come in is longer by so much."""
    for i in range(count):
        readings.add(i < read)
    for more, tokens in ((seconds, 8 * count), (0.0, 0)):
        readings.watch(StepTimes(0, 0, 0, 0, company, tokens, period=1e-3 + more), 1e-3, company)


def test_what_reading_takes_is_told_by_those_that_come_as_many_at_a_time() -> None:
    """Many together take longer than as many one by one: that is not the reading."""
    readings, rng = Readings(), random.Random(1)
    for _ in range(300):
        for count, read in ((1, 0), (1, 1), (32, 0), (32, 1)):
            each = 1e-4 if count == 1 else 4e-4
            come(readings, count, read, count * each + 3e-4 * read + rng.gauss(0, 1e-4), 32)
    assert readings.dearer(32) == pytest.approx(3e-4, abs=1e-4)
    assert readings.dearer(8) == 0.0, "in another company it may be otherwise"


def test_what_reading_takes_is_not_more_than_nothing_by_chance() -> None:
    readings, rng = Readings(), random.Random(1)
    for _ in range(1000):
        for read in (0, 1):
            come(readings, 1, read, 5e-4 + rng.gauss(0, 2e-4), 8)
    assert abs(readings.dearer(8)) < 1e-4


def test_copies_are_given_up_sooner_than_other_drafts() -> None:
    """They end all at once."""
    worths = {}
    for name in ("ngram", "eagle3"):
        own = Guest(0, True).of(name)
        own.add([0.5, 0.5], [20, 20, 20])
        own.add([0.5, 0.5], [10, 0, 0])
        worths[name] = own.worths([0.5, 0.5])[-1]
    assert worths["ngram"] < 0.75 * worths["eagle3"]


def test_a_cap_that_no_rehearsal_has_met_does_no_harm() -> None:
    """So large a draft was never timed."""
    p = policy()
    device = Device(p)
    hear(p.outcomes, CHAIN, 0.9, 200)
    hear(p.outcomes, TREE, 0.95, 200)
    requests = [Device._request("code", i, 1 << 20) for i in range(2)]
    for r in requests:
        r.speculation = RequestSpeculation(max_tokens=3)
    for _ in range(100):
        device._step(requests)
    assert any(not p.periods.knows(mode) for mode in p._ways), p._ways
