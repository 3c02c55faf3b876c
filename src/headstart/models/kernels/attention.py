"""Attention over the paged KV pool: the context split across programs, the tree handled apart, both merged.

A launch has one program for each (rows, key head, split). Query heads that share a key head stand in one tile, so keys and
values are read once for all of them. Each program leaves its weighted sum, maximum and weight; the last to arrive merges
them in the order of the splits, so the result does not depend on who was last.

Two kernels:
  rows   one new token at a time. It sees the keys of its own path in the order of their positions: the context, then its
         ancestors. How that order is cut depends on the token's position alone, so a token gets the same bits whether its
         ancestors are a draft of this forward or lie in the context. Plain decoding, and everything under `deterministic`.
  trees  blocks of new tokens of one request against the shared context, and one program for the new tokens among
         themselves, each under its own mask. Drafts and prefill pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.models.kernels.launch import early_launch


@dataclass
class Layout:
    """Who reads what in one forward, as int32 tensors on the device. B segments, T rows, `pages` and `depths` end to end."""

    start: torch.Tensor  # (B,) rows of a segment
    stop: torch.Tensor  # (B,)
    context: torch.Tensor  # (B,) tokens that every row sees
    entries: torch.Tensor  # (B,) entries of the tree behind them, the new rows last
    table: torch.Tensor  # (B,) where the segment's pages begin
    pages: torch.Tensor  # pages of all segments
    at: torch.Tensor  # (T,) where the pages of a row's segment begin, -1 for padding
    positions: torch.Tensor  # (T,)
    shared: torch.Tensor  # (T,) from here on, a row's keys are its ancestors in the tree; behind its position: a chain
    slots: torch.Tensor  # (T,) where a row's keys and values go, -1 for padding
    is_tree: torch.Tensor  # (B,) 0: entries are a chain
    words: torch.Tensor  # (T, W) which entries a row sees, 32 to a word
    above: torch.Tensor  # (T, A) the entry at each depth of a row's path
    depth_at: torch.Tensor  # (B,) where the segment's depths begin
    depths: torch.Tensor  # depth of each entry
    page_size: int
    max_new: int  # rows of the largest segment
    trees: bool  # some segment may be a tree
    skip: torch.Tensor | None = None  # (B,) from here
    resume: torch.Tensor | None = None  # (B,) to here, no row sees the context

    @property
    def single(self) -> bool:
        """Every segment is one new token behind its context."""
        return self.max_new == 1 and not self.trees

    def rows(self, first: int, last: int) -> Layout:
        """The same for some of the rows, for kernels that take one row at a time."""
        names = ("at", "positions", "shared", "slots", "words", "above")
        return replace(self, **{name: getattr(self, name)[first:last] for name in names})


@triton.jit
def _slots(pages, table, index, live, PAGE: tl.constexpr):
    return tl.load(pages + table + index // PAGE, mask=live, other=0).to(tl.int64) * PAGE + index % PAGE


@triton.jit
def _meet(
    q, keys, values, slot, live, seen, kv, scale, cap, acc, top, weight,
    KV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into the running softmax. `live` (keys,): in the pool; `seen` (rows, keys): visible."""
    dk, dv = tl.arange(0, PK), tl.arange(0, PV)
    k = tl.load(
        keys + slot[None, :] * (KV * DK) + kv * DK + dk[:, None], mask=live[None, :] & (dk < DK)[:, None], other=0.0
    )
    v = tl.load(
        values + slot[:, None] * (KV * DV) + kv * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0
    )
    score = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if CAP:
        score = cap * (1.0 - 2.0 / (tl.exp(2.0 * score / cap) + 1.0))  # cap · tanh(score / cap)
    score = tl.where(seen, score, -float("inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp(score - safe[:, None])
    fade = tl.exp(top - safe)
    weight = weight * fade + tl.sum(p, 1)
    acc = acc * fade[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return acc, higher, weight


@triton.jit
def _finish(
    acc, top, weight, where, mask, sinks, head, unit, part, active, partial, tops, weights, arrived, out,
    SPLITS: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    """Write the result; with several programs, leave a part of it, and the last to arrive writes the whole."""
    last = True
    if active > 1:
        lane = tl.arange(0, BM)
        tile = lane[:, None] * PV + tl.arange(0, PV)[None, :]
        here = (unit * SPLITS).to(tl.int64)
        tl.store(partial + (here + part) * BM * PV + tile, acc, mask=mask)
        tl.store(tops + (here + part) * BM + lane, top)
        tl.store(weights + (here + part) * BM + lane, weight)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + unit, 1, sem="acq_rel") == active - 1
        if last:
            tl.store(arrived + unit, 0)
            acc = tl.zeros((BM, PV), tl.float32)
            top = tl.full((BM,), -float("inf"), tl.float32)
            weight = tl.zeros((BM,), tl.float32)
            for p in range(active):
                other = tl.load(tops + (here + p) * BM + lane, cache_modifier=".cg")
                higher = tl.maximum(top, other)
                safe = tl.where(higher == -float("inf"), 0.0, higher)
                fade, grow = tl.exp(top - safe), tl.exp(other - safe)
                more = tl.load(partial + (here + p) * BM * PV + tile, mask=mask, other=0.0, cache_modifier=".cg")
                acc = acc * fade[:, None] + more * grow[:, None]
                weight = weight * fade + tl.load(weights + (here + p) * BM + lane, cache_modifier=".cg") * grow
                top = higher
    if last:
        if SINKS:  # one learned logit per head that takes probability and returns nothing
            weight += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
        result = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(out + where, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rows(
    query, keys, values, out, partial, tops, weights, arrived, sinks,
    pages, at, positions, shared, above, scale, cap, A,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, TREES: tl.constexpr, H: tl.constexpr, KV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    row, kv, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position, table = tl.load(positions + row), tl.load(at + row)
    if table < 0:
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, position - WINDOW + 1)
    span = tl.cdiv(tl.cdiv(position + 1 - first, SPLITS), BS) * BS
    active = tl.cdiv(position + 1 - first, span)
    if part >= active:
        return
    low = first + part * span
    high = tl.minimum(position + 1, low + span)
    share: tl.constexpr = H // KV
    lane = tl.arange(0, BM)
    head = kv * share + tl.minimum(lane, share - 1)
    mine = (lane < share)[:, None]
    dk = tl.arange(0, PK)
    q = tl.load(query + row * (H * DK) + head[:, None] * DK + dk[None, :], mask=mine & (dk < DK)[None, :], other=0.0)
    common = 0
    if TREES:
        common = tl.load(shared + row)
    acc = tl.zeros((BM, PV), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    for start in range(low, high, BS):
        index = start + tl.arange(0, BS)
        live = index < high
        if TREES:
            own = live & (index >= common)
            index = tl.where(own, common + tl.load(above + row * A + index - common, mask=own, other=0), index)
        slot = _slots(pages, table, index, live, PAGE)
        acc, top, weight = _meet(
            q, keys, values, slot, live, live[None, :], kv, scale, cap, acc, top, weight, KV, DK, DV, PK, PV, CAP
        )
    if EARLY:
        gdc_launch_dependents()
    dv = tl.arange(0, PV)
    where = row * (H * DV) + head[:, None] * DV + dv[None, :]
    _finish(
        acc, top, weight, where, mine & (dv < DV)[None, :], sinks, head, row * KV + kv, part, active,
        partial, tops, weights, arrived, out, SPLITS, SINKS, BM, PV,
    )  # fmt: skip


@triton.jit
def _trees(
    query, keys, values, out, partial, tops, weights, arrived, sinks,
    start, stop, context, entries, table, pages, positions, is_tree, words, depth_at, depths, skip, resume, scale, cap, W,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, TREES: tl.constexpr, H: tl.constexpr, KV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, GAPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    share: tl.constexpr = H // KV
    height: tl.constexpr = BM // share  # rows of a block
    segment, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    kv, part = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(start + segment), tl.load(stop + segment)
    if begin + block * height >= end:
        return
    shared, size, at = tl.load(context + segment), tl.load(entries + segment), tl.load(table + segment)
    branching = 0
    if TREES:
        branching = tl.load(is_tree + segment)
    lane = tl.arange(0, BM)
    offset = block * height + lane // share
    row = (begin + offset).to(tl.int64)
    mine = (lane // share < height) & (row < end)
    head = kv * share + lane % share
    entry = size - (end - begin) + offset
    position = tl.load(positions + row, mask=mine, other=0)
    dk = tl.arange(0, PK)
    q = tl.load(
        query + row[:, None] * (H * DK) + head[:, None] * DK + dk[None, :],
        mask=mine[:, None] & (dk < DK)[None, :], other=0.0,
    )  # fmt: skip
    first = 0
    if WINDOW > 0:  # in a tree, any row may stand right behind the context
        nearest = tl.where(branching > 0, shared, shared + size - (end - begin) + block * height)
        first = tl.minimum(tl.maximum(0, nearest - WINDOW + 1), shared)
    readers: tl.constexpr = (
        SPLITS - 1 if SPLITS > 1 else 1
    )  # programs that share the context; the last one has the tree
    span = tl.maximum(tl.cdiv(tl.cdiv(shared - first, readers), BS) * BS, BS)
    reading = tl.cdiv(shared - first, span)
    active = 1
    low, high, grows = first, shared, True
    if SPLITS > 1:
        active = reading + 1
        grows = part == SPLITS - 1
        low = tl.where(grows, shared, first + part * span)
        high = tl.where(grows, shared, tl.minimum(shared, low + span))
        if (part >= reading) & (part < SPLITS - 1):
            return
        part = tl.where(grows, reading, part)
    acc = tl.zeros((BM, PV), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    gap, behind = 0, 0
    if GAPS:
        gap, behind = tl.load(skip + segment), tl.load(resume + segment)
    for key in range(low, high, BS):
        index = key + tl.arange(0, BS)
        live = index < high
        seen = live[None, :] & mine[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - index[None, :] < WINDOW)
        if GAPS:
            seen = seen & ((index < gap) | (index >= behind))[None, :]
        slot = _slots(pages, at, index, live, PAGE)
        acc, top, weight = _meet(
            q, keys, values, slot, live, seen, kv, scale, cap, acc, top, weight, KV, DK, DV, PK, PV, CAP
        )
    if grows:
        lowest = size - (end - begin) + block * height
        needed = tl.where(branching > 0, size, tl.minimum(size, lowest + height))
        before = 0
        if WINDOW > 0:  # a chain's early entries lie outside the window of every row here
            before = tl.where(branching > 0, 0, tl.maximum(0, lowest - WINDOW + 1) // BS * BS)
        for e in range(before, needed, BS):
            index = e + tl.arange(0, BS)
            live = index < needed
            seen = live[None, :] & mine[:, None] & (index[None, :] <= entry[:, None])
            depth = index
            if TREES:  # noqa: SIM102 (decided when compiling; the next one when running)
                if branching > 0:
                    word = tl.load(words + row[:, None] * W + index[None, :] // 32, mask=seen, other=0)
                    seen = seen & (((word >> (index % 32)[None, :]) & 1) != 0)
                    depth = tl.load(depths + tl.load(depth_at + segment) + index, mask=live, other=0)
            if WINDOW > 0:
                seen = seen & (position[:, None] - (shared + depth)[None, :] < WINDOW)
            slot = _slots(pages, at, shared + index, live, PAGE)
            acc, top, weight = _meet(
                q, keys, values, slot, live, seen, kv, scale, cap, acc, top, weight, KV, DK, DV, PK, PV, CAP
            )
    if EARLY:
        gdc_launch_dependents()
    dv = tl.arange(0, PV)
    where = row[:, None] * (H * DV) + head[:, None] * DV + dv[None, :]
    _finish(
        acc, top, weight, where, mine[:, None] & (dv < DV)[None, :], sinks, head, tl.program_id(0) * KV + kv, part, active,
        partial, tops, weights, arrived, out, SPLITS, SINKS, BM, PV,
    )  # fmt: skip


class Room:
    """Where programs leave their parts, shared by all layers of one runner: made once, since graphs remember where it is."""

    def __init__(self, parts: int, rows: int, dim: int, device: torch.device) -> None:
        """For up to `parts` parts of tiles of (rows, dim) that have to meet in one launch."""
        self.rows = rows
        self.partial = torch.empty(parts * rows * dim, dtype=torch.float32, device=device)
        self.tops = torch.empty(parts * rows, dtype=torch.float32, device=device)
        self.weights = torch.empty_like(self.tops)
        self.arrived = torch.zeros(parts, dtype=torch.int32, device=device)

    def check(self, units: int, splits: int, rows: int, dim: int) -> None:
        """Programs that do not share a tile need no room."""
        fits = units <= len(self.arrived) and units * splits * rows * dim <= len(self.partial)
        assert splits == 1 or fits, f"no room for {units} tiles of ({rows}, {dim}) in {splits} parts"


@dataclass(frozen=True)
class Cut:
    """How an attention launch is cut: rows of a tile (query heads of several tokens), splits of the context."""

    rows: int
    splits: int
    keys: int = 64  # that a program looks at together
    warps: int = 4
    stages: int = 2


def fit(how: Cut, share: int, dims: tuple[int, int], itemsize: int, shared_memory: int) -> Cut:
    """The same cut with fewer stages, fewer keys at once, then fewer rows, until it fits the device's shared memory."""
    dk, dv = (max(16, triton.next_power_of_2(d)) for d in dims)

    def needs(c: Cut) -> int:
        return (c.keys * (dk + dv) * max(1, c.stages - 1) + c.rows * (dk + c.keys)) * itemsize + 1024

    while needs(how) > shared_memory and how.stages > 2:
        how = replace(how, stages=how.stages - 1)
    while needs(how) > shared_memory and how.keys > 16:
        how = replace(how, keys=how.keys // 2)
    while needs(how) > shared_memory and how.rows // 2 >= max(16, share):
        how = replace(how, rows=how.rows // 2)
    return how


def cut(layout: Layout, num_segments: int, heads: int, kv_heads: int, processors: int) -> Cut:
    """Enough programs to fill the device, and no more parts than that takes."""
    share = heads // kv_heads
    least = max(16, triton.next_power_of_2(share))
    if layout.single:
        units = num_segments * kv_heads
        if units > 2 * processors:
            return Cut(least, 1, keys=64, stages=3)
        return Cut(least, _splits(4 * processors // units, 16), keys=128)
    if layout.max_new > 64:
        return Cut(max(64, least), 1)
    tile = least if layout.max_new <= 16 else max(32, least)
    units = num_segments * triton.cdiv(layout.max_new, tile // share) * kv_heads
    if layout.max_new <= 16:
        return Cut(tile, _splits(4 * processors // units, 16), keys=128, stages=1)
    return Cut(tile, _splits(2 * processors // units, 8), keys=128, warps=8 if 4 * units < processors else 4)


def _splits(wanted: int, most: int) -> int:
    """A power of two from 1 to `most`."""
    return min(1 << max(wanted, 1).bit_length() - 1, most)


DETERMINISTIC_SPLITS, DETERMINISTIC_KEYS = 16, 128


def attention(
    query: torch.Tensor,  # (T, H, DK)
    keys: torch.Tensor,  # (S, KV, DK)
    values: torch.Tensor,  # (S, KV, DV)
    layout: Layout,
    room: Room,
    how: Cut,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    rowwise: bool = False,
) -> torch.Tensor:
    """(T, H, DV). `rowwise`: one token at a time even where several belong together."""
    t, heads, dk = query.shape
    kv_heads, dv = values.shape[1:]
    out = torch.empty(t, heads, dv, dtype=query.dtype, device=query.device)
    pads = max(16, triton.next_power_of_2(dk)), max(16, triton.next_power_of_2(dv))
    share = heads // kv_heads
    by_row = rowwise or layout.single
    blocks = triton.cdiv(layout.max_new, how.rows // share)
    units = (t if by_row else len(layout.start) * blocks) * kv_heads
    room.check(units, how.splits, how.rows, pads[1])
    parts = (room.partial, room.tops, room.weights, room.arrived, query if sinks is None else sinks)
    shape = (
        window or 0, softcap is not None, sinks is not None, layout.trees, heads, kv_heads, dk, dv, *pads,
        layout.page_size, how.splits,
    )  # fmt: skip
    numbers = (scale, softcap or 0.0)
    options = early_launch() | {"num_warps": how.warps, "num_stages": how.stages}
    if by_row:
        _rows[(t, kv_heads, how.splits)](
            query, keys, values, out, *parts, layout.pages, layout.at, layout.positions, layout.shared, layout.above,
            *numbers, layout.above.stride(0), *shape, how.rows, how.keys, **options,
        )  # fmt: skip
    else:
        gaps = (layout.start, layout.start) if layout.skip is None else (layout.skip, layout.resume)
        _trees[(len(layout.start) * blocks, kv_heads, how.splits)](
            query, keys, values, out, *parts, layout.start, layout.stop, layout.context, layout.entries, layout.table,
            layout.pages, layout.positions, layout.is_tree, layout.words, layout.depth_at, layout.depths,
            *gaps, *numbers, layout.words.stride(0), *shape, blocks, how.rows, how.keys, layout.skip is not None, **options,
        )  # fmt: skip
    return out
