"""Captured forwards: recorded once, in two pieces, and replayed with two launches.

A launch takes the host longer the more kernels a graph has: 100 µs and more for a whole model, in which the device would
stand still. So the first layers are a graph of their own. It is launched quickly, and the rest while it runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from headstart.core import DeviceStep

LEAD = 4  # layers in the first piece


@dataclass
class Graph:
    """A captured forward and what it leaves behind."""

    pieces: list[Any]
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    left: DeviceStep | None = None

    def replay(self) -> None:
        for piece in self.pieces:
            piece.replay()


@dataclass
class Budget:
    """What graphs cost so far."""

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings on a device: libraries keep memory for each stream that they have seen."""
    return torch.cuda.Stream(device)


class Recorder:
    """Where the graphs of one owner are recorded: always on the same stream, into memory that they share, since only one of
    them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def _side(self) -> torch.cuda.Stream:
        return _side_stream(self.device)

    @functools.cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def rehearse(self, run: Callable[[], Any]) -> None:
        """Run for real, so that kernels are compiled."""
        here = torch.cuda.current_stream(self.device)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            run()
        here.wait_stream(self._side)

    def capture(self, num_layers: int = 0) -> Capture:
        return Capture(self._side, self._pool, num_layers)


class Capture:
    """Records what is launched inside, on `stream`, with memory from `pool`."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any, num_layers: int) -> None:
        self.pieces: list[Any] = []
        self._stream, self._pool = torch.cuda.stream(stream), pool
        self._cut_at = LEAD if num_layers > 2 * LEAD else -1
        self._collects = gc.isenabled()

    def __enter__(self) -> Capture:
        torch.cuda.synchronize()
        gc.disable()  # the end of an old graph must not fall into the recording of a new one
        self._stream.__enter__()
        self._begin()
        return self

    def reach(self, layer: int) -> None:
        """The attention of this layer comes next."""
        if layer == self._cut_at:
            self.pieces[-1].capture_end()
            self._begin()

    def _begin(self) -> None:
        self.pieces.append(torch.cuda.CUDAGraph())
        self.pieces[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with contextlib.suppress(RuntimeError) if error is not None else contextlib.nullcontext():
                self.pieces[-1].capture_end()
        finally:
            self._stream.__exit__(kind, error, at)
            if self._collects:
                gc.enable()
