"""The end of a step on the device: each row's token, the walk down the draft, and accepted keys and values moving up.

The same rules as `sampling` and `verify`. Rows that leave out unlikely tokens look at the SHORTLIST likeliest, in order; where
what they keep may reach beyond that list, they choose nothing (-1), and the host decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.core import DeviceTexts
from headstart.models.kernels.attention import Layout, _slots
from headstart.models.kernels.launch import early_launch
from headstart.models.kernels.noise import _noise
from headstart.sampling import SHORTLIST

BLOCK = 4096  # tokens that one program looks at


@triton.jit
def _choose(
    logits, rows, temperature, seeds, positions, chosen, best, at, arrived, V, SEEDS,
    MAPPED: tl.constexpr, BLOCKS: tl.constexpr, PAD: tl.constexpr, BV: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """argmax of log p + g over one block of tokens; the last program of a row compares the blocks."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = line
    if MAPPED:
        row = tl.load(rows + line)
    token = block * BV + tl.arange(0, BV)
    score = tl.load(logits + line * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
    heat = tl.load(temperature + row)
    if heat > 0:
        noise = _noise(seeds, row, SEEDS, tl.load(positions + row) + 1, token.to(tl.int64))
        score = tl.div_rn(score, heat) + noise
        score = tl.where(token < V, score, -float("inf"))
    top = tl.max(score, 0)
    first = tl.min(tl.where(score == top, token, V - 1), 0)
    tl.store(best + line * BLOCKS + block, top)
    tl.store(at + line * BLOCKS + block, first)
    tl.debug_barrier()
    if tl.atomic_add(arrived + line, 1, sem="acq_rel") == BLOCKS - 1:
        tl.store(arrived + line, 0)
        each = tl.arange(0, PAD)
        tops = tl.load(best + line * BLOCKS + each, mask=each < BLOCKS, other=-float("inf"), cache_modifier=".cg")
        firsts = tl.load(at + line * BLOCKS + each, mask=each < BLOCKS, other=0, cache_modifier=".cg")
        tl.store(chosen + row, tl.min(tl.where(tops == tl.max(tops, 0), firsts, V - 1), 0))


@triton.jit
def _mass(
    logits, rows, temperature, top_p, best, sums, mass, arrived, V,
    MAPPED: tl.constexpr, BLOCKS: tl.constexpr, PAD: tl.constexpr, BV: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """log of the sum of exp(logits / temperature) of each row that needs it."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = line
    if MAPPED:
        row = tl.load(rows + line)
    heat = tl.load(temperature + row)
    if (heat > 0) & (tl.load(top_p + row) < 1):
        token = block * BV + tl.arange(0, BV)
        score = tl.load(logits + line * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
        score = tl.div_rn(score, heat)
        top = tl.max(score, 0)
        tl.store(best + line * BLOCKS + block, top)
        tl.store(sums + line * BLOCKS + block, tl.sum(tl.exp(score - tl.maximum(top, -1e30)), 0))
        tl.debug_barrier()
        if tl.atomic_add(arrived + line, 1, sem="acq_rel") == BLOCKS - 1:
            tl.store(arrived + line, 0)
            each = tl.arange(0, PAD)
            tops = tl.load(best + line * BLOCKS + each, mask=each < BLOCKS, other=-float("inf"), cache_modifier=".cg")
            parts = tl.load(sums + line * BLOCKS + each, mask=each < BLOCKS, other=0.0, cache_modifier=".cg")
            highest = tl.max(tops, 0)
            tl.store(mass + line, highest + tl.log(tl.sum(parts * tl.exp(tops - highest), 0)))


@triton.jit
def _short(
    logits, ids, rows, temperature, seeds, positions, top_k, top_p, min_p, mass, chosen, V, SEEDS, COUNT,
    MAPPED: tl.constexpr, LENIENT: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The choice of a row that leaves out unlikely tokens, among its COUNT likeliest `ids`."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    row = line
    if MAPPED:
        row = tl.load(rows + line)
    heat, most = tl.load(temperature + row), tl.load(top_k + row)
    share, least = tl.load(top_p + row), tl.load(min_p + row)
    if (heat > 0) & ((most > 0) | (share < 1) | (least > 0)):
        rank = tl.arange(0, PAD)
        token = tl.load(ids + line * COUNT + rank, mask=rank < COUNT, other=0).to(tl.int64)
        value = tl.load(logits + line * V + token, mask=rank < COUNT, other=-float("inf")).to(tl.float32)
        value = tl.div_rn(value, heat)
        # sort by value, of equal ones the lower token first: both in one number that compares the same way
        bits = value.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = tl.sort((bits.to(tl.int64) << 32) | (0xFFFFFFFF - token), descending=True)
        token = 0xFFFFFFFF - (order & 0xFFFFFFFF)
        bits = (order >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        top, last = tl.max(value, 0), tl.min(tl.where(rank < COUNT, value, float("inf")), 0)
        inside = rank < tl.where(most > 0, tl.minimum(most, COUNT), COUNT)
        p = tl.where(inside, tl.exp(value - top), 0.0)
        p = p / tl.where(most > 0, tl.sum(p, 0), tl.exp(tl.load(mass + line) - top))
        kept = inside & (value > -float("inf"))
        kept = kept & (tl.where(share < 1, tl.cumsum(p, 0) - p, -1.0) < share)
        kept = kept & (value >= tl.where(least > 0, top + tl.log(least), -float("inf")))
        noise = _noise(seeds, row, SEEDS, tl.load(positions + row) + 1, token)
        score = tl.where(kept, value + noise, -float("inf"))
        winner = tl.min(tl.where(score == tl.max(score, 0), token, V), 0)
        reaches = tl.max(tl.where(kept & (value == last), 1, 0), 0) * tl.where(COUNT < V, 1, 0)
        if (most > COUNT) & (share < 1):  # the mass that top-p divides lies beyond the list too
            reaches = 1
        if LENIENT:
            reaches = 0
        tl.store(chosen + row, tl.where(reaches > 0, -1, winner).to(tl.int32))


@triton.jit
def _walk(
    chosen, tokens, parent, root, nodes, verdict, stride, seat, texts, lengths, WIDTH,
    WRITES: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Follow the chosen tokens down the draft: how many nodes were accepted (-1: the host decides), the bonus, the nodes.
    What was chosen joins the text of the segment's seat."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.program_id(0).to(tl.int64)
    begin, size = tl.load(root + segment).to(tl.int64), tl.load(nodes + segment)
    if size >= 0:
        node = tl.arange(0, PAD)
        mine = node < size
        above = tl.load(parent + begin + 1 + node, mask=mine, other=-1)
        token = tl.load(tokens + begin + 1 + node, mask=mine, other=0)
        here, accepted = 0, 0
        own, length = -1, 0
        if WRITES:
            own = tl.load(seat + segment)
            length = tl.load(lengths + own, mask=own >= 0, other=0)
            line = texts + own.to(tl.int64) * WIDTH + length
        want = tl.load(chosen + begin)  # -1 is no node's token, so the walk ends where nothing was chosen
        match = tl.min(tl.where(mine & (above == here) & (token == want), node, PAD), 0)
        while match < PAD:
            tl.store(verdict + segment * stride + 2 + accepted, match)
            if WRITES:
                tl.store(line + accepted, want, mask=(own >= 0) & (length + accepted < WIDTH))
            accepted += 1
            here = match + 1
            want = tl.load(chosen + begin + here)
            match = tl.min(tl.where(mine & (above == here) & (token == want), node, PAD), 0)
        tl.store(verdict + segment * stride, tl.where(want < 0, -1, accepted))
        tl.store(verdict + segment * stride + 1, want)
        if WRITES:
            grows = (own >= 0) & (want >= 0) & (length + accepted < WIDTH)
            tl.store(line + accepted, want, mask=grows)
            tl.store(lengths + own, length + accepted + 1, mask=grows)


@triton.jit
def _move(
    pool, layer, verdict, stride, context, entries, nodes, table, pages, size,
    PAGE: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Accepted nodes move up behind their context, in order: a node never moves over one that is still to move."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    segment, depth = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    drafted = tl.load(nodes + segment)
    if drafted > 0:
        base = tl.load(context + segment) + tl.load(entries + segment) - drafted
        begin, count = tl.load(table + segment), tl.load(verdict + segment * stride)
        col = tl.arange(0, PAD)
        here = pool + depth * layer + col
        for k in range(count):
            node = tl.load(verdict + segment * stride + 2 + k)
            if node != k:
                source = _slots(pages, begin, base + node, True, PAGE)
                target = _slots(pages, begin, base + k, True, PAGE)
                tl.store(here + target * size, tl.load(here + source * size, mask=col < size), mask=col < size)


@dataclass
class Asks:
    """What each row asks for, (T,) on the device; see `Choice`. It chooses the token behind its own position."""

    temperature: torch.Tensor
    seeds: torch.Tensor  # (2, T)
    positions: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Desk:
    """Room to compare blocks of tokens in, for up to `rows` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.blocks = triton.cdiv(vocab, BLOCK)
        self.best = torch.empty(rows, self.blocks, dtype=torch.float32, device=device)
        self.at = torch.empty(rows, self.blocks, dtype=torch.int32, device=device)
        self.sums = torch.empty(rows, self.blocks, dtype=torch.float32, device=device)
        self.mass = torch.empty(rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


def choose(
    logits: torch.Tensor, asks: Asks, chosen: torch.Tensor, desk: Desk, rows: torch.Tensor | None = None
) -> None:
    """Line i of the logits chooses the token of row `rows[i]` (of row i without `rows`), into `chosen`."""
    lines, vocab = logits.shape
    assert lines <= len(desk.arrived), f"{lines} lines, room for {len(desk.arrived)}"
    _choose[(lines, desk.blocks)](
        logits, chosen if rows is None else rows, asks.temperature, asks.seeds, asks.positions, chosen, desk.best, desk.at,
        desk.arrived, vocab, asks.seeds.stride(0), rows is not None, desk.blocks, triton.next_power_of_2(desk.blocks), BLOCK,
        **early_launch(), num_warps=8,
    )  # fmt: skip


def choose_short(
    logits: torch.Tensor, asks: Asks, chosen: torch.Tensor, desk: Desk, rows: torch.Tensor | None, lenient: bool
) -> None:
    """Choose anew for the rows that leave out unlikely tokens; -1 where the short list will not do, unless `lenient`."""
    lines, vocab = logits.shape
    count, where = min(SHORTLIST, vocab), chosen if rows is None else rows
    _mass[(lines, desk.blocks)](
        logits, where, asks.temperature, asks.top_p, desk.best, desk.sums, desk.mass, desk.arrived, vocab,
        rows is not None, desk.blocks, triton.next_power_of_2(desk.blocks), BLOCK, **early_launch(), num_warps=8,
    )  # fmt: skip
    ids = logits.topk(count, dim=-1, sorted=False).indices
    _short[(lines,)](
        logits, ids, where, asks.temperature, asks.seeds, asks.positions, asks.top_k, asks.top_p, asks.min_p, desk.mass,
        chosen, vocab, asks.seeds.stride(0), count, rows is not None, lenient, triton.next_power_of_2(count),
        **early_launch(), num_warps=8,
    )  # fmt: skip


def walk(
    chosen: torch.Tensor, tokens: torch.Tensor, parent: torch.Tensor, root: torch.Tensor, nodes: torch.Tensor,
    verdict: torch.Tensor, most: int, seat: torch.Tensor | None = None, texts: DeviceTexts | None = None,
) -> None:  # fmt: skip
    """verdict[b] = accepted nodes, bonus, and the nodes; segments with nodes = -1 are left alone. At most `most` nodes."""
    kept = (seat, texts.tokens, texts.lengths, texts.width) if texts is not None else (root, root, root, 0)
    _walk[(len(root),)](
        chosen, tokens, parent, root, nodes, verdict, verdict.stride(0), *kept, texts is not None,
        max(2, triton.next_power_of_2(most)),
        **early_launch(), num_warps=1,
    )  # fmt: skip


def move(pool: torch.Tensor, verdict: torch.Tensor, layout: Layout, nodes: torch.Tensor) -> None:
    """Compact the accepted nodes of every segment in all layers of a pool (L, S, heads, dim)."""
    size = pool.shape[2] * pool.shape[3]
    _move[(len(nodes), len(pool))](
        pool, pool.stride(0), verdict, verdict.stride(0), layout.context, layout.entries, nodes, layout.table,
        layout.pages, size, layout.page_size, triton.next_power_of_2(size), **early_launch(), num_warps=4,
    )  # fmt: skip
