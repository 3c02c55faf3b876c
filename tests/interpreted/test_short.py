"""top-k, top-p and min-p on the device: the host's choice, or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstart import sampling
from headstart.core import Choice, Request, SamplingParams
from headstart.models.kernels import choose

CPU = torch.device("cpu")
KINDS = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_p": 0.9, "temperature": 0.5},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.0, "top_k": 3},
    {"top_k": 2**32 + 1},
]


def asks_of(choice: Choice, positions: np.ndarray) -> choose.Asks:
    def on(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    seeds, top_k = choice.seeds.T.astype(np.uint32).view(np.int32), choice.top_k.astype(np.int32)
    return choose.Asks(*map(on, (choice.temperature, seeds, positions, top_k, choice.top_p, choice.min_p)))


def run(
    logits: torch.Tensor, requests: list[Request], lenient: bool = False, rows: list[int] | None = None
) -> list[int]:
    choice = Choice.of(len(requests), len(requests))
    for i, r in enumerate(requests):
        sampling.ask(choice, [(r, i, 1)])
    positions = np.array([len(r.tokens) - 1 for r in requests], np.int32)
    if rows is not None:  # line i belongs to row rows[i]
        named = [getattr(choice, name) for name in ("temperature", "seeds", "top_k", "top_p", "min_p")]
        for values in (*named, positions):
            values[rows] = values.copy()
    desk = choose.Desk(len(requests), logits.shape[1], CPU)
    chosen = torch.full((len(requests),), -7, dtype=torch.int32)
    where = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    asks = asks_of(choice, positions)
    choose.choose(logits, asks, chosen, desk, where)
    choose.choose_short(logits, asks, chosen, desk, where, lenient)
    assert not desk.arrived.any()
    return chosen.tolist() if rows is None else chosen[rows].tolist()


def requests_for(kinds: list[dict], seed: int = 0) -> list[Request]:
    return [Request([1, 2], SamplingParams(**({"temperature": 1.0} | k)), seed=seed + i) for i, k in enumerate(kinds)]


@pytest.mark.parametrize("vocab", [50, 700])
@pytest.mark.parametrize("rows", [None, [3, 0, 6, 1, 5, 2, 4]])
def test_the_device_chooses_what_the_host_chooses(vocab: int, rows: list[int] | None, monkeypatch) -> None:
    monkeypatch.setattr(choose, "SHORTLIST", 128)
    for trial in range(4):
        logits = 3 * torch.randn(len(KINDS), vocab, generator=torch.Generator().manual_seed(trial))
        asked = requests_for(KINDS, 10 * trial)
        expected = sampling.choose(logits, [sampling.Row(r) for r in asked])
        for got, want in zip(run(logits, asked, rows=rows), expected, strict=True):
            assert got in (want, -1)
            assert got == want or vocab > 128


def test_where_the_list_is_too_short_the_host_decides(monkeypatch) -> None:
    """A flat row keeps more than the list holds; a peaked one does not."""
    monkeypatch.setattr(choose, "SHORTLIST", 64)
    flat, peaked = torch.zeros(1, 500), torch.zeros(1, 500)
    peaked[0, 7] = 20.0
    asked = requests_for([{"top_p": 0.5}, {"top_p": 0.5}])
    assert run(torch.cat([flat, peaked]), asked) == [-1, 7]
    assert run(torch.cat([flat, peaked]), asked, lenient=True)[0] >= 0


def test_equal_values_at_the_end_of_the_list_are_not_decided_here(monkeypatch) -> None:
    monkeypatch.setattr(choose, "SHORTLIST", 16)
    logits = torch.zeros(1, 100)
    logits[0, :10] = 5.0
    assert run(logits, requests_for([{"top_k": 10}]))[0] in range(10)
    assert run(logits, requests_for([{"top_k": 12}])) == [-1]


def test_of_equal_values_the_lower_token_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(choose, "SHORTLIST", 32)
    logits = torch.full((1, 60), -9.0)
    logits[0, [50, 3, 20]] = 4.0
    for seed in range(12):
        assert run(logits, requests_for([{"top_k": 2}], seed))[0] in (3, 20)


def test_a_walk_that_meets_an_open_question_leaves_it_to_the_host() -> None:
    def walked(chosen: list[int]) -> list[int]:
        verdict = torch.full((1, 6), -7, dtype=torch.int32)
        one = torch.zeros(1, dtype=torch.int32)
        tokens, parent = torch.tensor([9, 4, 5, 6]).int(), torch.tensor([0, 0, 1, 2]).int()
        choose.walk(torch.tensor(chosen).int(), tokens, parent, one, one + 3, verdict, 4)
        return verdict[0].tolist()

    assert walked([4, 5, 8, -1])[:4] == [2, 8, 0, 1]  # the open row is not reached
    assert walked([4, -1, 8, 2])[0] == -1
    assert walked([-1, 5, 6, 2])[0] == -1


def test_top_p_of_what_a_large_top_k_leaves_is_not_decided_here(monkeypatch) -> None:
    """top-p divides the mass of the first k tokens; a shorter list does not hold it."""
    monkeypatch.setattr(choose, "SHORTLIST", 64)
    logits = 3 * torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    assert run(logits, requests_for([{"top_k": 400, "top_p": 0.2}] * 6)) == [-1] * 6
