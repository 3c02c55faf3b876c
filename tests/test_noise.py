"""Noise is a pure function of (seed, position, token), and looks like independent uniform numbers from every side."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstart.noise import MASK, Chance, _mix, ceiling, derive_seed, fraction, gumbel, one, row_keys, threefry

KNOWN = [[1.4406, -0.1938, -0.5489], [0.1571, -0.5457, -0.3188], [-0.1635, -0.1818, -0.8937]]


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return torch.tensor(row_keys(seeds, positions), dtype=torch.int64)


def uniform(seeds: list[int], positions: list[int], size: int) -> np.ndarray:
    """(R, V) fractions."""
    return fraction(keys_of(seeds, positions), torch.arange(size)).numpy()


# ------------------------------------------------------------------ a pure function
def by_hand(seed: int, position: int, token: int) -> float:
    """The same number with Python's integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD & MASK
        x = (x ^ x >> 15) * 0x735A2D97 & MASK
        return x ^ x >> 15

    a, b = row_keys([seed], [position])[0]
    high = mix(mix(token ^ a) ^ b)
    low = mix(high ^ a ^ 0x5BD1E995)
    return -math.log(-math.log1p(-(high * 2**33 + 2 * low + 1) / 2**65))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.integers(0, 2**31 - 1))
def test_the_arithmetic_is_exact(seed: int, position: int, token: int):
    """No product leaves a signed 64-bit word: tensors and unbounded integers agree."""
    g = float(gumbel(keys_of([seed], [position]), torch.tensor([token])))
    assert g == pytest.approx(by_hand(seed, position, token), abs=1e-5)
    assert g == pytest.approx(one(row_keys([seed], [position])[0], token), abs=1e-5)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_noise_stays_below_its_ceiling_and_large_noise_comes_near(seed: int, position: int):
    noise = gumbel(keys_of([seed], [position]), torch.arange(3000))[0].numpy()
    most = ceiling(row_keys([seed], [position])[0], 3000)
    assert most.dtype == np.float32 and (noise <= most + 1e-4).all()
    large = noise > 3
    assert large.any() and (most[large] - noise[large] < 0.1).all()


# key, counter and what comes out: the known answers that come with Random123, the authors' own library
THREEFRY = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "known"), THREEFRY)
def test_threefry_is_threefry(key: tuple[int, int], counter: tuple[int, int], known: tuple[int, int]):
    assert threefry(*key, *counter) == known
    (seed, position), many = (x[0] | x[1] << 32 for x in (key, counter)), 20
    assert row_keys([seed] * many, [position] * many) == [known] * many, "in arrays too"


def test_known_values():
    """The numbers themselves are a promise: a seed means the same text in the next release."""
    values = gumbel(keys_of([0, 7, 2**63], [0, 5, 12_345]), torch.tensor([0, 1, 49_151]))
    assert values.dtype == torch.float32
    assert values.numpy() == pytest.approx(np.array(KNOWN), abs=1e-4)


@given(
    seeds=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=20),
    data=st.data(),
)
def test_rows_and_layouts_do_not_matter(seeds: list[int], tokens: list[int], data: st.DataObject):
    positions = data.draw(st.lists(st.integers(0, 2**40), min_size=len(seeds), max_size=len(seeds)))
    ids = torch.tensor(tokens)
    together = gumbel(keys_of(seeds, positions), ids)
    own_columns = gumbel(keys_of(seeds, positions), ids.expand(len(seeds), -1))
    assert torch.equal(together, own_columns)
    for r, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert torch.equal(together[r], gumbel(keys_of([seed], [position]), ids)[0])
        for c, token in enumerate(tokens):
            alone = gumbel(keys_of([seed], [position]), torch.tensor([token]))
            assert torch.equal(alone[0, 0], together[r, c])


def test_each_row_may_name_its_own_tokens():
    keys = keys_of([3, 4], [10, 11])
    ids = torch.tensor([[5, 1, 9], [2, 2, 0]])
    whole = gumbel(keys, torch.arange(10))
    assert torch.equal(gumbel(keys, ids), whole.gather(1, ids))


def test_negative_seeds_and_those_beyond_64_bits_wrap():
    assert row_keys([-1], [3]) == row_keys([2**64 - 1], [3])
    assert row_keys([2**64 + 5], [3]) == row_keys([5], [3])


def test_seed_and_position_are_not_interchangeable():
    assert row_keys([1], [2]) != row_keys([2], [1])


# ------------------------------------------------------------------ uniform
def chi_square(values: np.ndarray, bins: int) -> float:
    """Deviations of the bin counts, in standard deviations of the chi-square law."""
    counts = np.bincount((values.ravel() * bins).astype(int), minlength=bins)
    expected = values.size / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("bins", [2, 10, 256, 4096])
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda: uniform([17], [3], 500_000), id="over tokens"),
        pytest.param(lambda: uniform([17] * 100_000, list(range(100_000)), 5), id="over positions"),
        pytest.param(lambda: uniform(list(range(100_000)), [8] * 100_000, 5), id="over seeds"),
    ],
)
def test_fractions_are_uniform(values, bins: int):
    assert abs(chi_square(values(), bins)) < 5


def test_distance_to_the_uniform_law_is_that_of_a_sample():
    """Kolmogorov-Smirnov: sqrt(n) D stays below 1.95 with probability 0.999."""
    for values in (uniform([1], [1], 200_000)[0], uniform([2] * 200_000, list(range(200_000)), 1)[:, 0]):
        ordered, n = np.sort(values), len(values)
        steps = np.arange(1, n + 1) / n
        gap = max(np.abs(steps - ordered).max(), np.abs(ordered - (steps - 1 / n)).max())
        assert math.sqrt(n) * gap < 1.95


def test_the_low_word_is_uniform_too():
    """The bits below 2^-32 decide between near ties."""
    values = uniform([5], [5], 200_000)[0]
    low = values * 2.0**32 % 1.0
    assert abs(chi_square(low, 64)) < 5


def test_gumbel_has_the_moments_of_its_law():
    g = gumbel(keys_of([9], [9]), torch.arange(1_000_000)).double()
    assert float(g.mean()) == pytest.approx(0.5772156649, abs=5 * math.pi / math.sqrt(6) / 1000)
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, rel=0.01)


# ------------------------------------------------------------------ independent
def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of what independent numbers show."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * math.sqrt(a.size))


@pytest.mark.parametrize("step", [1, 2, 16, 1024, 2**16, 2**31])
def test_neighbouring_seeds_are_independent(step: int):
    rows = 300
    a = uniform(list(range(rows)), [4] * rows, 300)
    b = uniform([s + step for s in range(rows)], [4] * rows, 300)
    assert abs(correlation(a, b)) < 4.5


@pytest.mark.parametrize("step", [1, 2, 3, 16, 64])
def test_neighbouring_positions_are_independent(step: int):
    u = uniform([11] * 600, list(range(600)), 300)
    assert abs(correlation(u[:-step], u[step:])) < 4.5


@pytest.mark.parametrize("step", [1, 2, 3, 16, 256, 2**15])
def test_neighbouring_tokens_are_independent(step: int):
    u = uniform(list(range(20)), [7] * 20, 2**16)
    assert abs(correlation(u[:, :-step], u[:, step:])) < 4.5


def test_every_bit_of_the_token_flips_half_of_the_bits():
    """Avalanche: the high word after a change of one bit of the token."""
    keys = keys_of([1], [2])
    tokens = torch.arange(4096)
    words = (fraction(keys, tokens) * 2.0**32).long()[0]
    for bit in range(17):
        changed = words ^ (fraction(keys, tokens ^ (1 << bit)) * 2.0**32).long()[0]
        share = np.unpackbits(changed.numpy().astype(">u4").view(np.uint8)).mean()
        assert share == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(4096 * 32 / 2))


def test_pairs_fill_the_square():
    """Two draws of one place (two tokens) and of one token (two places): 32 x 32 cells."""
    u = uniform([21] * 100_000, list(range(100_001, 200_001)), 2)
    v = uniform([21] * 100_001, list(range(100_001)), 1)[:, 0]
    for a, b in ((u[:, 0], u[:, 1]), (v[:-1], v[1:])):
        cells = (a * 32).astype(int) * 32 + (b * 32).astype(int)
        assert abs(chi_square((cells + 0.5) / 1024, 1024)) < 5


def test_derived_seeds_differ_and_are_stable():
    seeds = [derive_seed(7, i) for i in range(1000)] + [
        derive_seed(7, "draft"),
        derive_seed(7, "verify"),
        derive_seed(8, 0),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed(7, "draft") == derive_seed(7, "draft")


# ------------------------------------------------------------------ extremes
def unmix(word: int) -> int:
    """The input of `_mix`: it is a bijection of 32-bit words."""

    def unshift(x: int, n: int) -> int:
        y = x
        for _ in range(32 // n + 1):
            y = x ^ (y >> n)
        return y

    x = unshift(word, 15)
    x = x * pow(0x735A2D97, -1, 2**32) & MASK
    x = unshift(x, 15)
    x = x * pow(0x21F0AAAD, -1, 2**32) & MASK
    return unshift(x, 16)


def key_for(high: int, low: int, token: int) -> tuple[int, int]:
    """The key under which a token's two words are these."""
    first = high ^ unmix(low) ^ 0x5BD1E995
    second = int(_mix(torch.tensor(token ^ first))) ^ unmix(high)
    return first, second


@given(st.integers(0, MASK))
def test_mix_is_a_bijection(word: int):
    assert int(_mix(torch.tensor(unmix(word)))) == word
    assert unmix(int(_mix(torch.tensor(word)))) == word


@pytest.mark.parametrize("high", [0, 1, 2**31, MASK - 1, MASK])
@pytest.mark.parametrize("low", [0, 1, 2**31, MASK - 1, MASK])
def test_extreme_words_give_finite_noise(high: int, low: int):
    keys = torch.tensor([key_for(high, low, token=6)])
    value = fraction(keys, torch.tensor([6]))
    assert float(value) * 2.0**32 == pytest.approx(high, abs=1.0)  # the construction hits its aim
    assert 0.0 < float(value) < 1.0
    assert math.isfinite(float(gumbel(keys, torch.tensor([6]))))


def test_the_upper_tail_keeps_its_resolution():
    """Large noise decides who wins; there, neighbouring words must not collapse."""
    g = [float(gumbel(torch.tensor([key_for(0, low, 3)]), torch.tensor([3]))) for low in (0, 10, 1000, 10**6)]
    assert g == sorted(g, reverse=True)
    assert len(set(g)) == len(g)
    assert g[0] > 40


# ------------------------------------------------------------------ Gumbel-max
def test_gumbel_max_is_a_sample_of_p():
    p = np.array([0.5, 0.25, 0.15, 0.07, 0.02, 0.01])
    count = 200_000
    noise = gumbel(keys_of([99] * count, list(range(count))), torch.arange(len(p)))
    chosen = (torch.from_numpy(np.log(p)).float() + noise).argmax(-1).numpy()
    seen = np.bincount(chosen, minlength=len(p))
    assert np.all(np.abs(seen - count * p) < 5 * np.sqrt(count * p * (1 - p)))
    pairs = np.bincount(chosen[:-1] * len(p) + chosen[1:], minlength=len(p) ** 2)
    both = np.outer(p, p).ravel()
    assert np.all(np.abs(pairs - count * both) < 5 * np.sqrt(count * both) + 5)


def test_gumbel_order_is_drawing_without_replacement():
    """Tokens sorted by log q + g: the first two are two successive draws from q."""
    q = np.array([0.6, 0.25, 0.1, 0.05])
    count = 100_000
    noise = gumbel(keys_of([98] * count, list(range(count))), torch.arange(len(q)))
    order = (torch.from_numpy(np.log(q)).float() + noise).topk(2, dim=-1).indices.numpy()
    seen = np.bincount(order[:, 0] * 4 + order[:, 1], minlength=16).reshape(4, 4)
    expected = q[:, None] * q[None, :] / (1 - q[:, None]) * (1 - np.eye(4))
    assert np.all(np.abs(seen - count * expected) < 5 * np.sqrt(count * expected) + 1e-9)


# ------------------------------------------------------------------ coins and draws
@pytest.mark.parametrize("p", [0.5, 0.9, 0.01, 1 / 3])
def test_coins_come_up_as_often_as_they_should(p: float):
    count = 40_000
    coins = Chance(3, 4)
    seen = sum(coins.coin(p) for _ in range(count))
    over_positions = sum(Chance(3, t).coin(p) for t in range(count))
    for heads in (seen, over_positions):
        assert abs(heads - count * p) < 5 * math.sqrt(count * p * (1 - p))


def test_sure_coins_are_sure():
    chance = Chance(1, 1)
    assert all(chance.coin(1.0) for _ in range(1000))
    assert not any(chance.coin(0.0) for _ in range(1000))


def test_chance_is_a_function_of_seed_and_position():
    def run(seed: int, position: int) -> list[bool]:
        chance = Chance(seed, position)
        return [chance.coin(0.5) for _ in range(64)]

    assert run(5, 6) == run(5, 6)
    assert run(5, 6) != run(5, 7)
    assert run(5, 6) != run(6, 6)
    assert run(-1, 6) == run(2**64 - 1, 6)


def test_draws_follow_their_weights():
    weights = torch.tensor([0.0, 2.0, 0.0, 5.0, 1.0, 0.0], dtype=torch.float64)
    chance, count = Chance(8, 9), 40_000
    seen = np.bincount([chance.draw(weights) for _ in range(count)], minlength=6)
    p = (weights / weights.sum()).numpy()
    assert seen[[0, 2, 5]].sum() == 0
    assert np.all(np.abs(seen - count * p) < 5 * np.sqrt(count * p * (1 - p)) + 1e-9)


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e3)), min_size=1, max_size=12).filter(
        lambda w: sum(w) > 0
    ),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53, 0.5])),
)
def test_a_weightless_index_is_never_drawn(weights: list[float], u: float):
    chance = Chance(0, 0)
    chance._uniform = lambda: u  # type: ignore[method-assign]
    assert weights[chance.draw(torch.tensor(weights, dtype=torch.float64))] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_of_a_large_vocabulary_stay_inside_it(dtype: torch.dtype):
    weights = torch.zeros(50_000, dtype=dtype)
    weights[[7, 49_000]] = torch.tensor([1e-7, 1.0], dtype=dtype)
    chance = Chance(1, 2)
    for u in (0.0, 5e-8, 0.5, 1 - 2.0**-53):
        chance._uniform = lambda u=u: u  # type: ignore[method-assign]
        assert chance.draw(weights) in (7, 49_000)
