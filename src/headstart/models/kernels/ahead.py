"""Steps that are launched before the last one is read: where their rows stand, and what n-grams draft, found on the device.

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


@triton.jit
def _advance(
    moves, sized, seat, root, stop, nodes, context, positions, shared, slots, tokens, table, pages, mail, texts, lengths,
    WIDTH, PAGE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """The host wrote this segment as if the last step had accepted nothing: move it by what was accepted."""
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
        tl.store(positions + row, position, mask=mine)
        tl.store(shared + row, position + 1, mask=mine)
        slot = _slots(pages, tl.load(table + segment), position, mine, PAGE)
        tl.store(slots + row, slot.to(tl.int32), mask=mine)
        tl.store(context + segment, tl.load(context + segment) + shift)
        tl.store(tokens + first, tl.load(texts + own * WIDTH + last))


@triton.jit
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


def advance(
    get: Callable[[str], torch.Tensor], layout: Layout, mail: torch.Tensor, texts: DeviceTexts, most: int
) -> None:
    """Put the rows of segments that move where they belong; take the size of drafts that only the mail tells.

    `get` finds the sections of the block, of which `layout` is the attention's view.
    """
    _advance[(len(layout.start),)](
        get("moves"), get("sized"), get("seat"), get("root"), layout.stop, get("nodes"), layout.context, layout.positions,
        layout.shared, layout.slots, get("tokens"), layout.table, layout.pages, mail, texts.tokens, texts.lengths,
        texts.width, layout.page_size, max(2, triton.next_power_of_2(most)), num_warps=1,
    )  # fmt: skip


def lookup(texts: DeviceTexts, seats: torch.Tensor, shortest: int, longest: int, most: int) -> torch.Tensor:
    """(B, 1 + most) int32: for each seat, how many tokens n-grams draft (most or none), and the tokens."""
    out = torch.empty(len(seats), 1 + most, dtype=torch.int32, device=seats.device)
    _lookup[(len(seats),)](
        texts.tokens, texts.lengths, seats, out, texts.width, most, shortest, longest, BLOCK,
        max(2, triton.next_power_of_2(most)), num_warps=4,
    )  # fmt: skip
    return out
