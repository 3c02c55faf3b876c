"""The lean forward with its small operations as compiled loops: for a few rows on CPUs, where torch's own cost the most.

Products of a few rows go to a team of threads, others stay with torch. Between them the residual stream is numpy's view of the
same memory. Prefills of many rows take the lean forward as it is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from headstart.core import Segment
from headstart.models.attention import Attends, Context, segment_mask
from headstart.models.lean import LeanModel, Product, race
from headstart.progress import note, status

MOST_ROWS = 64  # above, the lean forward
BETWEEN = 6  # rows of a product for which it is measured who computes it faster,
SAMPLE, TRIES = 128 << 20, 5  # and bytes of its weights, and how often
MOST_SCORES = 3072  # rows x slots of one request, above which torch's attention on all cores is faster
CHANGING = ("dynamic", "longrope")  # kinds of rotation whose angles depend on the length of the text


@functools.cache
def load_loops() -> Any:
    """The compiled loops, or None where that cannot be; says so once. A machine's first start takes some seconds."""
    if find_spec("numba") is None:
        note("Steps on a CPU are faster with compiled loops: pip install 'headstart[cpu]'.")
        return None
    try:
        with status("Preparing loops for this CPU"):
            from headstart.models import loops

            return loops
    except Exception as error:  # a numba that does not fit this Python or this chip, or nowhere to keep the result
        why = (str(error).splitlines() or [type(error).__name__])[0]
        note(f"numba cannot compile loops here, so steps on this CPU are slower: {why}")
        return None


@functools.cache
def load_team() -> Any:
    """The module of products by a team, or None where that cannot be."""
    if load_loops() is None or os.name != "posix":
        return None
    try:
        with status("Preparing loops for this CPU"):
            from headstart.models import team

            return team
    except Exception as error:
        note(f"numba cannot compile products here, so drafts cost more on this CPU: {error}")
        return None


def _is_plain(product: Product) -> bool:
    weight = product.weight
    return type(product) is Product and weight.dtype == torch.float32 and weight.is_contiguous()


def available() -> bool:
    return load_loops() is not None


@dataclass
class Reading:
    """Which slots the rows of a forward read, as `loops.attend` wants it."""

    pieces: np.ndarray  # (B, 5)
    slots: np.ndarray
    visible: np.ndarray
    most_rows: int
    most_slots: int

    @staticmethod
    def of(segments: Sequence[Segment], window: int | None, lanes: int) -> Reading:
        pieces, slots, visible, at, seen = [], [], [], 0, 0
        for s in segments:
            n = -(-len(s.slots) // lanes) * lanes
            own = np.full(n, s.slots[0], np.uint64)
            own[: len(s.slots)] = s.slots
            mask = np.zeros((s.num_new, n), np.float32)
            mask[:, : len(s.slots)] = segment_mask(s, window)
            pieces.append((s.start, s.num_new, at, n, seen))
            slots.append(own)
            visible.append(mask.reshape(-1))
            at, seen = at + n, seen + mask.size
        most = max(p[1] for p in pieces), max(p[3] for p in pieces)
        return Reading(np.array(pieces, np.int64), np.concatenate(slots), np.concatenate(visible), *most)


class Room:
    """Memory for forwards of so many rows, as tensors for products and as arrays for loops."""

    def __init__(self, x: torch.Tensor, h: torch.Tensor, act: torch.Tensor, out: torch.Tensor) -> None:
        self.x, self.h, self.act, self.out = x, h, act, out
        self.x_, self.h_, self.act_, self.out_ = (t.numpy() for t in (x, h, act, out))

    def first(self, rows: int) -> Room:
        return Room(self.x[:rows], self.h[:rows], self.act[:rows], self.out[:rows])


class Reads:
    """What attention through loops needs to know of a network, and the room that it works in."""

    def __init__(self, num_heads: int, num_kv: int, head_dim: int, scale: float) -> None:
        self.loops = load_loops()
        self.num_heads, self.num_kv, self.head_dim, self.scale = num_heads, num_kv, head_dim, scale
        self._pool: list[torch.Tensor] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._scores = self._block = np.empty((0, 0), np.float32)

    def arrays(self, context: Context) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of each layer."""
        if self._pool is not context.keys:
            self._pool = context.keys
            self._arrays = [(k.numpy(), v.numpy()) for k, v in zip(context.keys, context.values, strict=True)]
        return self._arrays

    def scratch(self, rows: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Room for `rows` query rows, and for their scores over `slots`."""
        rows = -(-rows // self.loops.ROWS) * self.loops.ROWS
        if rows > len(self._block):
            self._block = np.zeros((rows, self.head_dim), np.float32)
        if rows > self._scores.shape[0] or slots > self._scores.shape[1]:
            most = max(rows, self._scores.shape[0]), max(slots, self._scores.shape[1])
            self._scores = np.empty(most, np.float32)
        return self._block, self._scores

    def release(self) -> None:
        """Let go of the pool."""
        self._pool, self._arrays = [], []


class LoopedModel(LeanModel):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.loops = load_loops()
        self.reads = Reads(self.num_heads, self.num_kv, self.head_dim, self.scale)
        self._rooms: dict[int, Room] = {}
        self._cos = self._sin = np.empty((0, 0), np.float32)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Attends,
        rows: torch.Tensor,
        taps: tuple[int, ...],
        layers: int | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if len(tokens) > MOST_ROWS or not isinstance(context, Context):
            return super().__call__(tokens, positions, context, rows, taps, layers)
        team = self._team
        with team.at_work() if team and len(tokens) <= team.most_rows else contextlib.nullcontext():
            return self._few(tokens, positions, context, rows, taps, layers)

    def _few(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        rows: torch.Tensor,
        taps: tuple[int, ...],
        layers: int | None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        count = len(tokens)
        room = self._room(count)
        torch.index_select(self.embed.weight, 0, tokens, out=room.x)
        cos, sin = self._angles(positions)
        hidden = {0: room.x.clone()} if 0 in taps else {}
        reader = Reader(self.reads, context, room.out)
        self.loops.norm(room.x_, self._layers[0].norm_in, self.eps, room.h_)
        blocks = list(zip(self.blocks, self._layers, strict=True))[:layers]
        for i, (block, own) in enumerate(blocks):
            heads = block.qkv(room.h).numpy().reshape(count, -1, self.head_dim)
            self.loops.rotate(heads, self.num_heads, own.gains, self.eps, cos, sin, *reader.pools[i], reader.write)
            mixed = block.out(reader.read(i, heads, block.window))
            self.loops.add_norm(room.x_, mixed.numpy(), own.norm_mlp, self.eps, room.h_)
            self.loops.gate(block.gate_up(room.h).numpy(), room.act_)
            last = i + 1 == len(blocks)
            following = self._final if last else self._layers[i + 1].norm_in
            self.loops.add_norm(room.x_, block.down(room.act).numpy(), following, self.eps, room.h_)
            if i + 1 in taps:  # the last as transformers reports it: after the final norm
                hidden[i + 1] = room.h.clone() if last else room.x.clone()
        return self.head(room.h if len(rows) == count else room.h[rows]), hidden

    @functools.cached_property
    def _team(self) -> Any:
        """Threads for products of a few rows; None where torch computes them, as with weights of 8 or 4 bits."""
        if not all(_is_plain(p) for p in self.products) or (made := load_team()) is None:
            return None
        team = made.Team(torch.get_num_threads())
        if not self.once(f"a team of {team.count} reads twice", lambda: self._reads_twice(team)):
            team.most_rows = made.ROWS
        for product in self.products:
            product.team = team
        return team

    @torch.inference_mode()
    def _reads_twice(self, team: Any) -> bool:
        """Is the team faster than torch where it has to read the weights twice? With wide vectors torch computes several rows
        nearly as fast as one. Measured on so many weights that caches do not hold them."""
        products = self.products[1:]  # without the head, which may be very large
        sizes = itertools.accumulate(p.weight.numel() * p.weight.element_size() for p in products)
        some = [p for p, size in zip(products, sizes, strict=True) if size < SAMPLE] or products[:1]
        x = {p.inputs: torch.zeros(BETWEEN, p.inputs) for p in some}

        def by_team(products: list[Product]) -> None:
            with team.at_work():
                for p in products:
                    team.product(x[p.inputs], p.weight)

        def by_torch(products: list[Product]) -> None:
            for p in products:
                p(x[p.inputs])

        team_seconds, torch_seconds = race([by_team, by_torch], some, TRIES)
        return team_seconds < torch_seconds

    @functools.cached_property  # not before the weights are where they stay
    def _layers(self) -> list[_Layer]:
        return [_Layer.of(b) for b in self.blocks]

    @functools.cached_property
    def _final(self) -> np.ndarray:
        return self.norm.detach().numpy()

    @functools.cached_property
    def _hall(self) -> Room:
        hidden, wide = self.embed.weight.shape[1], self.blocks[0].down.inputs
        sizes = (hidden, hidden, wide, self.num_heads * self.head_dim)
        return Room(*(torch.empty(MOST_ROWS, n, dtype=torch.float32) for n in sizes))

    def _room(self, rows: int) -> Room:
        if rows not in self._rooms:
            self._rooms[rows] = self._hall.first(rows)
        return self._rooms[rows]

    def warm_up(self) -> None:
        """Have the team ready, and know what it is for."""
        _ = self._team

    def release(self) -> None:
        """Let go of the pool."""
        self.reads.release()

    def _angles(self, positions: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin for each row, from a table that grows with the longest text."""
        if self.rotary.rope_type in CHANGING:
            return self._turn(positions)
        where = positions.numpy()
        if (most := int(where.max())) >= len(self._cos):
            self._cos, self._sin = self._turn(torch.arange(max(1024, 2 * most)))
        return self._cos[where], self._sin[where]

    def _turn(self, positions: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = self.rotary(self.norm, positions[None])
        assert cos.shape[-1] == self.head_dim, "a rotation of a part of each head"
        return cos[0].numpy(), sin[0].numpy()


@dataclass
class _Layer:
    """A block's gains, as arrays."""

    norm_in: np.ndarray
    norm_mlp: np.ndarray
    gains: np.ndarray  # (2, D) of queries and keys, or (0, D)

    @staticmethod
    def of(block: Any) -> _Layer:
        gains = block.head_gains
        both = np.empty((0, 1), np.float32) if gains is None else torch.stack(gains).detach().numpy()
        return _Layer(block.norm_in.detach().numpy(), block.norm_mlp.detach().numpy(), both)


class Reader:
    """How one forward reads and writes the pool, in each layer. `out` (T, heads · D): where it puts what it finds."""

    def __init__(self, reads: Reads, context: Context, out: torch.Tensor) -> None:
        self.reads, self.context, self.out, self._out = reads, context, out, out.numpy()
        self.write = context.write.numpy().view(np.uint64)
        self.pools = reads.arrays(context)
        self._readings: dict[int | None, Reading] = {}
        self._few = all(s.num_new * len(s.slots) <= MOST_SCORES for s in context.segments)

    def read(self, layer: int, heads: np.ndarray, window: int | None) -> torch.Tensor:
        """What the query heads find; new keys and values are in the pool already."""
        reads = self.reads
        if not self._few:
            query = torch.from_numpy(heads[:, : reads.num_heads])
            return self.context.read(layer, query, reads.scale, window).reshape(len(heads), -1)
        if window not in self._readings:
            self._readings[window] = Reading.of(self.context.segments, window, reads.loops.LANES)
        r = self._readings[window]
        scratch = reads.scratch(r.most_rows * reads.num_heads // reads.num_kv, r.most_slots)
        reads.loops.attend(
            heads, reads.num_heads, *self.pools[layer], r.pieces, r.slots, r.visible, reads.scale,
            *scratch, self._out,
        )  # fmt: skip
        return self.out
