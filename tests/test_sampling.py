"""From logits to a token: every parameter against transformers' own processors, and the rule `argmax of log p + g`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from headstart import sampling
from headstart.core import Request, SamplingParams
from headstart.noise import gumbel, row_keys
from headstart.sampling import Row, choose, log_probabilities, logprobs, top_scores

V = 200


def request(prompt: list[int] | None = None, output: list[int] | None = None, seed: int = 1, **params: Any) -> Request:
    extra = {k: params.pop(k) for k in ("eos_ids", "bad_word_ids") if k in params}
    prompt = prompt or [1, 2, 3]
    return Request(prompt, SamplingParams(**params), seed, tokens=[*prompt, *(output or [])], **extra)


def logits(rows: int, size: int = V, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Float64 without ties, so that a comparison can be sharp."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, size)) * scale)


def by_transformers(x: torch.Tensor, ids: list[int], processors: list[Any]) -> torch.Tensor:
    """log p of one row (V,) after a list of transformers' processors."""
    scores = x[None].clone()
    for processor in processors:
        scores = processor(torch.tensor([ids]), scores)
    return scores[0].log_softmax(-1)


def same_law(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> bool:
    return bool(torch.equal(a.isfinite(), b.isfinite()) and float((a.exp() - b.exp()).abs().max()) <= tolerance)


# ------------------------------------------------------------------ one parameter at a time
TOKENS = [1, 2, 3, 7, 7, 9]  # prompt of three, then output


def no_bad_words(words: list[list[int]]) -> Any:
    return hf.NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([V - 1]))


CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "nothing": ({}, []),
    "temperature 0.3": ({"temperature": 0.3}, [hf.TemperatureLogitsWarper(0.3)]),
    "temperature 7": ({"temperature": 7.0}, [hf.TemperatureLogitsWarper(7.0)]),
    "top_k 1": ({"top_k": 1}, [hf.TopKLogitsWarper(1)]),
    "top_k 17": ({"top_k": 17}, [hf.TopKLogitsWarper(17)]),
    "top_k over the vocabulary": ({"top_k": 5000}, [hf.TopKLogitsWarper(5000)]),
    "top_k -1": ({"top_k": -1}, []),
    "top_p 0.9": ({"top_p": 0.9}, [hf.TopPLogitsWarper(0.9)]),
    "top_p 0.3": ({"top_p": 0.3}, [hf.TopPLogitsWarper(0.3)]),
    "top_p tiny": ({"top_p": 1e-9}, [hf.TopPLogitsWarper(1e-9)]),
    "min_p 0.1": ({"min_p": 0.1}, [hf.MinPLogitsWarper(0.1)]),
    "min_p 1": ({"min_p": 1.0}, [hf.MinPLogitsWarper(1.0)]),
    "typical_p 0.8": ({"typical_p": 0.8}, [hf.TypicalLogitsWarper(0.8)]),
    "typical_p 0.2": ({"typical_p": 0.2}, [hf.TypicalLogitsWarper(0.2)]),
    "repetition 1.3": ({"repetition_penalty": 1.3}, [hf.RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition 0.7": ({"repetition_penalty": 0.7}, [hf.RepetitionPenaltyLogitsProcessor(0.7)]),
    "bad word of one token": ({"bad_word_ids": ((40,), (41,))}, [no_bad_words([[40], [41]])]),
    "bad word of two tokens": ({"bad_word_ids": ((9, 40),)}, [no_bad_words([[9, 40]])]),
    "bad word of three tokens": ({"bad_word_ids": ((7, 9, 40),)}, [no_bad_words([[7, 9, 40]])]),
    "bad words that do not apply": ({"bad_word_ids": ((8, 40), (9, 9, 41))}, [no_bad_words([[8, 40], [9, 9, 41]])]),
    "min_tokens not reached": (
        {"min_tokens": 4, "eos_ids": frozenset([5, 6])},
        [hf.MinNewTokensLengthLogitsProcessor(3, 4, [5, 6])],
    ),
    "min_tokens reached": (
        {"min_tokens": 3, "eos_ids": frozenset([5, 6])},
        [hf.MinNewTokensLengthLogitsProcessor(3, 3, [5, 6])],
    ),
    "top_k and top_p": ({"top_k": 30, "top_p": 0.8}, [hf.TopKLogitsWarper(30), hf.TopPLogitsWarper(0.8)]),
    "top_p and min_p": ({"top_p": 0.95, "min_p": 0.05}, [hf.TopPLogitsWarper(0.95), hf.MinPLogitsWarper(0.05)]),
    "all of them": (
        {
            "repetition_penalty": 1.2,
            "bad_word_ids": ((9, 40), (41,)),
            "min_tokens": 10,
            "eos_ids": frozenset([5, 6]),
            "temperature": 0.9,
            "top_k": 60,
            "top_p": 0.95,
            "min_p": 0.01,
            "typical_p": 0.9,
        },
        [
            hf.RepetitionPenaltyLogitsProcessor(1.2),
            no_bad_words([[9, 40], [41]]),
            hf.MinNewTokensLengthLogitsProcessor(3, 10, [5, 6]),
            hf.TemperatureLogitsWarper(0.9),
            hf.TopKLogitsWarper(60),
            hf.TopPLogitsWarper(0.95),
            hf.MinPLogitsWarper(0.01),
            hf.TypicalLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution_is_that_of_transformers(name: str):
    params, processors = CASES[name]
    x = logits(8, seed=len(name))
    rows = [Row(request(TOKENS[:3], TOKENS[3:], **params)) for _ in range(8)]
    ours = log_probabilities(x, rows)
    for i in range(8):
        assert same_law(ours[i], by_transformers(x[i], TOKENS, processors)), f"row {i}"


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_the_path_count_like_tokens_of_the_text(name: str):
    """A row deep in a draft sees what stands before it in the draft: same law as if it had been committed."""
    params, processors = CASES[name]
    x = logits(4, seed=len(name) + 1)
    for split in range(3, len(TOKENS) + 1):
        rows = [Row(request(TOKENS[:3], TOKENS[3:split], **params), TOKENS[split:]) for _ in range(4)]
        ours = log_probabilities(x, rows)
        for i in range(4):
            assert same_law(ours[i], by_transformers(x[i], TOKENS, processors))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, -1, 1, 5, 40, 300]),
    top_p=st.sampled_from([1.0, 0.99, 0.6, 0.1]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    typical_p=st.sampled_from([1.0, 0.95, 0.5]),
    repetition=st.sampled_from([1.0, 1.1, 2.0]),
)
def test_any_combination_is_that_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float, repetition: float
):
    x = logits(1, seed=seed)
    row = Row(
        request(
            TOKENS[:3],
            TOKENS[3:],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition,
        )
    )
    chain: list[Any] = [hf.RepetitionPenaltyLogitsProcessor(repetition)] if repetition != 1 else []
    chain.append(hf.TemperatureLogitsWarper(temperature))
    chain += [hf.TopKLogitsWarper(top_k)] if top_k > 0 else []
    chain += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [hf.MinPLogitsWarper(min_p)] if min_p > 0 else []
    chain += [hf.TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
    assert same_law(log_probabilities(x, [row])[0], by_transformers(x[0], TOKENS, chain))


# ------------------------------------------------------------------ what transformers does not have
def test_presence_and_frequency_follow_the_formula_of_openai():
    """logit - count * frequency - (count > 0) * presence, over output tokens only."""
    x = logits(1, size=20)
    row = Row(request([4, 4, 5], [6, 6, 7], presence_penalty=0.5, frequency_penalty=0.3), [6, 8])
    expected = x[0].clone()
    for token, count in {6: 3, 7: 1, 8: 1}.items():
        expected[token] -= count * 0.3 + 0.5
    assert same_law(log_probabilities(x, [row])[0], expected.log_softmax(-1))


def test_negative_presence_raises_what_was_said():
    x = logits(1, size=20)
    row = Row(request([4], [6], presence_penalty=-1.0))
    expected = x[0].clone()
    expected[6] += 1.0
    assert same_law(log_probabilities(x, [row])[0], expected.log_softmax(-1))


def test_without_output_presence_changes_nothing():
    x = logits(1, size=20)
    row = Row(request([4, 5], presence_penalty=2.0, frequency_penalty=2.0))
    assert same_law(log_probabilities(x, [row])[0], x[0].log_softmax(-1))


def test_bias_is_added_before_the_penalties():
    x = logits(1, size=20)
    row = Row(request([3, 5], logit_bias={3: 4.0, 9: -100.0}, repetition_penalty=1.5))
    biased = x[0].clone()
    biased[3] += 4.0
    biased[9] -= 100.0
    assert same_law(
        log_probabilities(x, [row])[0], by_transformers(biased, [3, 5], [hf.RepetitionPenaltyLogitsProcessor(1.5)])
    )


def test_min_tokens_bans_every_token_that_ends_the_text():
    x = logits(1)
    own = request([1], min_tokens=2, stop_token_ids=[11, 12, 5000], eos_ids=frozenset([5, 6]))
    for path, banned in (([], True), ([3], True), ([3, 4], False)):
        logp = log_probabilities(x, [Row(own, path)])[0]
        assert [bool(logp[t] == -math.inf) for t in (5, 6, 11, 12, 13)] == [banned] * 4 + [False]
    careless = request([1], min_tokens=2, stop_token_ids=[11], eos_ids=frozenset([5, 6]), ignore_eos=True)
    logp = log_probabilities(x, [Row(careless)])[0]
    assert [bool(logp[t] == -math.inf) for t in (5, 6, 11)] == [False, False, True]


def test_a_bad_word_is_stopped_at_its_last_token_only():
    """The word 20 21 22 begins in the text and goes on in the draft."""
    x = logits(1)
    own = request([20, 21], [20, 21], bad_word_ids=((20, 21, 22),))
    assert log_probabilities(x, [Row(own)])[0][22] == -math.inf
    assert log_probabilities(x, [Row(request([1], [20], bad_word_ids=((20, 21, 22),)), [21])])[0][22] == -math.inf
    assert log_probabilities(x, [Row(request([1], [20], bad_word_ids=((20, 21, 22),)), [])])[0][22] > -math.inf
    assert log_probabilities(x, [Row(own, [21])])[0][22] > -math.inf


def test_adjusting_leaves_the_given_logits_alone():
    x = logits(2).float()
    kept = x.clone()
    sampling.adjust(x, [Row(request(logit_bias={3: 5.0})), Row(request(repetition_penalty=2.0))])
    choose(x, [Row(request(logit_bias={3: 5.0})), Row(request(temperature=0.0, presence_penalty=1.0))])
    assert torch.equal(x, kept)


# ------------------------------------------------------------------ the choice
def naive(x: torch.Tensor, row: Row) -> tuple[int, float]:
    """argmax of log p + g in float64, and by how much it leads."""
    logp = log_probabilities(x[None].double(), [row])[0]
    if row.request.params.greedy:
        best = x.double().topk(2).values
        return int(logp.argmax()), float(best[0] - best[1])
    keys = torch.tensor(row_keys([row.request.seed], [row.position]))
    scores = logp + gumbel(keys, torch.arange(len(x)))[0].double()
    best = scores.topk(min(2, len(x))).values
    return int(scores.argmax()), float(best[0] - best[1])


MENU: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 1.4, "min_p": 0.05},
    {"top_k": 5},
    {"top_k": 150, "temperature": 1.3},
    {"top_p": 0.9},
    {"top_p": 0.2, "top_k": 50},
    {"typical_p": 0.6},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "top_k": 100},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {4: 3.0}, "min_tokens": 9, "eos_ids": frozenset([8])},
    {"bad_word_ids": ((7, 9),), "top_k": 20},
]


def menu_rows(count: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        params = MENU[int(rng.integers(len(MENU)))]
        output = rng.integers(0, V, int(rng.integers(0, 5))).tolist()
        path = rng.integers(0, V, int(rng.integers(0, 4))).tolist()
        out.append(Row(request(TOKENS[:3], output, seed=1000 * seed + i, **params), path))
    return out


@pytest.mark.parametrize("seed", range(12))
def test_choose_is_the_argmax_of_log_p_plus_noise(seed: int):
    rows = menu_rows(24, seed)
    x = logits(24, seed=seed).float()
    chosen = choose(x, rows)
    compared = 0
    for i, row in enumerate(rows):
        token, margin = naive(x[i], row)
        if margin > 1e-4:  # float32 may turn a nearer tie
            assert chosen[i] == token, (i, row.request.params)
            compared += 1
    assert compared >= 22


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32), st.floats(0.05, 5), st.floats(0, 20), st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.3]),
    st.booleans(),
)  # fmt: skip
def test_noise_for_some_tokens_chooses_as_noise_for_all_does(
    seed: int, temperature: float, scale: float, banned: float, min_p: float, ties: bool
):
    """To the last bit, whatever the row looks like: flat or steep, with equal values, with tokens that are out."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 5000)) * scale
    x = torch.from_numpy(np.round(x) if ties else x).float()
    x[torch.from_numpy(rng.random(x.shape) < 0.99 * banned)] = -torch.inf
    rows = [Row(request(seed=seed + i, temperature=temperature, min_p=min_p)) for i in range(3)]
    scaled = x / temperature
    if min_p:
        floor = scaled.amax(-1, keepdim=True) + math.log(min_p)
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    keys = torch.tensor(row_keys([r.request.seed for r in rows], [r.position for r in rows]))
    assert choose(x, rows) == (scaled + gumbel(keys, torch.arange(5000))).argmax(-1).tolist()


def test_a_row_that_is_no_number_chooses_the_first_such():
    x = logits(1, 500).float()
    x[0, 77:80] = torch.nan
    assert choose(x, [Row(request(temperature=0.7))]) == [77]


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_does_not_depend_on_the_rows_around_it(seed: int):
    rows = menu_rows(20, seed + 50)
    x = logits(20, seed=seed + 50).float()
    together = choose(x, rows)
    alone = [choose(x[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = np.random.default_rng(seed).permutation(20)
    shuffled = choose(x[torch.from_numpy(order)], [rows[i] for i in order])
    assert together == alone
    assert [together[i] for i in order] == shuffled


def coarse(rows: int, size: int, seed: int) -> torch.Tensor:
    """Logits as a 16-bit model gives them: many are equal."""
    return logits(rows, size, seed).bfloat16().float()


@pytest.mark.parametrize("partner", [{"typical_p": 0.9}, {"top_k": 1500}, {"top_p": 0.999, "temperature": 5.0}])
@pytest.mark.parametrize("params", [{"top_k": 7}, {"top_k": 40}, {"top_p": 0.5}, {"top_p": 0.9}])
def test_equal_logits_do_not_let_a_neighbour_in(params: dict[str, Any], partner: dict[str, Any]):
    """Another row may force the whole sort; which of several equal tokens is kept must not change with that."""
    x = coarse(120, 2000, seed=5)
    rows = [Row(request(seed=i, **params)) for i in range(120)]
    alone = choose(x, rows)
    beside = choose(torch.cat([x, coarse(1, 2000, 6)]), [*rows, Row(request(**partner))])[:-1]
    assert alone == beside


def test_greedy_and_sampled_rows_share_a_call():
    x = logits(6).float()
    rows = [Row(request(temperature=0.0 if i % 2 else 1.0, seed=i)) for i in range(6)]
    chosen = choose(x, rows)
    for i in (1, 3, 5):
        assert chosen[i] == int(x[i].argmax())
    assert any(chosen[i] != int(x[i].argmax()) for i in (0, 2, 4))


def test_greedy_takes_the_first_of_equal_logits():
    x = torch.zeros(2, 10)
    x[:, [4, 7]] = 1.0
    greedy = Row(request(temperature=0.0))
    assert choose(x, [greedy, greedy]) == [4, 4]
    assert choose(x.bfloat16(), [greedy, greedy]) == [4, 4]


def test_the_noise_belongs_to_seed_and_position():
    x = torch.zeros(1, V)
    base = choose(x, [Row(request(seed=5))])
    assert choose(x, [Row(request(seed=5))]) == base
    assert choose(x, [Row(request([9, 9], [9], seed=5))]) == base  # same position, other tokens
    assert choose(x, [Row(request([1, 2], seed=5), [3])]) == base  # same position, on a path
    assert choose(x, [Row(request(seed=6))]) != base
    assert choose(x, [Row(request([1, 2], seed=5))]) != base


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"typical_p": 0.7}])
def test_choices_have_the_frequencies_of_p(params: dict[str, Any]):
    x = logits(1, size=6, scale=1.0)
    own = request(**params)
    p = log_probabilities(x, [Row(own)])[0].exp().numpy()
    count = 4000
    rows = [Row(Request([0], own.params, seed)) for seed in range(count)]
    seen = np.bincount(choose(x.float().expand(count, -1), rows), minlength=6)
    assert np.all(np.abs(seen - count * p) <= 5 * np.sqrt(count * p * (1 - p)))


def test_half_precision_logits_are_widened():
    x = logits(3).bfloat16()
    rows = [Row(request(seed=i)) for i in range(3)]
    assert choose(x, rows) == choose(x.float(), rows)
    assert log_probabilities(x, rows).dtype == torch.float64


# ------------------------------------------------------------------ the short list
@pytest.mark.parametrize(
    "params", [{"top_k": 4}, {"top_k": 8}, {"top_p": 0.3}, {"top_p": 0.95}, {"top_k": 6, "top_p": 0.8}]
)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_short_list_keeps_the_same_tokens_as_the_whole_sort(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], steps: int
):
    """Also where many logits are equal (rounded to `steps` parts of one), inside the list and across its end."""
    x = logits(40, seed=3)
    x = (x * steps).round() / steps if steps else x
    rows = [Row(request(seed=i, **params)) for i in range(40)]
    monkeypatch.setattr(sampling, "SHORTLIST", V)
    whole, tokens = log_probabilities(x, rows), choose(x, rows)
    monkeypatch.setattr(sampling, "SHORTLIST", 8)
    assert choose(x, rows) == tokens
    short = log_probabilities(x, rows)
    for i in range(40):
        assert same_law(short[i], whole[i])


def test_a_nucleus_that_the_short_list_does_not_hold_takes_the_whole_sort(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampling, "SHORTLIST", 8)
    sizes = []
    plain = sampling._sorted
    monkeypatch.setattr(sampling, "_sorted", lambda x, k: sizes.append(k) or plain(x, k))
    flat = torch.zeros(1, V, dtype=torch.float64) + torch.linspace(0, 0.1, V)
    kept = log_probabilities(flat, [Row(request(top_p=0.9))])[0].isfinite().sum()
    assert sizes == [8, V]
    assert int(kept) == pytest.approx(0.9 * V, abs=8)
    sizes.clear()
    log_probabilities(logits(1, scale=20.0), [Row(request(top_p=0.9))])
    assert sizes == [8]


def test_a_top_k_beyond_the_short_list_is_honoured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampling, "SHORTLIST", 8)
    kept = log_probabilities(logits(1), [Row(request(top_k=50))])[0].isfinite()
    assert int(kept.sum()) == 50


# ------------------------------------------------------------------ greedy law, logprobs, scores for drafters
def test_a_greedy_row_has_all_its_mass_on_its_choice():
    x = logits(2)
    rows = [Row(request(temperature=0.0)), Row(request(temperature=0.0, logit_bias={17: 100.0}))]
    logp = log_probabilities(x, rows)
    assert logp.exp().sum(-1).tolist() == [1.0, 1.0]
    assert [int(i) for i in logp.argmax(-1)] == [int(x[0].argmax()), 17] == choose(x, rows)


def test_logprobs_are_log_softmax_of_the_raw_logits():
    x = logits(3).float()
    expected = x.log_softmax(-1)
    out = logprobs(x, [5, 6, int(x[2].argmax())], 4)
    for i, (entry, token) in enumerate(zip(out, [5, 6, int(x[2].argmax())], strict=True)):
        best = expected[i].topk(4)
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(expected[i, token]), abs=1e-6)
        assert list(entry.top) == best.indices.tolist()  # likeliest first
        assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-6)


def test_logprobs_of_none_or_of_more_than_there_are():
    x = logits(1, size=5)
    assert logprobs(x, [2], 0)[0].top == {}
    top = logprobs(x, [2], 50)[0].top
    assert sorted(top) == [0, 1, 2, 3, 4]
    assert sum(math.exp(v) for v in top.values()) == pytest.approx(1.0, abs=1e-5)


def test_scores_of_a_greedy_row_rank_by_log_q():
    x = logits(2)
    rows = [Row(request(temperature=0.0)), Row(request(temperature=0.0, logit_bias={3: 50.0}))]
    tokens, confidence, logq = top_scores(x, rows, 5)
    assert tokens[0].tolist() == x[0].topk(5).indices.tolist()
    assert tokens[1, 0] == 3
    assert confidence[0].tolist() == pytest.approx(x[0].softmax(-1).topk(5).values.tolist(), abs=1e-9)
    assert same_law(logq[0], x[0].log_softmax(-1))


def test_scores_of_a_sampled_row_rank_by_log_q_plus_the_targets_noise():
    """A drafter that shares p with the target proposes the target's own choice first."""
    rows = [Row(request(seed=i, top_k=20, temperature=0.8)) for i in range(30)]
    x = logits(30)
    tokens, confidence, logq = top_scores(x, rows, 6)
    assert tokens[:, 0].tolist() == choose(x, rows)
    keys = torch.tensor(row_keys(list(range(30)), [3] * 30))
    scores = logq + gumbel(keys, torch.arange(V))
    assert tokens.tolist() == scores.topk(6).indices.tolist()
    assert torch.all(confidence[:, :-1] >= confidence[:, 1:])
    assert confidence.double() == pytest.approx(scores.softmax(-1).topk(6).values.double(), abs=1e-6)
    assert torch.equal(logq, log_probabilities(x, rows))


def test_scores_see_the_path_and_stay_inside_the_vocabulary():
    x = logits(1, size=4)
    tokens, confidence, _ = top_scores(x, [Row(request([0], temperature=0.0, presence_penalty=2.0), [1])], 9)
    adjusted = x[0].clone()
    adjusted[1] -= 2.0
    assert tokens[0].tolist() == adjusted.sort(descending=True).indices.tolist()
    assert float(confidence.sum()) == pytest.approx(1.0, abs=1e-9)


def test_drawn_children_follow_q_without_replacement():
    """What a drafter hands to rejection: the first two by log q + g are two successive draws from q."""
    x = torch.tensor([[0.6, 0.25, 0.1, 0.05]], dtype=torch.float64).log()
    count = 6000
    rows = [Row(Request([0], SamplingParams(), seed)) for seed in range(count)]
    tokens, _, logq = top_scores(x.expand(count, -1), rows, 2)
    q = logq[0].exp().numpy()
    seen = np.bincount((tokens[:, 0] * 4 + tokens[:, 1]).numpy(), minlength=16).reshape(4, 4)
    expected = q[:, None] * q[None, :] / (1 - q[:, None]) * (1 - np.eye(4))
    assert np.all(np.abs(seen - count * expected) < 5 * np.sqrt(count * expected) + 1e-9)
