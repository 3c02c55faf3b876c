"""Steps that are launched before the last one is read: where their rows stand, how their trees branch, and what n-grams
draft, found on the device.

A request's text lies on the device (`Texts`): every walk appends to it. So a row can be told its position, slot and token
there, and a draft that copies from the text needs nobody else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from headstart.core import DeviceTexts
from headstart.models.kernels.attention import Layout, _slots

BLOCK = 1024  # places of a text that are looked at together
HEADER = tl.constexpr(7)  # numbers that say to which seat tokens go, and how its text is sampled
USUAL = 16  # tokens up to which drafts of n-grams share one kernel, however many are asked for


@triton.jit
def _advance(
    moves, sized, seat, root, stop, nodes, context, positions, shared, slots, tokens, is_tree, table, pages, mail, texts,
    lengths, WIDTH, PAGE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """The host wrote this segment as if the last step had accepted nothing: move it by what was accepted. A draft's nodes lie
    one behind the other, in whatever positions they are."""
    segment = tl.program_id(0)
    told = tl.load(sized + segment)
    if (told >= 0) & (tl.load(nodes + segment) >= 0):
        tl.store(nodes + segment, tl.minimum(tl.load(nodes + segment), tl.load(mail + told)))
    if tl.load(moves + segment) > 0:
        own = tl.load(seat + segment).to(tl.int64)
        last = tl.load(lengths + own) - 1
        first = tl.load(root + segment)
        shift = last - tl.load(positions + first)
        row = first + tl.arange(0, PAD)
        mine = row < tl.load(stop + segment)
        position = tl.load(positions + row, mask=mine, other=0) + shift
        before = tl.load(context + segment) + shift
        tl.store(positions + row, position, mask=mine)
        tl.store(shared + row, tl.where(tl.load(is_tree + segment) > 0, before, position + 1), mask=mine)
        slot = _slots(pages, tl.load(table + segment), last + row - first, mine, PAGE)
        tl.store(slots + row, slot.to(tl.int32), mask=mine)
        tl.store(context + segment, before)
        tl.store(tokens + first, tl.load(texts + own * WIDTH + last))


@triton.jit
def _plant(
    grown, root, stop, nodes, entries, positions, slots, parent, words, above, depth_at, depths, mail, W, A,
    PAD: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The host wrote a tree of which it knew no more than the size: this is its shape. Entry 0 is the root, node i is entry
    i + 1. Rows behind the nodes that there are belong to nobody."""
    segment = tl.program_id(0)
    told, size = tl.load(grown + segment), tl.load(nodes + segment)
    if (told >= 0) & (size >= 0):
        first, end = tl.load(root + segment), tl.load(stop + segment)
        fewer = end - first - 1 - size
        tl.store(stop + segment, end - fewer)
        tl.store(entries + segment, tl.load(entries + segment) - fewer)
        node = tl.arange(0, PAD)
        row = first + 1 + node
        mine, empty = node < size, (node >= size) & (row < end)
        tl.store(slots + row, -1, mask=empty)
        up = tl.load(mail + told + node, mask=mine, other=-1)
        tl.store(parent + row, up + 1, mask=mine)
        word, lane = tl.arange(0, WORDS), tl.full((PAD, WORDS), 1, tl.int32)
        seen = tl.where(word[None, :] == 0, lane, 0)
        depth = tl.zeros((PAD,), tl.int32)
        here = tl.where(mine, node, -1)
        while tl.max(here, 0) >= 0:
            entry = here + 1
            bit = tl.where(word[None, :] == (entry // 32)[:, None], lane << (entry % 32)[:, None], 0)
            seen = seen | tl.where((here >= 0)[:, None], bit, 0)
            depth += (here >= 0).to(tl.int32)
            here = tl.load(mail + told + here, mask=here >= 0, other=-1)
        tl.store(words + row[:, None] * W + word[None, :], seen, mask=mine[:, None] & (word < W)[None, :])
        tl.store(positions + row, tl.load(positions + first) + depth, mask=mine)
        tl.store(depths + tl.load(depth_at + segment) + 1 + node, depth, mask=mine)
        here, level = tl.where(mine, node, -1), depth
        while tl.max(here, 0) >= 0:
            tl.store(above + row * A + level, here + 1, mask=here >= 0)
            here = tl.load(mail + told + here, mask=here >= 0, other=-1)
            level -= 1


@triton.jit(do_not_specialize=["MOST"])
def _lookup(
    texts, lengths, seats, out, WIDTH, MOST,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """What followed the latest place where the longest ending of the text stood before; how many tokens, then the tokens."""
    line = tl.program_id(0)
    own = tl.load(seats + line).to(tl.int64)
    text, length = texts + own * WIDTH, tl.load(lengths + own)
    best = tl.zeros((), tl.int64)
    for begin in range(0, length, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        same = (place > 0) & (place < length)
        matched = tl.zeros((BLOCK,), tl.int64)
        for k in tl.static_range(1, LONGEST + 1):
            ending = tl.load(text + length - k, mask=k <= length, other=-1)
            same = same & (place >= k)
            same = same & (tl.load(text + place - k, mask=same, other=-2) == ending)
            matched += same.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(matched >= SHORTEST, matched * WIDTH + place, 0), 0))
    found = best > 0
    place = (best % WIDTH).to(tl.int32)
    each = tl.arange(0, PAD)
    around = tl.where(found, length - place, 1)  # behind the end, what was copied goes on
    token = tl.load(text + place + each % around, mask=each < tl.where(found, MOST, 0), other=0)
    here = out + line * (1 + MOST)
    tl.store(here, tl.where(found, MOST, 0))
    tl.store(here + 1 + each, token, mask=each < MOST)


@triton.jit
def _sit(told, tokens, lengths, heats, seeds, WIDTH, SEATS, BLOCK: tl.constexpr):
    """`told`: for each text where it begins in here; then the texts: the seat, where its new tokens begin, how many there are,
    the length of the text, its temperature, both words of its seed, and the tokens."""
    own = told + tl.load(told + tl.program_id(1))
    seat, known, count = tl.load(own).to(tl.int64), tl.load(own + 1), tl.load(own + 2)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(own + HEADER + place, mask=place < count, other=0)
    tl.store(tokens + seat * WIDTH + known + place, token, mask=place < count)
    if tl.program_id(0) == 0:
        tl.store(lengths + seat, tl.load(own + 3))
        tl.store(heats + seat, tl.load(own + 4))
        tl.store(seeds + seat, tl.load(own + 5))
        tl.store(seeds + SEATS + seat, tl.load(own + 6))


def sit(texts: DeviceTexts, told: torch.Tensor, count: int, longest: int) -> None:
    """Write tokens of so many texts to their seats, and how they are sampled: `told` is what `_sit` says."""
    _sit[(max(1, triton.cdiv(longest, BLOCK)), count)](
        told, texts.tokens, texts.lengths, texts.heats.view(torch.int32), texts.seeds, texts.width, len(texts.lengths), BLOCK,
        num_warps=4,
    )  # fmt: skip


def advance(
    get: Callable[[str], torch.Tensor], layout: Layout, mail: torch.Tensor, texts: DeviceTexts, most: int
) -> None:
    """Put the rows of segments that move where they belong; take the size of drafts that only the mail tells.

    `get` finds the sections of the block, of which `layout` is the attention's view.
    """
    _advance[(len(layout.start),)](
        get("moves"), get("sized"), get("seat"), get("root"), layout.stop, get("nodes"), layout.context, layout.positions,
        layout.shared, layout.slots, get("tokens"), layout.is_tree, layout.table, layout.pages, mail, texts.tokens,
        texts.lengths, texts.width, layout.page_size, max(2, triton.next_power_of_2(most)), num_warps=1,
    )  # fmt: skip


def plant(get: Callable[[str], torch.Tensor], layout: Layout, mail: torch.Tensor, most: int) -> None:
    """Give trees whose parents are in the mail their shape: behind one known token each, after `advance`."""
    width = layout.words.shape[1]
    _plant[(len(layout.start),)](
        get("grown"), get("root"), layout.stop, get("nodes"), layout.entries, layout.positions, layout.slots, get("parent"),
        layout.words, layout.above, layout.depth_at, layout.depths, mail, width, layout.above.stride(0),
        max(2, triton.next_power_of_2(most)), max(1, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


def lookup(texts: DeviceTexts, seats: torch.Tensor, shortest: int, longest: int, most: int) -> torch.Tensor:
    """(B, 1 + most) int32: for each seat, how many tokens n-grams draft (most or none), and the tokens."""
    out = torch.empty(len(seats), 1 + most, dtype=torch.int32, device=seats.device)
    _lookup[(len(seats),)](
        texts.tokens, texts.lengths, seats, out, texts.width, most, shortest, longest, BLOCK,
        max(USUAL, triton.next_power_of_2(most)), num_warps=4,
    )  # fmt: skip
    return out
