"""Gumbel noise as a pure function of (seed, position, token): no generator, no state, the same on every device.

A row, which is a seed and a position, has a key of two 32-bit words: Threefry-2x32 with 20 rounds, the position as the
counter under the seed (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). It takes additions, rotations
and XOR alone, so that a GPU finds the key of a position that the host does not know yet. What a token makes of the key is
two rounds of a 32-bit mixer with low bias (shift-multiply constants 0x21f0aaad, 0x735a2d97, published by Chris Wellons'
hash-prospector). They stay below 2^31, so a product never leaves a signed 64-bit integer and the arithmetic is exact
wherever it runs. The two words make a 64-bit fraction w, and g = -log(-log(1 - w)).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch

MASK = 0xFFFFFFFF
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA
FACTORS = 0x21F0AAAD, 0x735A2D97
FEW = 12  # rows for which integers are faster than arrays


def _mix(x: Any) -> Any:
    """Scramble 32-bit words: integers, or tensors of int64."""
    x = x ^ (x >> 16)
    x = (x * FACTORS[0]) & MASK
    x = x ^ (x >> 15)
    x = (x * FACTORS[1]) & MASK
    return x ^ (x >> 15)


def row_keys(seeds: list[int], positions: list[int]) -> list[tuple[int, int]]:
    """Two 32-bit words for each (seed, position)."""
    if len(seeds) <= FEW:
        return [threefry(*words(s), *words(p)) for s, p in zip(seeds, positions, strict=True)]
    arrays = np.array([[*words(s), *words(p)] for s, p in zip(seeds, positions, strict=True)], np.int64).T
    return list(zip(*(x.tolist() for x in threefry(*arrays)), strict=True))


def words(number: int) -> tuple[int, int]:
    """The low and the high 32 bits of a seed or a position."""
    return number & MASK, number >> 32 & MASK


def threefry(key0: Any, key1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32-20 of a counter under a key, in words of 32 bits: integers, or arrays of int64."""
    keys = key0, key1, key0 ^ key1 ^ PARITY
    x0, x1 = x0 + key0 & MASK, x1 + key1 & MASK
    for i in range(1, 6):
        for r in ROTATIONS[(i - 1) % 2]:
            x0 = x0 + x1 & MASK
            x1 = (x1 << r | x1 >> 32 - r) & MASK ^ x0
        x0, x1 = x0 + keys[i % 3] & MASK, x1 + keys[(i + 1) % 3] + i & MASK
    return x0, x1


def fraction(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1) for keys (R, 2) and tokens (V,) or (R, V)."""
    high = _mix(_mix(tokens ^ keys[:, :1]) ^ keys[:, 1:])
    low = _mix(high ^ keys[:, :1] ^ 0x5BD1E995)
    return ((high.double() + (low.double() + 0.5) * 2.0**-32) * 2.0**-32).clamp_max(1 - 2.0**-53)


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """g(seed, position, token) in float32; standard Gumbel, independent across all three."""
    return (-torch.log(-torch.log1p(-fraction(keys, tokens)))).float()


def ceiling(key: tuple[int, int], size: int) -> np.ndarray:
    """For tokens 0, 1, ...: what g does not exceed, but for rounding in float32; large g comes near it, by less than 0.1.

    It takes the first word of the fraction alone, and 32 bits: w is no less than that word says, and g = -log(-log(1 - w)) no
    more than -log(w). The bits of a float are a line from each power of two to the next, which is never above its log2.
    """
    x = np.arange(size, dtype=np.uint32)
    spare = np.empty_like(x)
    for word in key:
        x ^= np.uint32(word)
        for shift, factor in ((16, FACTORS[0]), (15, FACTORS[1]), (15, None)):
            x ^= np.right_shift(x, np.uint32(shift), out=spare)
            if factor is not None:
                x *= np.uint32(factor)
    w = x.astype(np.float32)
    np.maximum(w, np.float32(2.0**-33), out=w)  # the second word is worth half of its last bit at least
    line = w.view(np.int32).astype(np.float32)
    line *= np.float32(-math.log(2) * 2.0**-23)
    line += np.float32(math.log(2) * (127 + 32))
    return line


def one(key: tuple[int, int], token: int) -> float:
    """g of one token, by Python's own arithmetic."""
    high = _mix(_mix(token ^ key[0]) ^ key[1])
    low = _mix(high ^ key[0] ^ 0x5BD1E995)
    return -math.log(-math.log1p(-min(1 - 2.0**-53, (high + (low + 0.5) * 2.0**-32) * 2.0**-32)))


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
