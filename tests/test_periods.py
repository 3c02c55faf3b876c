"""How long steps take: measured at load, and moved by real ones."""

from __future__ import annotations

import pytest

from headstart.policy.periods import Mode, Periods, modes_of
from headstart.shapes import within
from tests.made_up import CHAIN, NGRAM, TREE, policy, seconds


def test_periods_lie_on_a_line_between_what_was_measured() -> None:
    periods = Periods()
    for company, s in ((1, 1.0), (3, 2.0), (5, 2.0)):
        periods.put(None, company, s)
    assert [periods.of(None, n) for n in (1, 2, 4, 9)] == [1.0, 1.5, 2.0, 2.0]


def test_steps_in_which_little_was_found_to_say_tell_nothing_about_the_machine() -> None:
    p = policy()
    plain, head = p.periods.of(None, 4), p.periods.of(CHAIN, 4)
    for _ in range(40):
        p.periods.learn(NGRAM, 4, 4, 0.9 * p.periods.of(NGRAM, 4))
    assert p.periods.of(NGRAM, 4) < 0.9 * seconds(NGRAM, 4, 4)
    assert (p.periods.of(None, 4), p.periods.of(CHAIN, 4)) == (plain, head)


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


def test_drafts_for_some_teach_nothing_about_drafts_for_all() -> None:
    p = Periods()
    for mode, own in ((None, {1: 1.0, 8: 1.2}), (CHAIN, {1: 1.4, 8: 1.8})):
        for company, s in own.items():
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


def test_what_steps_take_in_one_company_says_little_about_others() -> None:
    """Else what a crowd's host takes would be thought of a single request, too, and drafts for it would seem free."""
    p = policy()
    alone, crowd = p.periods.of(None, 1), p.periods.of(None, 64)
    for _ in range(200):
        p.periods.learn(None, 64, 64, 1.3 * crowd)
    assert p.periods.of(None, 64) == pytest.approx(1.3 * crowd, rel=0.01)
    assert alone < p.periods.of(None, 1) < 1.06 * alone


def test_what_steps_take_is_learned_beyond_what_was_rehearsed_too() -> None:
    p = policy()
    true = 1.3 * p.periods.of(None, 256)
    for _ in range(20):
        p.periods.learn(None, 256, 256, true, 64)
    assert p.periods.of(None, 256) == pytest.approx(true, rel=0.01)


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
