"""Products of a few rows by a team of threads: the right numbers, any number of threads, nothing left running."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests import tiny

team = pytest.importorskip("headstart.models.team", reason="numba is not installed")


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(("outputs", "inputs"), [(4, 8), (7, 33), (64, 16), (101, 48)])
def test_products_are_right(threads: int, outputs: int, inputs: int) -> None:
    t = team.Team(threads)
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs)
    for rows in range(1, 9):
        x = torch.randn(rows, 2 * inputs)[:, ::2]  # not in one piece
        with t.at_work():
            for _ in range(3):
                torch.testing.assert_close(t.product(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-4)


def test_helpers_sleep_between_forwards_and_end_with_their_team() -> None:
    before = set(threading.enumerate())
    t = team.Team(3)
    x, weight = torch.randn(2, 8), torch.randn(16, 8)
    for _ in range(50):  # the helpers may still be at the last forward when the next one begins
        with t.at_work():
            torch.testing.assert_close(t.product(x, weight), x @ weight.t())
    helpers = [thread for thread in threading.enumerate() if thread not in before]
    assert len(helpers) == 2
    del t
    gc.collect()
    for thread in helpers:
        thread.join(5)
        assert not thread.is_alive()


def test_an_error_in_a_forward_lets_the_helpers_go() -> None:
    t = team.Team(2)
    with pytest.raises(ZeroDivisionError), t.at_work():
        raise ZeroDivisionError
    assert t._board[team.STOP] == 1
    with t.at_work():
        assert torch.equal(t.product(torch.ones(2, 4), torch.ones(4, 4)), torch.full((2, 4), 4.0))


def test_a_model_takes_it_for_a_few_rows_and_says_the_same() -> None:
    from headstart.models.runners import make_runner
    from tests.harness import engine, request, run

    spec = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    prompts = tiny.prompts(3)
    runner = make_runner(tiny.model())
    texts = run(engine(runner, spec), [request(p) for p in prompts])
    assert runner.lean._team is not None
    assert texts == [run(engine(tiny.model()), [request(p)])[0] for p in prompts]


@pytest.mark.parametrize(("seconds", "most"), [([1.0, 2.0], 8), ([2.0, 1.0], 4)])
def test_weights_are_read_twice_only_where_that_is_faster_than_torch(
    seconds: list[float], most: int, monkeypatch
) -> None:
    from headstart.models import looped
    from headstart.models.runners import make_runner

    def race(ways, products, tries):
        for way in ways:
            way(products)
        return seconds

    monkeypatch.setattr(looped, "race", race)
    assert make_runner(tiny.model()).lean._team.most_rows == most
