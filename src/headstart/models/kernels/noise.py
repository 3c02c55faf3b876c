"""The noise of `headstart.noise`, to the bit: a row's key from its seed and position, and what a token makes of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn(x0, x1, R: tl.constexpr):
    x0 = x0 + x1
    return x0, ((x1 << R) | (x1 >> (32 - R))) ^ x0


@triton.jit
def _turns(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0, x1 = _turn(x0, x1, A)
    x0, x1 = _turn(x0, x1, B)
    x0, x1 = _turn(x0, x1, C)
    return _turn(x0, x1, D)


@triton.jit
def _key(low, high, position):
    """Threefry-2x32-20 of a position below 2^31 under a seed of two words; two words held in int64."""
    k0, k1 = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = _turns(position.to(tl.uint32, bitcast=True) + k0, k1, 13, 15, 26, 6)
    x0, x1 = _turns(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = _turns(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = _turns(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = _turns(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return (x0 + k2).to(tl.int64), (x1 + k0 + 5).to(tl.int64)


@triton.jit
def _mix(x):
    """Scramble 32-bit words held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


@triton.jit
def _gumbel(key0, key1, token):
    high = _mix(_mix(token ^ key0) ^ key1)
    low = _mix(high ^ key0 ^ 0x5BD1E995)
    w = (high.to(tl.float64) + (low.to(tl.float64) + 0.5) * 2.3283064365386963e-10) * 2.3283064365386963e-10
    w = tl.minimum(w, 0.9999999999999999)
    rest = 1.0 - w
    e = -(tl.log(rest) - ((rest - 1.0) + w) / rest)  # -log1p(-w), with the rounding of 1 - w made good
    return (-tl.log(e)).to(tl.float32)


@triton.jit
def _noise(seeds, row, COUNT, position, token):
    """g of the tokens (int64) at a position, under the seed of a row; `seeds` are (2, COUNT) words."""
    key0, key1 = _key(tl.load(seeds + row), tl.load(seeds + COUNT + row), position)
    return _gumbel(key0, key1, token)
