"""Runs a model through the kernels, as captured graphs where a batch fits one; chooses and verifies on the device.

A forward is one copy to the device, one replay, and one small copy back. Nothing waits in between: `Landing.verdicts`
waits for the copy back, and until then the host is free.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headstart.core import Batch, DeviceStep, Forward
from headstart.errors import ConfigError
from headstart.models import packing
from headstart.models.fused import FusedModel
from headstart.models.graphs import Budget, Capture, Graph, Recorder
from headstart.models.kernels import ahead, choose
from headstart.models.kernels.attention import DETERMINISTIC_SPLITS, Layout, Room
from headstart.models.lean import in_family
from headstart.models.load import position_limit
from headstart.models.packing import Shape, double_up, stride_up
from headstart.models.paged import CHUNK, Device, PagedContext
from headstart.models.pinned import PinnedLanding, Ring
from headstart.models.runner import TorchRunner
from headstart.models.texts import Texts
from headstart.progress import note, status

BLOCK_SIZE = 1 << 20  # numbers in the block that graphs read; a larger batch runs without a graph
LOGITS_SHARE = 1 / 32  # of the device's memory, for the logits of graphs
MORE = 2  # times as many rows, up to which a graph stands in for one that is not there,
OFTEN = 32  # and how often it does


def _at_home(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of a runner without gradients, on the runner's own device: kernels start on the current one."""

    @functools.wraps(method)
    def run(self: KernelRunner, *args: Any, **kwargs: Any) -> Any:
        elsewhere = self.device.type == "cuda" and torch.cuda.current_device() != self.device.index
        if torch.is_inference_mode_enabled() and not elsewhere:
            return method(self, *args, **kwargs)
        with torch.inference_mode(), torch.cuda.device(self.device) if elsewhere else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    return run


Key = tuple[Shape, tuple[int, ...], int | None]  # of a graph: its layers that are tapped, and how many it runs


@dataclass(frozen=True)
class Sent:
    """A batch as it was sent to the device."""

    key: Key
    graphable: bool
    block: np.ndarray  # in pinned memory; it is overwritten some forwards later

    @property
    def shape(self) -> Shape:
        return self.key[0]


class KernelRunner(TorchRunner):
    chooses = True
    repeats = True

    def __init__(self, model: Any, fuse: bool = True, deterministic: bool = False, graphs: bool = True) -> None:
        super().__init__(model, fuse=False)
        self.deterministic = deterministic
        self.graphs_allowed = graphs and self.device.type == "cuda"
        self.limits = device_limits(self.device)
        if fuse and in_family(model):
            self.lean = FusedModel(model, deterministic, self.limits)
        if deterministic and self.dtype == torch.float16:
            raise ConfigError("deterministic needs bfloat16 or float32: sums of its kernels may leave float16's range.")
        if deterministic and self.lean is None:
            raise ConfigError(
                f"deterministic needs fused kernels, which {type(model).__name__} has none of here "
                "(Llama, Mistral, Qwen2 and Qwen3 have, with fuse=True). Leave deterministic out."
            )
        self.graphs: dict[Key, Graph | None] = {}
        self._missed: Counter[Key] = Counter()  # those that others stood in for
        self._rehearsed: set[Any] = set()  # kinds of forwards that have run as a whole
        self.texts: Texts | None = None
        self.recorder, self.budget = Recorder(self.device), Budget()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Entered before the device is waited for, and not between its steps. Drafters launch their own kernels there."""
        home = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), home:
            yield

    # ------------------------------------------------------------------ memory
    def needs_bytes(self, max_rows: int) -> int:
        """For the logits of graphs and of their library products."""
        return 2 * 4 * self.vocab_size * _graph_rows(self.device, self.vocab_size, stride_up(max_rows))

    @_at_home
    def allocate(self, num_slots: int, page_size: int = 16, max_rows: int = 512, max_segments: int = 64) -> None:
        """Make the KV tensors and everything that graphs will read and write."""
        self.graphs.clear()
        max_rows, max_segments = stride_up(max_rows), double_up(max_segments)
        self.page_size, self.max_rows, self.max_segments = page_size, max_rows, max_segments
        self._allocate_kv(num_slots)
        if isinstance(self.lean, FusedModel):
            self.lean.prepare(min(num_slots, position_limit(self.text_config)), max_rows)
        self.graph_rows = _graph_rows(self.device, self.vocab_size, max_rows)
        self.logits = torch.empty(self.graph_rows, self.vocab_size, dtype=torch.float32, device=self.device)
        self.chosen = torch.zeros(max_rows + 1, dtype=torch.int32, device=self.device)
        self.mail = torch.zeros(max_rows * (1 + max_segments), dtype=torch.int32, device=self.device)
        self.desk = choose.Desk(max_rows, self.vocab_size, self.device)
        self.room = self._room()
        self.block = torch.zeros(BLOCK_SIZE, dtype=torch.int32, device=self.device)
        self.verdict = torch.zeros(max_segments * (18 + 2 * max_rows), dtype=torch.int32, device=self.device)
        self.tapped: dict[int, torch.Tensor] = {}  # hidden states that graphs leave, by layer
        self._out, self._back = Ring(16, 1 << 14, self.device), Ring(64, 1 << 10, self.device)

    @_at_home
    def open_texts(self, max_len: int) -> Texts:
        """Keep the texts of running requests on the device from now on."""
        self.texts = Texts(self.max_segments, max_len, self.device)
        self.graphs.clear()
        return self.texts

    def _allocate_kv(self, num_slots: int) -> None:
        """All layers in one tensor where they are alike, so that one launch moves slots in all of them."""
        alike = len({(s.kv_heads, s.key_dim, s.value_dim, s.dtype) for s in self.shapes}) == 1
        if not alike:
            super().allocate(num_slots)
            self.pools: list[torch.Tensor] = [p[None] for p in (*self.keys, *self.values)]
            return
        s, n = self.shapes[0], len(self.shapes)
        keys = torch.zeros(n, num_slots, s.kv_heads, s.key_dim, dtype=s.dtype, device=self.device)
        values = torch.zeros(n, num_slots, s.kv_heads, s.value_dim, dtype=s.dtype, device=self.device)
        self.keys, self.values, self.pools = list(keys), list(values), [keys, values]

    def _room(self) -> Room:
        import triton

        heads = self.text_config.num_attention_heads
        share = max(heads // s.kv_heads for s in self.shapes)
        kv = max(s.kv_heads for s in self.shapes)
        dim = triton.next_power_of_2(max(16, *(s.value_dim for s in self.shapes)))
        least = max(16, triton.next_power_of_2(share))
        parts = max(8 * self.limits.processors, CHUNK * kv * DETERMINISTIC_SPLITS if self.deterministic else 0)
        return Room(parts, least if self.deterministic else max(64, least), dim, self.device)

    # ------------------------------------------------------------------ forward
    @_at_home
    def forward(self, batch: Batch) -> Forward:
        """One forward over packed rows. Where the batch says how to choose, `landing` will tell the verdicts."""
        exact = Shape.of(batch)
        key = self._at_hand((exact.padded(), batch.hidden_layers, batch.layers))
        shape = key[0]
        size = packing.size_of(shape, batch, self.page_size)
        graphable = (
            self.graphs_allowed
            and shape.rows <= self.graph_rows
            and shape.segments <= self.max_segments
            and size <= BLOCK_SIZE
        )
        if not graphable:
            key, shape, size = (exact, *key[1:]), exact, packing.size_of(exact, batch, self.page_size)
        host, array = self._out.take(size)
        used = packing.fill(array, shape, batch, self.page_size)
        self._sent = Sent(key, graphable, array[:used])
        return self._run_sent(batch, self._sent, host[:used])

    @_at_home
    def again(self, batch: Batch) -> Forward:
        last = self._sent
        used = len(last.block)
        host, array = self._out.take(used)
        array[:used] = last.block
        packing.step_on(array, last.shape, batch, self.page_size)
        self._sent = replace(last, block=array[:used])
        return self._run_sent(batch, self._sent, host[:used])

    def _run_sent(self, batch: Batch, sent: Sent, host: torch.Tensor) -> Forward:
        """Copy the block, and run: as a graph where it can be one."""
        shape = sent.shape
        if batch.mail is not None:
            self.mail[: len(batch.mail)].copy_(batch.mail)
        if sent.graphable:
            self.block[: len(host)].copy_(host, non_blocking=True)
            self._out.mark()
            graph = self._graph(*sent.key)
            if graph is not None:
                graph.replay()
                self.left = graph.left if batch.hidden_layers else None
                hidden = {layer: graph.hidden[layer] for layer in batch.hidden_layers}  # it may tell others, too
                return self._forward(batch, shape, graph.logits, hidden)
            block = self.block
        else:
            block = host.to(self.device, non_blocking=True, copy=True)
            self._out.mark()
        if len(batch.rows) == len(batch.tokens):
            lines, hidden = self._run(block, shape, None, batch.hidden_layers, batch.layers)
            self.left = self._leave(block, hidden)
            return self._forward(batch, shape, lines, hidden)
        asked = packing.places(shape).on_device(block, "lines")[
            : max(1, len(batch.rows))
        ]  # a kernel has at least one row
        lines, hidden = self._run(block, shape, asked, batch.hidden_layers, batch.layers)
        self.left = self._leave(block, hidden)
        return Forward(lines, _cut(hidden, batch), None, self._land(batch, shape))

    def _forward(self, batch: Batch, shape: Shape, lines: torch.Tensor, hidden: dict[int, torch.Tensor]) -> Forward:
        """All rows were computed; some may be padding, some not asked."""
        every = len(batch.rows) == len(batch.tokens)
        rows = slice(0, len(batch.tokens)) if every else batch.rows
        return Forward(lines, _cut(hidden, batch), rows, self._land(batch, shape))

    def _leave(self, block: torch.Tensor, hidden: dict[int, torch.Tensor], fixed: bool = False) -> DeviceStep | None:
        """For whoever drafts on the device."""
        return DeviceStep(hidden, self.verdict, block, fixed) if hidden else None

    def _verdict(self, shape: Shape) -> torch.Tensor:
        """(segments, 2 + most nodes)"""
        stride = 2 + shape.new
        return self.verdict[: shape.segments * stride].view(shape.segments, stride)

    def _run(
        self,
        block: torch.Tensor,
        shape: Shape,
        rows: torch.Tensor | None,
        taps: tuple[int, ...],
        layers: int | None = None,
        into: torch.Tensor | None = None,
        capture: Capture | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Model, choice, walk and compaction over a block on the device."""
        sections = packing.places(shape)

        def get(name: str) -> torch.Tensor:
            return sections.on_device(block, name)

        layout = packing.layout(block, shape, self.page_size)
        self._advance(get, layout, shape)
        context = PagedContext(
            layout,
            self.keys,
            self.values,
            self.room,
            self.limits,
            self.deterministic,
            get("source"),
            self.chosen,
            self.mail,
            capture,
        )
        tokens = get("tokens")
        if isinstance(self.lean, FusedModel):
            logits, hidden = self.lean(tokens, layout.positions, context, rows, taps, layers, into)
        else:
            tokens.copy_(context.resolve(tokens))
            logits, hidden = self._model(tokens.long(), layout.positions.long(), context, rows, taps, layers)
        self._read(get, layout, shape, hidden)
        heat, top_p, min_p = (get(name).view(torch.float32) for name in ("temperature", "top_p", "min_p"))
        asks = choose.Asks(heat, get("seeds"), layout.positions, get("top_k"), top_p, min_p)
        choose.choose(logits, asks, self.chosen, self.desk, rows)
        if shape.truncates:
            choose.choose_short(logits, asks, self.chosen, self.desk, rows, self.lenient)
        verdict, seat = self._verdict(shape), get("seat")
        choose.walk(self.chosen, tokens, get("parent"), get("root"), get("nodes"), verdict, shape.new, seat, self.texts)
        if shape.width:
            for pool in self.pools:
                choose.move(pool, verdict, layout, get("nodes"))
        return logits, hidden

    def _read(
        self, get: Callable[[str], torch.Tensor], layout: Layout, shape: Shape, hidden: dict[int, torch.Tensor]
    ) -> None:
        """Let drafters read prompts as a part of the forward that computes them."""
        if self.reader is not None and shape.prompts and hidden:
            self.reader(hidden, get("behind"), layout.positions, get("kept"))

    def _advance(self, get: Callable[[str], torch.Tensor], layout: Layout, shape: Shape) -> None:
        """Let the device say where rows stand, how many were drafted and how trees branch, where the host does not know."""
        if self.texts is None:
            return
        ahead.advance(get, layout, self.mail, self.texts, shape.new)
        if shape.width:
            ahead.plant(get, layout, self.mail, shape.width)

    def _land(self, batch: Batch, shape: Shape) -> PinnedLanding | None:
        if batch.choice is None:
            return None
        count, stride = len(batch.segments), 2 + shape.new
        size = count * stride
        host, array = self._back.take(size)
        verdict = self.verdict[:size]
        host[:size].copy_(verdict, non_blocking=True)
        told = array[:size].reshape(count, stride)
        return PinnedLanding(verdict.view(count, stride), told, self._back.mark(), batch.choice.nodes)

    # ------------------------------------------------------------------ graphs
    @_at_home
    def warm_up(self, nodes: int, trees: bool, taps: tuple[int, ...] = ()) -> None:
        """Capture what a single request will need first; all else is captured when it is first met."""
        if not self.graphs_allowed:
            return
        shapes = [Shape(1, 1, 1)]
        if nodes:
            shapes.append(Shape(nodes + 1, 1, nodes + 1, (nodes + 1) if trees else 0).padded())
        with status("Preparing GPU kernels and graphs"):
            for shape in shapes:
                if shape.rows <= self.graph_rows:
                    self._graph(shape, taps)

    def prepare(self, drafts: Collection[tuple[int, bool]], taps: tuple[int, ...]) -> list[Callable[[], None]]:
        """What there is to do so that steps with these drafts, and steps with prompts, find their graphs."""
        shapes = self._usual(drafts) if self.graphs_allowed else []
        return [functools.partial(self._prepare, shape, taps) for shape in shapes]

    @_at_home
    def _prepare(self, shape: Shape, taps: tuple[int, ...]) -> None:
        self._graph(shape, taps)

    def _usual(self, drafts: Collection[tuple[int, bool]]) -> list[Shape]:
        n = self.max_segments
        found = {Shape(k, k, 1).padded() for k in range(1, n + 1)}
        for width in {0, *(nodes + 1 for nodes, branches in drafts if branches)}:
            found |= {*packing.prompt_shapes(n, self.graph_rows, width)}
        for nodes, branches in drafts:
            found |= {*packing.draft_shapes(n, nodes, nodes + 1 if branches else 0)}
        few = [s for s in found if s.rows <= self.graph_rows]
        return sorted(
            few, key=lambda s: (-s.rows, -s.segments, -s.new)
        )  # the largest first: others fit into its memory

    def release(self) -> None:
        """Let go of KV, graphs and everything that they read and write."""
        self.synchronize()
        super().release()
        self.graphs.clear()
        self.pools, self.texts, self.left, self.reader = [], None, None, None
        for name in ("logits", "chosen", "mail", "desk", "room", "block", "verdict", "tapped", "_out", "_back"):
            self.__dict__.pop(name, None)
        if isinstance(self.lean, FusedModel):
            self.lean.angles = self.lean.scratch = None

    def _at_hand(self, key: Key) -> Key:
        """The graph for such a step: its own; or, where that is not there, a larger one, until that was met so often that it
        pays to make one."""
        shape, taps, layers = key
        if key in self.graphs or not self.improvises or not self.graphs_allowed or shape.rows > self.graph_rows:
            return key
        self._missed[key] += 1
        if self._missed[key] > OFTEN:
            return key
        able = [
            other
            for other, graph in self.graphs.items()
            if graph is not None and other[2] == layers and other[0].rows <= MORE * shape.rows
            if set(taps) <= set(other[1]) and other[0].covers(shape)
        ]
        return min(able, key=lambda k: (k[0].rows, k[0].width, k[0].new, k[0].segments, len(k[1])), default=key)

    def _graph(self, shape: Shape, taps: tuple[int, ...], layers: int | None = None) -> Graph | None:
        key = (shape, taps, layers)
        if key not in self.graphs:
            began, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
            try:
                self.graphs[key] = self._capture(shape, taps, layers)
            except torch.cuda.OutOfMemoryError:
                note(f"No memory for the graph of {shape.rows} rows: such steps run without one.")
                self.graphs[key] = None
            except RuntimeError as error:
                self.graphs_allowed = False
                why = str(error).split(". ")[0]
                note(f"{type(self.model).__name__} runs without graphs, so each step pays its launches: {why}.")
                return None
            self.budget.count += 1
            self.budget.seconds += time.perf_counter() - began
            self.budget.bytes += free - torch.cuda.mem_get_info(self.device)[0]
        return self.graphs[key]

    def _capture(self, shape: Shape, taps: tuple[int, ...], layers: int | None) -> Graph:
        """Run once for real, on rows that belong to nobody, so that kernels are compiled; then record."""
        block, chosen = self.block.clone(), self.chosen.clone()
        self.block.zero_()
        _nobody(self.block, shape)
        try:
            logits = self.logits[: shape.rows]
            kept = {layer: self._tapped(layer)[: shape.rows] for layer in taps}
            self.recorder.rehearse(lambda: self._run(self.block, shape, None, *self._sample(shape, taps, layers)))
            self.recorder.rehearse(lambda: self._read_nobody(shape, kept))
            with self.recorder.capture(len(self.shapes)) as capture:
                found, hidden = self._run(self.block, shape, None, taps, layers, logits, capture)
                if found is not logits:
                    logits.copy_(found)
                for layer, h in hidden.items():
                    kept[layer].copy_(h)
            return Graph(capture.pieces, logits, kept, self._leave(self.block, kept, fixed=True))
        finally:
            self.block.copy_(block)
            self.chosen.copy_(chosen)

    def _read_nobody(self, shape: Shape, hidden: dict[int, torch.Tensor]) -> None:
        """So that libraries have met this number of rows. A reader that fails must not take the target's graphs along."""
        get = functools.partial(packing.places(shape).on_device, self.block)
        try:
            self._read(get, packing.layout(self.block, shape, self.page_size), shape, hidden)
        except RuntimeError as error:
            self.reader = None
            note(f"A head cannot read prompts in the target's graphs ({error}); it reads them behind each step.")

    def _sample(self, shape: Shape, taps: tuple[int, ...], layers: int | None) -> tuple[tuple[int, ...], int | None]:
        """Taps and layers of a run that meets all kernels which a graph of this shape needs: where layers are alike, few."""
        if not isinstance(self.lean, FusedModel) or (layers is not None and layers <= self.lean.variety):
            return taps, layers
        kind = taps, layers, shape.rows <= self.lean.widest_few
        if kind not in self._rehearsed:
            self._rehearsed.add(kind)
            return taps, layers
        return (), self.lean.variety

    def _tapped(self, layer: int) -> torch.Tensor:
        """Where every graph leaves hidden states of this layer, so that those who read them need not know which it was."""
        if layer not in self.tapped:
            size = self.graph_rows, self.text_config.hidden_size
            self.tapped[layer] = torch.zeros(size, dtype=self.dtype, device=self.device)
        return self.tapped[layer]


def _cut(hidden: dict[int, torch.Tensor], batch: Batch) -> dict[int, torch.Tensor]:
    return {layer: h[: len(batch.tokens)] for layer, h in hidden.items()}


def _nobody(block: torch.Tensor, shape: Shape) -> None:
    """A block whose rows and segments all belong to nobody."""
    blank = packing.places(shape).blank
    block[: len(blank)].copy_(torch.from_numpy(blank))


def _graph_rows(device: torch.device, vocab: int, max_rows: int) -> int:
    """Rows up to which a forward is a graph: its logits are kept for all rows."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    return min(max_rows, 512, max(16, int(total * LOGITS_SHARE) // (4 * vocab)))


def device_limits(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(8, 1 << 16)
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 99 << 10))
    return Device(properties.multi_processor_count, shared)
