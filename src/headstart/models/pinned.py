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
    block: torch.Tensor  # the same, pinned: where they will be on the host
    ready: Any  # an event, or None where nothing has to be waited for
    nodes: np.ndarray  # (B,) draft nodes, -1: the segment chooses nothing
    _seen: list[Verdict | None] | None = None

    def verdicts(self) -> list[Verdict | None]:
        """One for each segment; waits for the device."""
        if self._seen is None:
            if self.ready is not None:
                self.ready.synchronize()
            rows = self.block[:, : 2 + max(0, int(self.nodes.max(initial=0)))].tolist()
            self._seen = [
                None if n < 0 or row[0] < 0 else Verdict(row[2 : 2 + row[0]], row[1])
                for n, row in zip(self.nodes.tolist(), rows, strict=True)
            ]
        return self._seen


class Ring:
    """Pinned blocks for what goes to the device and what comes back, used in turn."""

    def __init__(self, count: int, numbers: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._blocks = [torch.empty(numbers, dtype=torch.int32, pin_memory=pinned) for _ in range(count)]
        self._events: list[Any] = [None] * count
        self._at, self._cuda = 0, pinned

    def take(self, numbers: int) -> torch.Tensor:
        """The next block, once its last use is over."""
        self._at = (self._at + 1) % len(self._blocks)
        if self._events[self._at] is not None:
            self._events[self._at].synchronize()
        if len(self._blocks[self._at]) < numbers:
            self._blocks[self._at] = torch.empty(2 * numbers, dtype=torch.int32, pin_memory=self._cuda)
        return self._blocks[self._at][:numbers]

    def mark(self) -> Any:
        """The copy from or to the block just taken is queued."""
        if not self._cuda:
            return None
        event = self._events[self._at] or torch.cuda.Event()
        event.record()
        self._events[self._at] = event
        return event
