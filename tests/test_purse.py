"""A purse: what may be lost is bounded, whatever comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.purse import AGAIN, CURIOUS, HOPE, INCOME, INTEREST, LEAST, MOST, SPARE, START, Purse


def test_bets_end_when_nothing_is_left_and_begin_again() -> None:
    purse = Purse()
    assert purse.bears(START) and not purse.bears(START + 0.01)
    purse.book(-START)
    assert purse.bears(SPARE) and not purse.bears(SPARE + 0.01), "a little may always be lost with what should pay"
    assert purse.hope == 0 and not purse.buys(0.0, 0.01), "and nothing with what should not"
    purse.earn(round(1 / INCOME))
    assert purse.bears(1.0) and 0 < purse.hope <= HOPE


def test_what_was_lost_makes_drafts_dearer() -> None:
    purse = Purse()
    usual = purse.least
    assert usual > 1
    purse.book(-100.0)
    assert purse.balance == LEAST and purse.least > usual
    purse.book(1000.0)
    assert purse.balance == MOST and purse.least == usual


def test_what_has_lost_too_much_rests_and_begins_again() -> None:
    """Whatever is thought of drafts: so what is lost in all is bounded though that be wrong."""
    purse = Purse()
    purse.book(-START + LEAST)
    assert purse.spent and not purse.bears(0.0)
    steps = purse.waits(0.0, 0.0)
    purse.earn(round((AGAIN - LEAST) / INCOME) - 1)
    assert purse.spent
    purse.earn(2)
    assert not purse.spent and purse.bears(SPARE) and steps > 0


@given(st.lists(st.floats(0, 1), min_size=10, max_size=2000))
def test_what_is_lost_in_all_is_bounded_though_all_is_thought_to_pay(losses: list[float]) -> None:
    """Each step loses what it does, as long as anything is borne."""
    purse, lost = Purse(), 0.0
    for loss in losses:
        purse.earn(1)
        if purse.bears(0.0):
            purse.book(-loss)
            lost += loss
    assert lost <= START - LEAST + INCOME * len(losses) + 1.0


def test_what_is_bought_is_paid_from_curiosity_and_it_says_how_long_that_takes() -> None:
    purse = Purse()
    assert purse.buys(CURIOUS, 0.1) and purse.curiosity == 0
    assert not purse.buys(0.3, 0.1)
    steps = purse.waits(0.3, 0.1)
    assert steps == 0.3 / INTEREST
    purse.earn(round(steps) + 1)
    assert purse.buys(0.3, 0.1) and not purse.waits(0.0, 0.1)
    assert purse.waits(0.0, purse.balance + 1) == 1 / INCOME


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=200))
def test_no_more_is_lost_than_what_there_was_and_came(bets: list[tuple[float, float]]) -> None:
    """Each step, something is wished for that may lose so much, and loses at most that."""
    purse, lost = Purse(), 0.0
    for loss, share in bets:
        purse.earn(1)
        if purse.buys(0.0, loss):
            purse.book(-min(1.0, share) * loss)
            lost += min(1.0, share) * loss
    assert lost <= START + INCOME * len(bets) + 1e-9
