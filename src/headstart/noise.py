"""Gumbel noise as a pure function of (seed, position, token): no generator, no state, the same on every device.

The hash is two rounds of a 32-bit mixer with low bias (shift-multiply constants 0x21f0aaad, 0x735a2d97, published by
Chris Wellons' hash-prospector). They stay below 2^31, so a product never leaves a signed 64-bit integer and the
arithmetic is exact wherever it runs. The two words make a 64-bit fraction w, and g = -log(-log(1 - w)).
"""

from __future__ import annotations

import hashlib

import torch

MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit words held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def row_keys(seeds: list[int], positions: list[int]) -> list[tuple[int, int]]:
    """Two 32-bit words for each (seed, position)."""
    return [_words(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def _words(seed: int, position: int) -> tuple[int, int]:
    data = (seed & (2**64 - 1)).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def fraction(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1) for keys (R, 2) and tokens (V,) or (R, V)."""
    high = _mix(_mix(tokens ^ keys[:, :1]) ^ keys[:, 1:])
    low = _mix(high ^ keys[:, :1] ^ 0x5BD1E995)
    return ((high.double() + (low.double() + 0.5) * 2.0**-32) * 2.0**-32).clamp_max(1 - 2.0**-53)


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """g(seed, position, token) in float32; standard Gumbel, independent across all three."""
    return (-torch.log(-torch.log1p(-fraction(keys, tokens)))).float()


def derive_seed(seed: int, *salt: int | str) -> int:
    """Another seed from this one, for the i-th of n completions or a drafter's own draws."""
    data = repr((seed, *salt)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class Chance:
    """Coins and draws for rejection sampling: a counter-based stream keyed by (seed, position)."""

    def __init__(self, seed: int, position: int) -> None:
        self._key = (seed & (2**64 - 1)).to_bytes(8, "little") + position.to_bytes(8, "little")
        self._count = 0

    def _uniform(self) -> float:
        self._count += 1
        data = self._key + self._count.to_bytes(8, "little")
        return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        return self._uniform() < probability

    def draw(self, weights: torch.Tensor) -> int:
        """An index with probability proportional to weights (V,)."""
        total = weights.double().cumsum(0)
        index = int(torch.searchsorted(total, self._uniform() * total[-1], right=True))
        return min(index, int(weights.nonzero()[-1]))
