"""A head that drafts where the target runs: reading, levels and choice of a proposal are queued at once, as one graph.

The host waits for nothing: it says which requests, and the draft leaves as mail for the target's next forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headstart.core import Batch, DeviceStep, DeviceTexts
from headstart.models import packing
from headstart.models.attention import Attends
from headstart.models.graphs import Recorder
from headstart.models.heads import Head
from headstart.models.heads.fused import FusedEagle3, fusible
from headstart.models.kernels import growth as kernels
from headstart.models.kernels.attention import Layout, Room
from headstart.models.kernels.growth import MOST_TAPS, Field, Growth
from headstart.models.packing import Shape, double_up, stride_up
from headstart.models.paged import Device, PagedContext
from headstart.models.pinned import Ring
from headstart.progress import note

MOST_WIDTH = 64  # nodes of a level, and candidates of a node
MOST_CANDIDATES = 1024
LEAST_READ = 16  # rows that are read apart from the target's forward, at the least


def fits(head: Head, growth: Growth) -> bool:
    """Can drafts of this shape grow on the device?"""
    small = max(growth.top_k, growth.width) <= MOST_WIDTH and growth.candidates <= MOST_CANDIDATES
    if head.blank is not None:  # such a head drafts all levels at once, on the host
        return False
    return small and growth.depth >= 1 and 1 <= growth.nodes <= growth.candidates and len(head.spec.taps) <= MOST_TAPS


class Plain:
    """Any head, through its own modules."""

    most_rows = 1 << 30

    def __init__(self, head: Head) -> None:
        self.head = head

    def read(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Attends | None,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """Behind real features; the state of the rows `last`."""
        state = self.head.advance(0, self.head.begin(features), tokens, positions, context)
        return state.index_select(0, last)

    def advance(
        self,
        level: int,
        state: torch.Tensor,
        parents: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Attends | None,
    ) -> torch.Tensor:
        """Each row goes on from the state of its parent."""
        return self.head.advance(level, state.index_select(0, parents), tokens, positions, context)

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.head.logits(level, state)


@dataclass(frozen=True)
class PromptReader:
    """Makes the entries of a head with one layer from what the target computed: a few products, and nobody asks for states."""

    grower: Grower
    layers: tuple[int, ...]

    def __call__(
        self, hidden: Mapping[int, torch.Tensor], behind: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        features = torch.cat([hidden[layer] for layer in self.layers], -1)
        g = self.grower
        g.fused.remember(features, behind, positions, slots, g.keys[0], g.values[0])


class Grower:
    def __init__(
        self,
        head: Head,
        growth: Growth,
        lines: int,
        max_len: int,
        page_size: int,
        num_slots: int,
        limits: Device,
        other: Grower | None = None,
    ) -> None:
        """For up to `lines` requests at a time. `num_slots`: of the target; behind them lie those of the drafts. With `other`,
        a grower of the same head, all is shared that only one of them needs at a time."""
        self.head, self.growth, self.limits = head, growth, limits
        weight = next(head.parameters())
        self.device = weight.device
        self.graphs_allowed = weight.device.type == "cuda"
        spec = head.spec
        self.field = Field(
            growth, double_up(lines), len(spec.taps) * spec.hidden_size, weight.dtype, spec.draft_vocab_size, max_len,
            page_size, num_slots, self.device,
        )  # fmt: skip
        self.targets = head.targets
        self.plain: Any = Plain(head)
        self.room: Room = other.room if other else self._room()
        self.recorder: Recorder = other.recorder if other else Recorder(self.device)
        fused = FusedEagle3(head, limits, max_len) if other is None and fusible(head) else self.plain
        self.fused: Any = other.fused if other else fused
        one_layer = isinstance(self.fused, FusedEagle3) and len(self.fused.layers) == 1
        self.remembers = not head.shapes or one_layer  # it can read on without drafting
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.texts: DeviceTexts | None = None  # of the proposal; the target's runner has one for all of them
        self._asked: torch.Tensor | None = None  # what `field.numbers` holds
        self._graphs: dict[tuple[int, bool], list[torch.cuda.CUDAGraph]] = {}
        self._out = Ring(4, 1 << 12, self.device)
        self._layouts: dict[int, list[Layout]] = {}
        self.own = self  # for the step behind one of its own drafts: it need not read as much
        if growth.reads > growth.depth:
            less = replace(growth, reads=growth.depth)
            self.own = Grower(head, less, lines, max_len, page_size, num_slots, limits, self)

    def write_to(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """The head's KV."""
        for grower in (self, self.own):
            grower.keys, grower.values = keys, values

    @property
    def slots(self) -> int:
        """Of the target and of the drafts."""
        return (self.field.first_page + self.field.lines * self.field.span) * self.field.page_size

    def _room(self) -> Room:
        dims = [max(s.key_dim, s.value_dim) for s in self.head.shapes]
        dim = 1 << (max([16, *dims]) - 1).bit_length()
        return Room(8 * self.limits.processors, 64, dim, self.device)

    def grow(self, step: DeviceStep, texts: DeviceTexts, numbers: torch.Tensor, count: int) -> torch.Tensor:
        """(count, 1 + 2 nodes) int32, until the next call: for each line how many nodes, their tokens, their parents.

        `numbers` (4 · double_up(count),): segments of the last step, seats of the texts, and from which token to which the
        head has not read them; what pads them is drafted for like the others, and told to nobody.
        """
        padded = len(numbers) // 4
        if numbers is not self._asked:
            self.field.numbers[: 4 * padded].copy_(numbers)
            self._asked = numbers
        taps = [step.hidden[layer] for layer in self.head.spec.taps]
        self.texts = texts
        how = functools.partial(kernels.begin, self.field, step, taps, texts, padded)
        whole = padded, step.fixed  # then what the last step left is part of the graph
        if not step.fixed or not self.graphs_allowed:
            how()
        if not self.graphs_allowed:
            self._run(padded)
        elif whole in self._graphs:
            _replay(self._graphs[whole])
        else:
            begin = how if step.fixed else None
            self.graphs_allowed = self._record(self._graphs, whole, functools.partial(self._run, padded, begin))
        return self.field.mail[:count]

    @property
    def reader(self) -> PromptReader:
        return PromptReader(self, self.head.spec.taps)

    def remember(self, hidden: Mapping[int, torch.Tensor], numbers: np.ndarray) -> None:
        """Make the entries of rows of which a step left this. `numbers` (4, T): the rows, the tokens behind them, their
        positions, their slots."""
        count = numbers.shape[1]
        padded = stride_up(max(LEAST_READ, count))
        host, array = self._out.take(4 * padded)
        block = array[: 4 * padded].reshape(4, padded)
        block[:, :count], block[:3, count:], block[3, count:] = numbers, 0, -1
        rows, tokens, positions, slots = host[: 4 * padded].to(self.device, non_blocking=True).view(4, -1)
        self._out.mark()
        own = {layer: hidden[layer].index_select(0, rows) for layer in self.head.spec.taps}
        self.reader(own, tokens, positions, slots)

    def context(self, batch: Batch) -> PagedContext:
        """For rows of real features, read apart from a draft."""
        shape, page = Shape.of(batch), self.field.page_size
        host, array = self._out.take(packing.size_of(shape, batch, page))
        used = packing.fill(array, shape, batch, page)
        block = host[:used].to(self.device, non_blocking=True)
        self._out.mark()
        context = self._context(packing.layout(block, shape, page))
        assert context is not None
        return context

    # ------------------------------------------------------------------ what a graph holds
    def _run(self, lines: int, begin: Callable[[], None] | None = None) -> None:
        """Read on, then level by level."""
        if begin is not None:
            begin()
        field, g = self.field, self.growth
        rows, width = lines * g.rows, lines * g.width
        head = self.fused if max(rows, width) <= self.fused.most_rows else self.plain
        reading, *levels = self._views(lines)
        features, tokens, last = field.features[:rows], field.tokens[:rows], field.last[:lines]
        state = head.read(features, tokens, reading.positions, self._context(reading), last)
        self._branch(head.logits(0, state), 0, lines)
        for level, layout in enumerate(levels, 1):
            parents, tokens = field.parent_rows[:width], field.next_tokens[:width]
            state = head.advance(level, state, parents, tokens, layout.positions, self._context(layout))
            self._branch(head.logits(level, state), level, lines)
        kernels.select(field, lines)

    def _branch(self, logits: torch.Tensor, level: int, lines: int) -> None:
        assert self.texts is not None
        kernels.top(self.field, logits, self.targets, self.texts, lines, level)
        kernels.frontier(self.field, lines, level)

    def _views(self, lines: int) -> list[Layout]:
        """Where the rows of each level stand: made before anything is recorded."""
        if lines not in self._layouts:
            levels = range(1, self.growth.depth)
            self._layouts[lines] = [self.field.reading(lines), *(self.field.growing(lines, k) for k in levels)]
        return self._layouts[lines]

    def _context(self, layout: Layout) -> PagedContext | None:
        if not self.head.shapes:
            return None
        none = self.field.last
        return PagedContext(layout, self.keys, self.values, self.room, self.limits, False, none, none, none)

    def _record(self, graphs: dict[Any, list[torch.cuda.CUDAGraph]], key: Any, run: Callable[[], None]) -> bool:
        """Run for real, so that kernels are compiled; then record it for the next time. Returns whether that could be done."""
        self.recorder.rehearse(run)
        try:
            with self.recorder.capture() as capture:
                run()
        except RuntimeError as error:  # out of memory, or a head that cannot be recorded
            note(f"This head runs without further graphs, so it pays its launches: {str(error).split('. ')[0]}.")
            return False
        graphs[key] = capture.pieces
        return True


def _replay(pieces: list[torch.cuda.CUDAGraph]) -> None:
    for piece in pieces:
        piece.replay()
