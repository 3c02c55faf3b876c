"""Trees that a head grows on the device, level by level, without the host: what `drafters.growing` does under the walk.

    begin      where the head reads on: the rows that the target's last step accepted, and the room for what is drafted
    gather     their features
    top        the likeliest tokens behind each row, and how likely they are
    frontier   candidates of a level get their values; the best of them are expanded next
    select     the best of all candidates are the tree; it leaves as mail

A line is one request of the proposal. Its candidates stand level by level, so a parent stands before its children.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.core import DeviceStep, DeviceTexts
from headstart.models.kernels.attention import Layout
from headstart.models.kernels.launch import early_launch
from headstart.models.kernels.noise import _noise

BLOCK = 2048  # tokens that one program looks at
MOST_TAPS = 4


@dataclass(frozen=True)
class Growth:
    """The shape of every draft: levels, candidates of a node, nodes expanded on a level, nodes of the tree."""

    depth: int
    top_k: int
    width: int
    nodes: int
    p_min: float = 0.0
    p_split: float = 0.0
    reads: int = 0  # tokens of a draft that the last step may have accepted, where that was deeper

    @property
    def rows(self) -> int:
        """Most rows that a step of the target accepts, its root included."""
        return max(self.depth, self.reads) + 1

    @property
    def expanded(self) -> int:
        """Nodes whose children are looked at."""
        return (self.depth - 1) * self.width

    @property
    def candidates(self) -> int:
        return self.top_k + self.expanded * self.top_k

    @property
    def words(self) -> int:
        """Of 32 bits, to say which expanded nodes a row sees; a power of two."""
        return 1 << (max(0, self.expanded - 1) // 32).bit_length()

    @property
    def mail(self) -> int:
        """Numbers that leave for each line: how many nodes there are, their tokens, their parents."""
        return 1 + 2 * self.nodes

    def pages(self, page_size: int) -> int:
        """Pages of a line's own, behind the target's last one."""
        return -(-max(1, self.expanded) // page_size)


# ------------------------------------------------------------------ begin
@triton.jit
def _begin(
    lines, seats, lengths, texts, WIDTH, verdict, block,
    features, tokens, positions, slots, last, stop, context, entries, own_pages, base, own_positions, own_slots,
    FIRST, SPAN, MOST, EXPANDED, LINES,
    ROWS: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One line: read on from the accepted rows. Pages behind the text's last one are the line's own."""
    line = tl.program_id(0)
    segment = tl.load(lines + line).to(tl.int64)
    seat = tl.load(seats + line).to(tl.int64)
    length = tl.load(lengths + seat)
    root, table, pages = block + tl.load(block), block + tl.load(block + 1), block + tl.load(block + 2)
    stride = tl.load(block + 3)
    accepted = tl.load(verdict + segment * stride)
    top = tl.load(root + segment)
    begin = length - 2 - accepted  # position of the root

    own = own_pages + line * MOST
    from_target = tl.load(table + segment)
    used = (length - 2) // PAGE + 1  # pages of what is real
    more = tl.arange(0, BE)
    for i in range(0, used, BE):
        page = i + more
        tl.store(own + page, tl.load(pages + from_target + page, mask=page < used, other=0), mask=page < used)
    for i in range(0, SPAN, BE):
        tl.store(own + used + i + more, FIRST + line * SPAN + i + more, mask=i + more < SPAN)
    tl.debug_barrier()

    each = tl.arange(0, PAD)
    some = each < ROWS
    real = each <= accepted
    position = tl.where(real, begin + each, 0)
    here = line * ROWS + each
    node = tl.load(verdict + segment * stride + 1 + each, mask=some & real & (each > 0), other=-1)
    tl.store(features + here, top + 1 + node, mask=some)
    tl.store(positions + here, position, mask=some)
    tl.store(tokens + here, tl.load(texts + seat * WIDTH + position + 1, mask=some & real, other=0), mask=some)
    slot = tl.load(own + position // PAGE, mask=some & real, other=0) * PAGE + position % PAGE
    tl.store(slots + here, tl.where(real, slot, -1), mask=some)
    tl.store(last + line, line * ROWS + accepted)
    tl.store(stop + line, line * ROWS + accepted + 1)
    tl.store(context + line, begin)
    tl.store(entries + line, accepted + 1)

    tl.store(base + line, length - 1)
    for i in range(0, EXPANDED, BE):
        entry = i + more
        mine = entry < EXPANDED
        index = length - 1 + entry
        there = (entry // W * LINES + line) * W + entry % W  # level by level, so that a level's rows stand together
        tl.store(own_positions + there, length - 1 + entry // W, mask=mine)
        free = tl.load(own + index // PAGE, mask=mine, other=0) * PAGE + index % PAGE
        tl.store(own_slots + there, free, mask=mine)


@triton.jit
def _gather(a, b, c, d, rows, out, SIZE, TAPS: tl.constexpr, BN: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    source = tl.load(rows + row).to(tl.int64) * SIZE + col
    here, mask = out + row * (TAPS * SIZE) + col, col < SIZE
    tl.store(here, tl.load(a + source, mask=mask), mask=mask)
    if TAPS > 1:
        tl.store(here + SIZE, tl.load(b + source, mask=mask), mask=mask)
    if TAPS > 2:
        tl.store(here + 2 * SIZE, tl.load(c + source, mask=mask), mask=mask)
    if TAPS > 3:
        tl.store(here + 3 * SIZE, tl.load(d + source, mask=mask), mask=mask)


# ------------------------------------------------------------------ levels
@triton.jit(do_not_specialize=["AHEAD"])
def _top(
    logits, targets, tokens, scores, best, at, tops, sums, arrived, seats, base, heats, seeds, V, AHEAD, R, SEATS,
    K: tl.constexpr, PK: tl.constexpr, MAPPED: tl.constexpr, BLOCKS: tl.constexpr, PB: tl.constexpr, BV: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The K likeliest tokens of a row in order, and log q of each. The last program of a row compares the blocks."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BV + tl.arange(0, BV)
    score = tl.load(logits + row * V + token, mask=token < V, other=-float("inf")).to(tl.float32)
    line = row // R
    seat = tl.load(seats + line).to(tl.int64)
    heat = tl.load(heats + seat)
    if heat > 0:
        known = token.to(tl.int64)
        if MAPPED:
            known = tl.load(targets + token, mask=token < V, other=0).to(tl.int64)
        noise = _noise(seeds, seat, SEATS, tl.load(base + line) + AHEAD, known)
        score = tl.where(token < V, tl.div_rn(score, heat) + noise, -float("inf"))
    highest = tl.max(score, 0)
    tl.store(tops + row * BLOCKS + block, highest)
    tl.store(sums + row * BLOCKS + block, tl.sum(tl.exp(score - tl.maximum(highest, -1e30)), 0))
    for k in tl.static_range(K):
        value = tl.max(score, 0)
        first = tl.min(tl.where(score == value, token, V - 1), 0)
        tl.store(best + (row * BLOCKS + block) * K + k, value)
        tl.store(at + (row * BLOCKS + block) * K + k, first)
        score = tl.where(token == first, -float("inf"), score)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == BLOCKS - 1:
        tl.store(arrived + row, 0)
        part = tl.arange(0, PB)
        highs = tl.load(tops + row * BLOCKS + part, mask=part < BLOCKS, other=-float("inf"), cache_modifier=".cg")
        parts = tl.load(sums + row * BLOCKS + part, mask=part < BLOCKS, other=0.0, cache_modifier=".cg")
        highest = tl.max(highs, 0)
        mass = highest + tl.log(tl.sum(parts * tl.exp(highs - highest), 0))
        each = tl.arange(0, PB * PK)
        there = (row * BLOCKS + each // PK) * K + each % PK
        mine = (each // PK < BLOCKS) & (each % PK < K)
        values = tl.load(best + there, mask=mine, other=-float("inf"), cache_modifier=".cg")
        firsts = tl.load(at + there, mask=mine, other=V, cache_modifier=".cg")
        for k in tl.static_range(K):
            value = tl.max(values, 0)
            first = tl.min(tl.where(values == value, firsts, V), 0)
            found = tl.minimum(first, V - 1)
            if MAPPED:
                tl.store(tokens + row * K + k, tl.load(targets + found).to(tl.int32))
            else:
                tl.store(tokens + row * K + k, found)
            tl.store(scores + row * K + k, tl.where(first < V, value - mass, -float("inf")))
            values = tl.where(firsts == first, -float("inf"), values)


@triton.jit(do_not_specialize=["LEVEL", "BASE"])
def _frontier(
    tokens, scores, cand_tokens, cand_values, cand_parents, values, nodes, words, next_tokens, parent_rows, LEVEL, BASE,
    CANDIDATES, p_min, p_split,
    R: tl.constexpr, K: tl.constexpr, W: tl.constexpr, PAD: tl.constexpr, WORDS: tl.constexpr, LAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Candidates of R rows: a value is the chance of the whole path. The W best are expanded: `values`, `nodes` and `words`
    (which expanded nodes they see) are those of the last frontier before, and of this one afterwards."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, PAD)
    mine, row = each < R * K, each // K
    score = tl.load(scores + line * R * K + each, mask=mine, other=-float("inf"))
    token = tl.load(tokens + line * R * K + each, mask=mine, other=0)
    first = tl.load(scores + line * R * K + row * K, mask=mine, other=-float("inf"))
    kept = (tl.exp(first) >= p_min) & ((each % K == 0) | (tl.exp(score) >= p_split))
    grown = each < tl.where(LEVEL > 0, R * K, 0)
    above = tl.load(values + line * W + row, mask=grown, other=0.0)
    parent = tl.load(nodes + line * W + row, mask=grown, other=-1)
    value = tl.where(kept, above + score, -float("inf"))
    here = line * CANDIDATES + BASE + each
    tl.store(cand_tokens + here, token, mask=mine)
    tl.store(cand_values + here, value, mask=mine)
    tl.store(cand_parents + here, parent, mask=mine)
    if not LAST:
        word = tl.arange(0, WORDS)
        # all rows of the last frontier are read before one of this is written
        before = tl.load(words + (line * W + row[:, None]) * WORDS + word[None, :], mask=grown[:, None], other=0)
        tl.debug_barrier()
        value = tl.where(mine, value, -float("inf"))
        left = mine
        for w in tl.static_range(W):
            top = tl.max(tl.where(left, value, -float("inf")), 0)
            pick = tl.min(tl.where(left & (value == top), each, PAD - 1), 0)
            picked = each == pick
            dead = top == -float("inf")
            left = left & (each != pick)
            at = line * W + w
            tl.store(values + at, top)
            tl.store(nodes + at, BASE + tl.minimum(pick, R * K - 1))
            tl.store(next_tokens + at, tl.where(dead, 0, tl.sum(tl.where(picked, token, 0), 0)))
            tl.store(parent_rows + at, line * R + tl.where(dead, 0, tl.minimum(pick, R * K - 1) // K))
            entry = LEVEL * W + w
            seen = tl.sum(tl.where(picked[:, None], before, 0), 0)
            bit = tl.full((WORDS,), 1, tl.int32) << (entry % 32)
            tl.store(words + at * WORDS + word, seen | tl.where(word == entry // 32, bit, 0))


@triton.jit
def _select(
    cand_tokens, cand_values, cand_parents, places, mail, CANDIDATES, NODES,
    PAD: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The NODES candidates of highest value, in their own order; of equal ones the first."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, PAD)
    mine = each < CANDIDATES
    at = line * CANDIDATES
    value = tl.load(cand_values + at + each, mask=mine, other=-float("inf"))
    rank = tl.zeros((PAD,), tl.int32)
    for start in range(0, CANDIDATES, CHUNK):
        other = start + tl.arange(0, CHUNK)
        rival = tl.load(cand_values + at + other, mask=other < CANDIDATES, other=-float("inf"))
        ahead = (rival[None, :] > value[:, None]) | (
            (rival[None, :] == value[:, None]) & (other[None, :] < each[:, None])
        )
        rank += tl.sum(ahead.to(tl.int32), 1)
    kept = mine & (rank < NODES) & (value > -float("inf"))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(places + at + each, place, mask=mine)
    tl.debug_barrier()
    parent = tl.load(cand_parents + at + each, mask=kept, other=-1)
    above = tl.load(places + at + parent, mask=kept & (parent >= 0), other=-1)
    out = mail + line * (1 + 2 * NODES)
    tl.store(out, tl.sum(kept.to(tl.int32), 0))
    tl.store(out + 1 + place, tl.load(cand_tokens + at + each, mask=kept, other=0), mask=kept)
    tl.store(out + 1 + NODES + place, above, mask=kept)


# ------------------------------------------------------------------ the room that a graph knows
class Field:
    """Everything that growing `lines` drafts reads and writes: made once, since graphs remember where it is."""

    def __init__(self, growth: Growth, lines: int, features: int, dtype: torch.dtype, vocab: int, max_len: int,
                 page_size: int, num_slots: int, device: torch.device) -> None:  # fmt: skip
        self.growth, self.lines, self.page_size = growth, lines, page_size
        self.span = growth.pages(page_size)
        self.most_pages = -(-max_len // page_size) + 1 + self.span
        self.first_page = -(-num_slots // page_size)  # of the lines' own

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=device)

        g = growth
        read, grown, m = lines * g.rows, max(1, lines * g.expanded), lines * g.candidates
        self.features = torch.zeros(read, features, dtype=dtype, device=device)
        self.rows, self.tokens, self.positions, self.slots = (ints(read) for _ in range(4))
        self.last, self.stop, self.context, self.entries, self.base = (ints(lines) for _ in range(5))
        self.pages = ints(lines * self.most_pages)
        self.table = torch.arange(lines, dtype=torch.int32, device=device) * self.most_pages
        self.own_positions, self.own_slots = ints(grown), ints(grown)
        self.cand_tokens, self.cand_parents, self.places, self.cand_values = ints(m), ints(m), ints(m), floats(m)
        few = lines * g.width
        self.values, self.nodes, self.words = floats(few), ints(few), ints(few * g.words)
        self.next_tokens, self.parent_rows = ints(few), ints(few)
        self.numbers = ints(4 * lines)  # segments of the last step, seats of the texts, where gaps begin and end
        self.mail = ints(lines, g.mail)
        self.blocks = triton.cdiv(vocab, BLOCK)
        most = max(lines, few)
        self.best, self.at = floats(most * self.blocks * g.top_k), ints(most * self.blocks * g.top_k)
        self.tops, self.sums = floats(most * self.blocks), floats(most * self.blocks)
        self.arrived = ints(most)
        self.top_tokens, self.top_scores = ints(most * g.top_k), floats(most * g.top_k)

    @property
    def device(self) -> torch.device:
        return self.mail.device

    # -------------------------------------------------------------- attention's views, of the first so many lines
    def reading(self, lines: int) -> Layout:
        """Of the rows that catch up: a chain of up to `growth.rows` for each line."""
        rows = self.growth.rows
        starts = torch.arange(lines, dtype=torch.int32, device=self.device) * rows
        return self._layout(
            lines, rows, starts, self.stop, self.context, self.entries[:lines], self.positions, self.slots, None
        )

    def growing(self, lines: int, level: int) -> Layout:
        """Of the frontier of a level: `width` rows of each line, in a tree of all that is expanded by now."""
        width = self.growth.width
        starts = torch.arange(lines, dtype=torch.int32, device=self.device) * width
        first = (level - 1) * self.lines * width
        return self._layout(
            lines, width, starts, starts + width, self.base, torch.full_like(starts, level * width),
            self.own_positions[first:], self.own_slots[first:], self.words,
        )  # fmt: skip

    def _layout(
        self, lines: int, rows: int, starts: torch.Tensor, stops: torch.Tensor, context: torch.Tensor, entries: torch.Tensor,
        positions: torch.Tensor, slots: torch.Tensor, words: torch.Tensor | None,
    ) -> Layout:  # fmt: skip
        """`shared`, `above` and `depths` serve kernels that take one row at a time, or a window; heads have neither."""
        t, none = lines * rows, torch.zeros(lines * rows, 1, dtype=torch.int32, device=self.device)
        table = self.table[:lines]
        return Layout(
            starts, stops[:lines], context[:lines], entries, table, self.pages, table.repeat_interleave(rows),
            positions[:t], positions[:t], slots[:t], torch.full_like(starts, words is not None),
            none if words is None else words[: t * self.growth.words].view(t, -1), none, torch.zeros_like(starts),
            torch.zeros_like(starts), self.page_size, rows, words is not None, self.numbers[2 * lines :],
            self.numbers[3 * lines :],
        )  # fmt: skip


def begin(field: Field, step: DeviceStep, taps: list[torch.Tensor], texts: DeviceTexts, count: int) -> None:
    """Say where each line reads on behind the target's last step, and gather the features of those rows."""
    g = field.growth
    _begin[(count,)](
        field.numbers, field.numbers[count:], texts.lengths, texts.tokens, texts.width, step.verdict, step.block,
        field.rows, field.tokens, field.positions, field.slots, field.last, field.stop, field.context, field.entries,
        field.pages, field.base,
        field.own_positions, field.own_slots, field.first_page, field.span, field.most_pages, g.expanded, field.lines,
        g.rows, triton.next_power_of_2(max(2, g.rows)), g.width, field.page_size, 64, num_warps=1,
    )  # fmt: skip
    gather(taps, field.rows[: count * g.rows], field.features)


def gather(taps: list[torch.Tensor], rows: torch.Tensor, out: torch.Tensor) -> None:
    """To `out` (T, taps · hidden): these rows (T,) of all taps side by side."""
    size, count = taps[0].shape[1], len(taps)
    _gather[(len(rows), triton.cdiv(size, 1024))](
        *taps, *taps[:1] * (MOST_TAPS - count), rows, out, size, count, 1024, num_warps=4
    )


def top(
    field: Field, logits: torch.Tensor, targets: torch.Tensor | None, texts: DeviceTexts, lines: int, level: int
) -> None:
    """The likeliest tokens of these rows, in the target's vocabulary, to `top_tokens` and `top_scores`: under the noise of
    their positions, where a text is sampled."""
    rows, vocab = logits.shape
    k, blocks = field.growth.top_k, triton.cdiv(vocab, BLOCK)
    assert blocks <= field.blocks and rows <= len(field.arrived)
    _top[(rows, blocks)](
        logits, logits if targets is None else targets, field.top_tokens, field.top_scores, field.best, field.at, field.tops,
        field.sums, field.arrived, field.numbers[lines:], field.base, texts.heats, texts.seeds, vocab, level + 1, rows // lines,
        texts.seeds.stride(0), k, triton.next_power_of_2(k), targets is not None, blocks,
        triton.next_power_of_2(blocks), BLOCK, **early_launch(), num_warps=8,
    )  # fmt: skip


def frontier(field: Field, lines: int, level: int) -> None:
    """Take the candidates of this level in, level 0 being the root's, and choose whom to expand next."""
    g = field.growth
    rows = g.width if level else 1
    start = 0 if not level else g.top_k + (level - 1) * g.width * g.top_k
    pad = triton.next_power_of_2(max(2, rows * g.top_k))
    _frontier[(lines,)](
        field.top_tokens, field.top_scores, field.cand_tokens, field.cand_values, field.cand_parents, field.values,
        field.nodes, field.words, field.next_tokens, field.parent_rows, level, start, g.candidates, g.p_min, g.p_split,
        rows, g.top_k, g.width, pad, g.words, level == g.depth - 1, **early_launch(), num_warps=1,
    )  # fmt: skip


def select(field: Field, lines: int) -> torch.Tensor:
    """(lines, 1 + 2 nodes): how many nodes each tree has, their tokens, their parents."""
    g = field.growth
    _select[(lines,)](
        field.cand_tokens, field.cand_values, field.cand_parents, field.places, field.mail, g.candidates, g.nodes,
        triton.next_power_of_2(max(2, g.candidates)), min(32, triton.next_power_of_2(g.candidates)), **early_launch(),
        num_warps=4,
    )  # fmt: skip
    return field.mail[:lines]
