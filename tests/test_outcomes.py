"""What drafts bring, told by what they brought."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.guests import DEEPEST, NOTHING, SEATS, Guest, Owns
from headstart.policy.outcomes import HARDER, SPEAKS, Chances, Outcomes, Tries
from headstart.policy.periods import Mode

NGRAM, CHAIN, TREE = Mode("ngram", 3, 3), Mode("eagle3", 2, 2), Mode("eagle3", 15, 5)


def drafts(mode: Mode, chance: float, count: int, rng: random.Random) -> list[int]:
    """How many of them brought 0, 1, ... tokens that are right so often."""
    tally = NOTHING.copy()
    for _ in range(count):
        tally[next((n for n in range(mode.depth) if rng.random() > chance), mode.depth)] += 1
    return tally


def hear(outcomes: Outcomes, mode: Mode, chance: float, count: int, seed: int = 0) -> None:
    """Drafts of this mode, each for a request of its own."""
    rng, guests = random.Random(seed), []
    for _ in range(count):
        guest = Guest(0, True, outcomes.owns.sit())
        guest.logs[0] = drafts(mode, chance, 1, rng)
        guests.append(guest)
    outcomes.digest(guests, [mode], 16)
    for guest in guests:
        outcomes.owns.leave(guest.seat)


# ------------------------------------------------------------------ chances and tries
@given(st.floats(0, 0.97), st.floats(0, 0.97), st.integers(1, DEEPEST))
def test_what_a_draft_brings_is_the_sum_of_what_its_tokens_do(first: float, later: float, depth: int) -> None:
    assert Chances(first, later).tokens(depth) == pytest.approx(sum(first * later**n for n in range(depth)))


def test_tries_are_counted_for_one_and_for_many() -> None:
    tally = [3, 2, 0, 5, 0, 0, 0, 0, 0]  # of depth 3: 10 first tokens, of which 7 were right, ...
    assert Tries.of(tally, 3) == (10, 7, 7 + 5, 5 + 5)
    assert Tries.of(tally, 3).right == sum(n * brought for n, brought in enumerate(tally))
    many = Tries.each([tally, [4, 0, 0, 0, 0, 0, 0, 0, 0]], 3)
    assert [[*own] for own in zip(*many, strict=True)] == [[10, 7, 12, 10], [4, 0, 0, 0]]


@given(st.floats(0.01, 0.97), st.floats(0.05, 20))
def test_odds_change_chances_as_they_should(chance: float, odds: float) -> None:
    changed = Chances(chance, chance).at(odds).first
    assert changed / (1 - changed) == pytest.approx(odds * chance / (1 - chance))


# ------------------------------------------------------------------ in general
def test_what_drafts_bring_is_learned_and_forgotten() -> None:
    outcomes = Outcomes()
    for chance in (0.7, 0.2, 0.8):
        for seed in range(25):
            hear(outcomes, CHAIN, chance, 40, seed)
        assert outcomes.brings(CHAIN, 0) == pytest.approx(chance + chance**2, rel=0.15)


def test_what_is_thought_of_drafts_goes_back_to_what_is_usual_as_others_come() -> None:
    """Many good texts, then one kind that is bad: while nobody is asked about those who come, they may be good again."""
    outcomes = Outcomes()
    for seed in range(40):
        hear(outcomes, CHAIN, 0.7, 16, seed)
    good = outcomes.brings(CHAIN, 0)
    for seed in range(8):
        hear(outcomes, CHAIN, 0.05, 16, seed)
    bad = outcomes.brings(CHAIN, 0)
    assert bad < 0.6 * good
    outcomes.digest([], [CHAIN], 400)
    assert outcomes.brings(CHAIN, 0) == pytest.approx(bad, rel=0.1), "nobody came"
    for came in (8, 40):
        outcomes.came += came
        before = bad
        bad = outcomes.brings(CHAIN, 0)
        assert before < bad < good
    hear(outcomes, CHAIN, 0.05, 32)
    assert outcomes.brings(CHAIN, 0) < 0.7 * bad, "some drafts tell that they are not"


def test_less_sure_is_what_few_drafts_told() -> None:
    outcomes = Outcomes()
    hear(outcomes, CHAIN, 0.6, 4)
    unsure = outcomes.brings(CHAIN, 0) - outcomes.brings(CHAIN, 0, -2)
    hear(outcomes, CHAIN, 0.6, 400)
    likely, low, high = (outcomes.brings(CHAIN, 0, d) for d in (0, -2, 2))
    assert 0 < likely - low < unsure / 2 and high > likely


def test_what_was_tried_out_is_the_first_guess_and_no_more() -> None:
    outcomes = Outcomes()
    assert not outcomes.knows(CHAIN)
    outcomes.expect(Mode("eagle3", 4, 4), [40, 30, 20, 6, 4, 0, 0, 0, 0])
    outcomes.expect(TREE, [20, 25, 25, 10, 10, 10, 0, 0, 0])
    assert outcomes.knows(CHAIN) and outcomes.knows(TREE) and not outcomes.knows(NGRAM)
    first, later = 0.6 * HARDER, 44 / 94 * HARDER
    assert outcomes.brings(CHAIN, 0) == pytest.approx(first * (1 + later), rel=0.03)
    assert outcomes.brings(TREE, 0) > outcomes.brings(CHAIN, 0) > outcomes.brings(CHAIN, 3) > 0
    outcomes.expect(NGRAM, [1, 1, 0, 0, 0, 0, 0, 0, 0])
    assert not outcomes.knows(NGRAM), "two drafts tell nothing"
    again = Outcomes.recall(json.loads(json.dumps(outcomes.kept())))
    assert again.knows(TREE) and again.brings(TREE, 0) == pytest.approx(outcomes.brings(TREE, 0))
    hear(outcomes, CHAIN, 0.02, 40)
    assert outcomes.brings(CHAIN, 0) < 0.3 * again.brings(CHAIN, 0)


def test_one_long_text_does_not_make_forgotten_what_was_tried_out() -> None:
    """Whoever drafts for long is one for whom drafts pay."""
    outcomes = Outcomes()
    outcomes.expect(Mode("eagle3", 4, 4), [40, 30, 20, 6, 4, 0, 0, 0, 0])
    guest, first = Guest(0, True, outcomes.owns.sit()), outcomes.brings(CHAIN, 0)
    for _ in range(60):
        guest.log(0)[2] += 10
        outcomes.digest([guest], [CHAIN], 10)
    hearing = outcomes._records["eagle3", 0]
    assert hearing.usual.first <= SPEAKS and outcomes.brings(CHAIN, 0) < 1.7 * first


def test_what_trees_are_worth_beside_chains_is_tried_out() -> None:
    outcomes = Outcomes()
    outcomes.expect(Mode("eagle3", 4, 4), [60, 40, 0, 0, 0, 0, 0, 0, 0])
    outcomes.expect(TREE, [30, 70, 0, 0, 0, 0, 0, 0, 0])
    assert outcomes._width(TREE) == pytest.approx(2.36, rel=0.01)  # 1 - 0.6 ** 2.36 = 0.7
    assert outcomes._width(CHAIN) == 1
    again = Outcomes.recall(json.loads(json.dumps(outcomes.kept())))
    assert again._width(TREE) == outcomes._width(TREE)


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


def test_a_mode_that_brings_less_than_follows_for_it_is_believed_slowly() -> None:
    """Chains are as was thought, trees are not better than chains: that is the trees' own."""
    outcomes = Outcomes()
    for seed in range(60):
        hear(outcomes, CHAIN, 0.5, 16, seed)
        hear(outcomes, TREE, 0.5, 16, 100 + seed)
    factor = outcomes._factor(TREE)
    assert factor < 0.96 < outcomes._factor(CHAIN)
    outcomes.digest([], [], 2000)
    assert factor < outcomes._factor(TREE) < 1.0, "and forgotten"


def test_what_cannot_be_is_not_believed() -> None:
    outcomes = Outcomes()
    hear(outcomes, CHAIN, 0.5, 40)
    said = json.loads(json.dumps(outcomes.kept()))
    for chances in ([2.0, 0.5], [0.5, -1.0], [0.5], [0.1, 0.2, 0.3], ["high", 0.1]):
        said["chances"][0]["chances"] = chances
        with pytest.raises((ValueError, TypeError)):
            Outcomes.recall(said)


# ------------------------------------------------------------------ one by one
def company(outcomes: Outcomes, chances: list[float], steps: int, mode: Mode = CHAIN) -> list[Guest]:
    """Guests whose tokens are right so often, behind so many drafts."""
    guests, rng = [Guest(0, True, outcomes.owns.sit()) for _ in chances], random.Random(1)
    for _ in range(steps):
        for guest, chance in zip(guests, chances, strict=True):
            guest.logs[0] = drafts(mode, chance, 1, rng)
        outcomes.digest(guests, [mode], 1)
    return guests


def test_each_request_has_odds_of_its_own_as_far_as_that_held_before() -> None:
    outcomes = Outcomes()
    for _ in range(6):
        guests = company(outcomes, [0.9, 0.1, 0.9, 0.1], 32)
    good, bad, *_ = outcomes.foresee(guests, [CHAIN]).likely()[0]
    assert good > 2.5 * bad, "they went on as they had begun"
    new = Guest(0, True, outcomes.owns.sit())
    assert outcomes.foresee([new], [CHAIN]).likely()[0, 0] == pytest.approx(outcomes.brings(CHAIN, 0))
    alike = Outcomes()
    for _ in range(6):
        guests = company(alike, [0.5] * 4, 32)
    found = alike.foresee(guests, [CHAIN]).likely()[0]
    assert max(found) < 1.5 * min(found), "what sets them apart is luck, and was not believed"


def test_who_is_as_all_others_tells_nothing_about_how_far_requests_differ() -> None:
    """Nothing is thought of them when they are heard for the first time."""
    outcomes = Outcomes()
    for seed in range(1200):
        hear(outcomes, CHAIN, 0.5, 64, seed % 50)
    assert outcomes._trust["eagle3"].value() == 1.0


def test_many_guests_and_modes_are_foreseen_as_each_by_itself() -> None:
    outcomes = Outcomes()
    guests = company(outcomes, [0.8, 0.3, 0.5], 12)
    guests.append(Guest(3, True, outcomes.owns.sit()))
    modes = [NGRAM, CHAIN, TREE]
    together = outcomes.foresee(guests, modes)
    for k, mode in enumerate(modes):
        for i, guest in enumerate(guests):
            alone = outcomes.foresee([guest], [mode])
            for of in ("likely", "low", "hoped"):
                args = () if of == "likely" else (2.0,)
                both = getattr(together, of)(*args)[k, i], getattr(alone, of)(*args)[0, 0]
                assert both[0] == pytest.approx(both[1]), (mode, i, of)
    likely, low, hoped = together.likely(), together.low(2.0), together.hoped(2.0)
    assert (low <= likely + 1e-9).all() and (hoped[:, 3] > likely[:, 3]).all()
    assert (hoped <= np.array([[m.depth] for m in modes])).all()


def test_copies_are_given_up_sooner_than_other_drafts() -> None:
    """They end all at once."""
    odds = {}
    for name in ("ngram", "eagle3"):
        owns = Owns()
        seats = np.array([owns.sit()])
        for first, right in ((20.0, 20.0), (10.0, 0.0)):
            owns.add(name, seats, np.array([first]), (np.array([first]), np.array([first / 2]), np.array([right])))
        odds[name] = float(owns.odds([name], seats, np.array([[0.5]]))[0, 0])
    assert odds["ngram"] < 0.75 * odds["eagle3"]


def test_seats_are_given_again_and_there_are_always_more() -> None:
    owns = Owns()
    owns.rows(["eagle3"])
    seats = [owns.sit() for _ in range(2 * SEATS + 1)]
    assert len(set(seats)) == len(seats)
    one = np.array(seats[-1:])
    owns.add("ngram", one, np.array([9.0]), (np.array([9.0]), np.array([1.0]), np.array([9.0])))
    assert owns.odds(["ngram"], one, np.array([[0.2]]))[0, 0] > 5 and owns.drafts("ngram", one) == 9
    owns.rest(one, 5000)
    assert owns.odds(["ngram"], one, np.array([[0.2]]))[0, 0] == pytest.approx(1.0, abs=0.01)
    owns.leave(seats[-1])
    assert owns.sit() == seats[-1] and owns.drafts("ngram", one) == 0
