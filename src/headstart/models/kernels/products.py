"""Products of a few rows with a block of weights, and what stands around them in a Llama block, in one launch each.

A step of a few tokens reads every weight once and computes little, so a product takes the time of streaming its weights,
plus what each launch costs. Five launches make a layer:

    qkv       scale, bias, rotate; queries stay, keys and values go to their slots
    attention
    product   adds to the residual x, and prepares the next norm
    gate_up   scale, SwiGLU
    product   adds to the residual x, and prepares the next norm

Tiles of rows that need the same weights run side by side, so that the weights come from memory once.
A norm is never a launch of its own. With h = x · gain, norm(x) W^T = (h W^T) / rms(x): whoever writes x also writes h and,
for each block of columns, the sum of its squares; whoever reads h divides its finished sums by rms(x).

Shapes: rows (T, K), weights (N, K) row by row, out (T, N). Sums are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.models.kernels.launch import early_launch

MOST_SQUARES = 512  # blocks of columns whose squares a row can hold


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows, columns and depth of a tile, programs along the depth, and how it is pipelined."""

    rows: int = 16
    cols: int = 32
    depth: int = 128
    split: int = 1
    warps: int = 4
    stages: int = 4


@dataclass
class Stream:
    """The residual on its way through the layers: x, h = x · gain of the next norm, and squares of x by blocks."""

    x: torch.Tensor  # (T, K)
    h: torch.Tensor  # (T, K)
    squares: torch.Tensor  # (T, MOST_SQUARES) float32
    eps: float
    blocks: int = 1  # how many of the squares count

    @staticmethod
    def of(rows: int, size: int, dtype: torch.dtype, device: torch.device, eps: float) -> Stream:
        x = torch.empty(rows, size, dtype=dtype, device=device)
        return Stream(x, torch.empty_like(x), torch.empty(rows, MOST_SQUARES, dtype=torch.float32, device=device), eps)


@triton.jit
def _sums(
    x, w, rows, cols, other, valid, K, start, stop,
    PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x W[cols]^T and, for a pair, x W[other]^T over depth [start, stop)."""
    first = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    for k in range(start, stop, BK):
        ks = k + tl.arange(0, BK)
        if EVEN:
            a = tl.load(x + rows[:, None] * K + ks[None, :], mask=valid[:, None], other=0.0)
            b = tl.load(w + cols[:, None] * K + ks[None, :])
        else:
            deep = (ks < stop)[None, :]
            a = tl.load(x + rows[:, None] * K + ks[None, :], mask=valid[:, None] & deep, other=0.0)
            b = tl.load(w + cols[:, None] * K + ks[None, :], mask=deep, other=0.0)
        first = tl.dot(a, tl.trans(b), first, input_precision="ieee")
        if PAIR:
            if EVEN:
                c = tl.load(w + other[:, None] * K + ks[None, :])
            else:
                c = tl.load(w + other[:, None] * K + ks[None, :], mask=(ks < stop)[None, :], other=0.0)
            second = tl.dot(a, tl.trans(c), second, input_precision="ieee")
    return first, second


@triton.jit
def _scale(squares, rows, valid, blocks, K, eps, MOST: tl.constexpr, BLOCKS: tl.constexpr):
    """1 / rms of each row, (BM, 1)."""
    block = tl.arange(0, BLOCKS)
    mask = valid[:, None] & (block < blocks)[None, :]
    total = tl.sum(tl.load(squares + rows[:, None] * MOST + block[None, :], mask=mask, other=0.0), 1)
    return tl.rsqrt(total / K + eps)[:, None]


@triton.jit(do_not_specialize=["T", "blocks"])
def _product(
    x, squares, blocks, w, bias, out, gain, h, next_squares, partial, arrived, T, N, K, eps,
    SCALE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PREPARE: tl.constexpr, EVEN: tl.constexpr,
    MOST: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    band, column, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = (band * BM + tl.arange(0, BM)).to(tl.int64)
    cols = (column * BN + tl.arange(0, BN)).to(tl.int64)
    valid = rows < T
    depth = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    start = part * depth
    inside = tl.minimum(cols, N - 1)  # a block past the edge reads the last row again and writes nothing
    stop = tl.minimum(K, start + depth)
    acc, _ = _sums(x, w, rows, inside, inside, valid, K, start, stop, False, BM, BN, BK, EVEN)
    if EARLY:
        gdc_launch_dependents()
    if SPLIT > 1:  # partial sums meet in the last program to arrive, which adds them in order
        unit = column * tl.num_programs(0) + band
        tile = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        here = partial + (unit * SPLIT).to(tl.int64) * BM * BN + tile
        tl.store(here + part * BM * BN, acc, mask=valid[:, None])
        tl.debug_barrier()
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel") < SPLIT - 1:
            return
        acc = tl.zeros((BM, BN), tl.float32)
        for p in tl.static_range(SPLIT):
            acc += tl.load(here + p * BM * BN, mask=valid[:, None], other=0.0, cache_modifier=".cg")
        tl.store(arrived + unit, 0)
    if SCALE:
        acc *= _scale(squares, rows, valid, blocks, K, eps, MOST, BLOCKS)
    if BIAS:
        acc += tl.load(bias + inside).to(tl.float32)[None, :]
    at = rows[:, None] * N + cols[None, :]
    mask = valid[:, None] & (cols < N)[None, :]
    if ADD:
        acc += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=mask)
    if PREPARE:
        wide = tl.where((cols < N)[None, :], result.to(tl.float32), 0.0)
        tl.store(next_squares + rows * MOST + column, tl.sum(wide * wide, 1), mask=valid)
        gained = wide * tl.load(gain + inside).to(tl.float32)[None, :]
        tl.store(h + at, gained.to(h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "blocks"])
def _gate_up(
    x, squares, blocks, w, out, T, N, K, eps,
    EVEN: tl.constexpr, MOST: tl.constexpr, BLOCKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out (T, N) = silu(scale · x G^T) * (scale · x U^T), with G the first N rows of w and U the next N."""
    if EARLY:
        gdc_wait()
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    cols = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    valid = rows < T
    inside = tl.minimum(cols, N - 1)
    gate, up = _sums(x, w, rows, inside, inside + N, valid, K, 0, K, True, BM, BN, BK, EVEN)
    if EARLY:
        gdc_launch_dependents()
    scale = _scale(squares, rows, valid, blocks, K, eps, MOST, BLOCKS)
    gate *= scale
    result = gate * tl.sigmoid(gate) * (up * scale)
    mask = valid[:, None] & (cols < N)[None, :]
    tl.store(out + rows[:, None] * N + cols[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "blocks"])
def _qkv(
    x, squares, blocks, w, bias, cos, sin, positions, slots, query, keys, values, T, K, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    MOST: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has BN columns of the first half of one head and their partners of the second half."""
    if EARLY:
        gdc_wait()
    half: tl.constexpr = D // 2
    head = tl.program_id(1) // (half // BN)
    lane = (tl.program_id(1) % (half // BN)) * BN + tl.arange(0, BN)
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    valid = rows < T
    cols = (head * D + lane).to(tl.int64)
    first, second = _sums(x, w, rows, cols, cols + half, valid, K, 0, K, True, BM, BN, BK, EVEN)
    if EARLY:
        gdc_launch_dependents()
    scale = _scale(squares, rows, valid, blocks, K, eps, MOST, BLOCKS)
    first, second = first * scale, second * scale
    if BIAS:
        first += tl.load(bias + cols).to(tl.float32)[None, :]
        second += tl.load(bias + cols + half).to(tl.float32)[None, :]
    mask = valid[:, None]
    if head < HEADS + KV:
        place = tl.load(positions + rows, mask=valid, other=0).to(tl.int64)
        angle = place[:, None] * half + lane[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    if head < HEADS:
        at = query + rows[:, None] * (HEADS * D) + head * D + lane[None, :]
        tl.store(at, first.to(query.dtype.element_ty), mask=mask)
        tl.store(at + half, second.to(query.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + rows, mask=valid, other=-1).to(tl.int64)[:, None]
        mask = slot >= 0
        kind = keys.dtype.element_ty
        if head < HEADS + KV:
            at = keys + slot * (KV * D) + (head - HEADS) * D + lane[None, :]
            tl.store(at, first.to(kind), mask=mask)
            tl.store(at + half, second.to(kind), mask=mask)
        else:
            at = values + slot * (KV * D) + (head - HEADS - KV) * D + lane[None, :]
            tl.store(at, first.to(kind), mask=mask)
            tl.store(at + half, second.to(kind), mask=mask)


@triton.jit
def _embed(
    tokens, source, chosen, mail, table, gain, x, h, squares, K,
    MOST: tl.constexpr, PK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    origin = tl.load(source + row)
    if origin >= 0:
        token = tl.load(chosen + origin)
        tl.store(tokens + row, token)
    elif origin < -1:
        token = tl.load(mail - 2 - origin)
        tl.store(tokens + row, token)
    col = tl.arange(0, PK)
    value = tl.load(table + token.to(tl.int64) * K + col, mask=col < K, other=0.0)
    wide = value.to(tl.float32)
    tl.store(x + row * K + col, value, mask=col < K)
    gained = wide * tl.load(gain + col, mask=col < K, other=0.0).to(tl.float32)
    tl.store(h + row * K + col, gained.to(h.dtype.element_ty), mask=col < K)
    tl.store(squares + row * MOST, tl.sum(wide * wide, 0))


class Scratch:
    """Room for partial sums, shared by all products of one runner: launches on one stream follow each other."""

    def __init__(self, device: torch.device, floats: int = 1 << 23, counters: int = 1 << 14) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(counters, dtype=torch.int32, device=device)


def embed(
    tokens: torch.Tensor, source: torch.Tensor, chosen: torch.Tensor, mail: torch.Tensor, table: torch.Tensor,
    gain: torch.Tensor, stream: Stream,
) -> None:  # fmt: skip
    """Begin a stream: rows of the table. `source` says where a token is that `tokens` does not hold (see `Batch`); it is
    noted there."""
    t, k = stream.x.shape
    _embed[(t,)](
        tokens, source, chosen, mail, table, gain, stream.x, stream.h, stream.squares, k, MOST_SQUARES,
        triton.next_power_of_2(k), **early_launch(), num_warps=4,
    )  # fmt: skip
    stream.blocks = 1


def add_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: Stream, gain: torch.Tensor, tile: Tile,
    scratch: Scratch,
) -> None:  # fmt: skip
    """x += rows W^T + bias, and h, squares for the norm that has this gain."""
    _launch(rows, weight, bias, stream.x, None, stream, gain, tile, scratch)
    stream.blocks = triton.cdiv(len(weight), tile.cols)


def normed_product(
    stream: Stream, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, scratch: Scratch, dtype: torch.dtype,
    into: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """norm(x) W^T + bias, written to `into` where that is given."""
    out = torch.empty(len(stream.x), len(weight), dtype=dtype, device=weight.device) if into is None else into
    _launch(stream.h, weight, bias, out, stream, None, None, tile, scratch)
    return out


def _launch(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, scaled: Stream | None,
    onward: Stream | None, gain: torch.Tensor | None, tile: Tile, scratch: Scratch,
) -> None:  # fmt: skip
    (t, k), n = rows.shape, len(weight)
    stream = scaled or onward
    assert stream is not None
    grid = (triton.cdiv(t, tile.rows), triton.cdiv(n, tile.cols), tile.split)
    assert tile.split == 1 or grid[0] * grid[1] <= len(scratch.arrived)
    assert tile.split == 1 or grid[0] * grid[1] * grid[2] * tile.rows * tile.cols <= len(scratch.partial)
    _product[grid](
        rows, stream.squares, stream.blocks, weight, weight if bias is None else bias, out,
        weight if gain is None else gain, stream.h, stream.squares, scratch.partial, scratch.arrived, t, n, k, stream.eps,
        scaled is not None, bias is not None, onward is not None, onward is not None, k % tile.depth == 0, MOST_SQUARES,
        triton.next_power_of_2(stream.blocks), tile.split, tile.rows, tile.cols, tile.depth, **early_launch(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def gate_up(stream: Stream, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """SwiGLU of the normed rows: (T, N), with weight (2N, K)."""
    (t, k), n = stream.x.shape, len(weight) // 2
    out = torch.empty(t, n, dtype=stream.x.dtype, device=weight.device)
    _gate_up[(triton.cdiv(t, tile.rows), triton.cdiv(n, tile.cols))](
        stream.h, stream.squares, stream.blocks, weight, out, t, n, k, stream.eps, k % tile.depth == 0, MOST_SQUARES,
        triton.next_power_of_2(stream.blocks), tile.rows, tile.cols, tile.depth, **early_launch(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def qkv(
    stream: Stream,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    angles: tuple[torch.Tensor, torch.Tensor],  # cos and sin of every position, (positions, D/2)
    positions: torch.Tensor,  # (T,)
    slots: torch.Tensor,  # (T,) where keys and values go; -1: nowhere
    keys: torch.Tensor,  # (S, KV, D)
    values: torch.Tensor,
    tile: Tile,
) -> torch.Tensor:
    """Rotated queries (T, H, D) of the normed rows; keys and values are written to the pool. D is a multiple of 32."""
    (t, k), (_, kv, d) = stream.x.shape, keys.shape
    heads = len(weight) // d - 2 * kv
    cols = math.gcd(tile.cols, d // 2)
    assert cols >= 16, "half a head is cut into tiles of at least 16 columns"
    query = torch.empty(t, heads, d, dtype=stream.x.dtype, device=weight.device)
    _qkv[(triton.cdiv(t, tile.rows), (heads + 2 * kv) * (d // 2 // cols))](
        stream.h, stream.squares, stream.blocks, weight, weight if bias is None else bias, *angles, positions, slots,
        query, keys, values, t, k, stream.eps, heads, kv, d, bias is not None, k % tile.depth == 0, MOST_SQUARES,
        triton.next_power_of_2(stream.blocks), tile.rows, cols, tile.depth, **early_launch(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return query
