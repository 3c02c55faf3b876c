"""The small operations of a forward on CPUs, as loops that numba compiles: norms, rotation, attention, gating.

torch spends tens of microseconds on each of them for a few rows, and a model has hundreds. Written as plain loops they take a
few. All in float32. A row of a chain gets the same bits as alone: sums run over padded lengths in a fixed order, and padding
adds nothing. (In a tree, the slots of siblings stand between those that a row sees.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

F, N = np.float32, np.int32
ROWS, LANES = 4, 16  # query rows are padded to a multiple of the one, slots to a multiple of the other
FAST = {"reassoc", "contract", "arcp", "nsz", "nnan", "ninf"}

Row, Grid, Cube, Index = "f4[::1]", "f4[:,::1]", "f4[:,:,::1]", "u8[::1]"


def compiled(*arguments: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile at once, for these arguments; kept on disk for the next start."""
    return numba.njit([f"void({','.join(arguments)})"], fastmath=FAST, error_model="numpy", cache=True)


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    """The float32 that has these bits."""
    from llvmlite import ir

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.types.float32(numba.types.int32), generate


@numba.njit(fastmath=FAST, error_model="numpy", inline="always")
def _exp(x: Any) -> Any:
    """e^x to about 1e-7: a power of two times a polynomial, so that a loop of it runs in vector registers."""
    x = min(max(x, F(-87)), F(88))
    k = np.floor(x * F(1.44269504) + F(0.5))
    r = x - k * F(0.693359375) + k * F(2.12194440e-4)  # ln 2 in two pieces
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    return (p * r * r + r + F(1)) * _as_float(N((N(k) + N(127)) << N(23)))  # type: ignore[call-arg]


@numba.njit(fastmath=FAST, error_model="numpy", inline="always")
def _norm_row(x: Any, gain: Any, eps: Any, out: Any) -> None:
    total = F(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = F(1) / np.sqrt(total / F(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * scale * gain[i]


@compiled(Grid, Row, "f4", Grid)
def norm(x: Any, gain: Any, eps: Any, out: Any) -> None:
    """out = x / rms(x) · gain, row by row."""
    for t in range(x.shape[0]):
        _norm_row(x[t], gain, eps, out[t])


@compiled(Grid, Grid, Row, "f4", Grid)
def add_norm(x: Any, y: Any, gain: Any, eps: Any, out: Any) -> None:
    """x += y, then as `norm`."""
    for t in range(x.shape[0]):
        row, more = x[t], y[t]
        for i in range(len(row)):
            row[i] += more[i]
        _norm_row(row, gain, eps, out[t])


@compiled(Grid, Grid)
def gate(both: Any, out: Any) -> None:
    """out = silu(first half) · second half."""
    n = out.shape[1]
    for t in range(out.shape[0]):
        first, second, row = both[t, :n], both[t, n:], out[t]
        for i in range(n):
            row[i] = first[i] / (F(1) + _exp(-first[i])) * second[i]


@compiled(Cube, "i8", Grid, "f4", Grid, Grid, Cube, Cube, Index)
def rotate(
    heads: Any, queries: Any, gains: Any, eps: Any, cos: Any, sin: Any, keys: Any, values: Any, slots: Any
) -> None:
    """Norm (where there are gains: of queries, of keys) and turn the query and key heads of each row in place, by its angles;
    then write keys and values to the row's slot."""
    num_kv, half = keys.shape[1], heads.shape[2] // 2
    for t in range(heads.shape[0]):
        turn, tilt = cos[t], sin[t]
        for h in range(queries + num_kv):
            head = heads[t, h]
            if len(gains):
                _norm_row(head, gains[0 if h < queries else 1], eps, head)
            first, second = head[:half], head[half:]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * turn[i] - b * tilt[i]
                second[i] = b * turn[half + i] + a * tilt[half + i]
        for h in range(num_kv):
            key, value = keys[slots[t], h], values[slots[t], h]
            new_key, new_value = heads[t, queries + h], heads[t, queries + num_kv + h]
            for i in range(len(key)):
                key[i] = new_key[i]
            for i in range(len(value)):
                value[i] = new_value[i]


@numba.njit(fastmath=FAST, error_model="numpy")
def _score(block: Any, keys: Any, h: Any, where: Any, rows: Any, scores: Any) -> None:
    """Products of query rows and keys, four rows and two slots at a time."""
    dim = keys.shape[2]
    for r in range(0, rows, ROWS):
        q0, q1, q2, q3 = block[r, :dim], block[r + 1, :dim], block[r + 2, :dim], block[r + 3, :dim]
        for j in range(0, len(where), 2):
            k, m = keys[where[j], h], keys[where[j + 1], h]
            a0, a1, a2, a3, b0, b1, b2, b3 = F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0)
            for i in range(dim):
                x, y = k[i], m[i]
                a0 += q0[i] * x
                a1 += q1[i] * x
                a2 += q2[i] * x
                a3 += q3[i] * x
                b0 += q0[i] * y
                b1 += q1[i] * y
                b2 += q2[i] * y
                b3 += q3[i] * y
            scores[r, j], scores[r + 1, j], scores[r + 2, j], scores[r + 3, j] = a0, a1, a2, a3
            scores[r, j + 1], scores[r + 1, j + 1], scores[r + 2, j + 1], scores[r + 3, j + 1] = b0, b1, b2, b3


@numba.njit(fastmath=FAST - {"reassoc"}, error_model="numpy")
def _total(x: Any) -> Any:
    """The sum, in four lanes on every chip: how many a chip has must not show."""
    a, b, c, d = F(0), F(0), F(0), F(0)
    for j in range(0, len(x), 4):
        a += x[j]
        b += x[j + 1]
        c += x[j + 2]
        d += x[j + 3]
    return (a + b) + (c + d)


@numba.njit(fastmath=FAST, error_model="numpy")
def _weigh(scores: Any, visible: Any, scale: Any) -> Any:
    """Scores become weights. Returns their sum."""
    most = F(-1e30)
    for j in range(len(scores)):
        scores[j] = scores[j] * scale if visible[j] > F(0) else F(-1e30)
        most = max(most, scores[j])
    for j in range(len(scores)):
        scores[j] = _exp(scores[j] - most) * visible[j]
    return _total(scores)


@numba.njit(fastmath=FAST, error_model="numpy")
def _mix(scores: Any, values: Any, h: Any, where: Any, rows: Any, mixed: Any) -> None:
    """Weighted sums of values, four rows and four slots at a time."""
    wide = values.shape[2]
    for r in range(0, rows, ROWS):
        o0, o1, o2, o3 = mixed[r, :wide], mixed[r + 1, :wide], mixed[r + 2, :wide], mixed[r + 3, :wide]
        o0[:], o1[:], o2[:], o3[:] = F(0), F(0), F(0), F(0)
        p0, p1, p2, p3 = scores[r], scores[r + 1], scores[r + 2], scores[r + 3]
        for j in range(0, len(where), 4):
            v0, v1, v2, v3 = (
                values[where[j], h],
                values[where[j + 1], h],
                values[where[j + 2], h],
                values[where[j + 3], h],
            )
            a0, a1, a2, a3 = p0[j], p0[j + 1], p0[j + 2], p0[j + 3]
            b0, b1, b2, b3 = p1[j], p1[j + 1], p1[j + 2], p1[j + 3]
            c0, c1, c2, c3 = p2[j], p2[j + 1], p2[j + 2], p2[j + 3]
            d0, d1, d2, d3 = p3[j], p3[j + 1], p3[j + 2], p3[j + 3]
            for i in range(wide):
                w, x, y, z = v0[i], v1[i], v2[i], v3[i]
                o0[i] += a0 * w + a1 * x + a2 * y + a3 * z
                o1[i] += b0 * w + b1 * x + b2 * y + b3 * z
                o2[i] += c0 * w + c1 * x + c2 * y + c3 * z
                o3[i] += d0 * w + d1 * x + d2 * y + d3 * z


@compiled(Cube, "i8", Cube, Cube, "i8[:,::1]", Index, Row, "f4", Grid, Grid, Grid)
def attend(
    heads: Any, queries: Any, keys: Any, values: Any, pieces: Any, slots: Any, visible: Any, scale: Any,
    block: Any, scores: Any, out: Any,
) -> None:  # fmt: skip
    """Each piece's rows over its slots. `pieces`: (first row, rows, first of `slots`, slots, first of `visible`) of each.

    `visible` has 1 for each row and slot that it may see, else 0. `block` is room for query rows, `scores` for their scores."""
    num_kv, dim = keys.shape[1], keys.shape[2]
    share, wide = queries // num_kv, values.shape[2]
    totals = np.empty(len(block), np.float32)
    for p in range(len(pieces)):
        first, count, at, n, seen = pieces[p, 0], pieces[p, 1], pieces[p, 2], pieces[p, 3], pieces[p, 4]
        where, rows = slots[at : at + n], count * share
        for h in range(num_kv):
            for r in range(rows):
                block[r, :dim] = heads[first + r // share, h * share + r % share]
            block[rows : -(-rows // ROWS) * ROWS] = F(0)
            _score(block, keys, h, where, rows, scores)
            for r in range(rows):
                begin = seen + (r // share) * n
                totals[r] = _weigh(scores[r, :n], visible[begin : begin + n], scale)
            _mix(scores, values, h, where, rows, block)
            for r in range(rows):
                column = (h * share + r % share) * wide
                target, mixed, part = out[first + r // share, column : column + wide], block[r], F(1) / totals[r]
                for i in range(wide):
                    target[i] = mixed[i] * part
