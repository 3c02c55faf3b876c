"""What travels between host and device: blocks of pinned memory, and verdicts on their way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headstart.core import Verdict


@dataclass
class PinnedLanding:
    """Verdicts on their way to the host. None: the segment chose nothing, or the host has to decide."""

    device: torch.Tensor  # (B, stride) int32: where they are on the device until the next forward
    block: np.ndarray  # the same, in pinned memory: where they will be on the host
    ready: Any  # an event, or None where nothing has to be waited for
    nodes: list[int]  # draft nodes of each segment, -1: it chooses nothing
    _seen: list[Verdict | None] | None = None

    @property
    def has_landed(self) -> bool:
        return self._seen is not None or self.ready is None or self.ready.query()

    def verdicts(self) -> list[Verdict | None]:
        """One for each segment; waits for the device."""
        if self._seen is None:
            if self.ready is not None:
                self.ready.synchronize()
            rows = self.block[:, : 2 + max([0, *self.nodes])].tolist()
            self._seen = [
                None if n < 0 or row[0] < 0 else Verdict(row[2 : 2 + row[0]], row[1])
                for n, row in zip(self.nodes, rows, strict=True)
            ]
        return self._seen


class Ring:
    """Pinned blocks for what goes to the device and what comes back, used in turn."""

    def __init__(self, count: int, numbers: int, device: torch.device) -> None:
        self._at, self._cuda = 0, device.type == "cuda"
        self._blocks = [self._block(numbers) for _ in range(count)]
        self._events: list[Any] = [None] * count

    def _block(self, numbers: int) -> tuple[torch.Tensor, np.ndarray]:
        block = torch.empty(numbers, dtype=torch.int32, pin_memory=self._cuda)
        return block, block.numpy()

    def take(self, numbers: int) -> tuple[torch.Tensor, np.ndarray]:
        """The next block of at least so many numbers, once its last use is over: as a tensor, and as an array."""
        self._at = (self._at + 1) % len(self._blocks)
        if self._events[self._at] is not None:
            self._events[self._at].synchronize()
        if len(self._blocks[self._at][1]) < numbers:
            self._blocks[self._at] = self._block(2 * numbers)
        return self._blocks[self._at]

    def mark(self) -> Any:
        """The copy from or to the block just taken is queued."""
        if not self._cuda:
            return None
        event = self._events[self._at] or torch.cuda.Event()
        event.record()
        self._events[self._at] = event
        return event
