"""Attention through the kernels: the context of a forward whose batch lies on the device as one block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.models.graphs import Capture
from headstart.models.kernels import block
from headstart.models.kernels.attention import (
    DETERMINISTIC_KEYS,
    DETERMINISTIC_SPLITS,
    Cut,
    Layout,
    Room,
    attention,
    cut,
    fit,
)

CHUNK = 64  # rows that attend together under `deterministic`, to bound the room for their parts


@dataclass(frozen=True)
class Device:
    """What kernels have to fit: how many programs run at once, and the shared memory of one, in bytes."""

    processors: int
    shared_memory: int


class PagedContext:
    """What one forward reads and writes; the kernels' counterpart of `attention.Context`."""

    def __init__(
        self,
        layout: Layout,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        room: Room,
        device: Device,
        deterministic: bool,
        source: torch.Tensor,
        chosen: torch.Tensor,
        mail: torch.Tensor,
        capture: Capture | None = None,
    ) -> None:
        self.layout, self.keys, self.values, self.room = layout, keys, values, room
        self.device, self.deterministic = device, deterministic
        self.source, self.chosen, self.mail = source, chosen, mail  # where tokens are that the host did not know
        self.capture = capture

    def resolve(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens, with those put in that the host did not know."""
        tokens = torch.where(self.source < 0, tokens, self.chosen[self.source.clamp_min(0)])
        return torch.where(self.source > -2, tokens, self.mail[(-2 - self.source).clamp_min(0)])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # (T, H, D)
        key: torch.Tensor,  # (T, K, D)
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend. Returns (T, H, Dv)."""
        block.write(key, self.keys[layer], self.layout.slots)
        block.write(value, self.values[layer], self.layout.slots)
        return self.read(layer, query.contiguous(), scale, window, softcap, sinks)

    def read(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to what is in the pool."""
        if self.capture is not None:
            self.capture.reach(layer)
        keys, values, layout = self.keys[layer], self.values[layer], self.layout
        heads, kv_heads = query.shape[1], keys.shape[1]
        if not self.deterministic:
            how = self._fit(cut(layout, len(layout.start), heads, kv_heads, self.device.processors), layer, heads)
            return attention(query, keys, values, layout, self.room, how, scale, window, softcap, sinks)
        how = self._fit(Cut(self.room.rows, DETERMINISTIC_SPLITS, DETERMINISTIC_KEYS), layer, heads)
        parts = [
            attention(query[i : i + CHUNK], keys, values, layout.rows(i, i + CHUNK), self.room, how, scale, window, softcap,
                      sinks, rowwise=True)
            for i in range(0, len(query), CHUNK)
        ]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fit(self, how: Cut, layer: int, heads: int) -> Cut:
        keys, dims = self.keys[layer], (self.keys[layer].shape[2], self.values[layer].shape[2])
        return fit(how, heads // keys.shape[1], dims, keys.element_size(), self.device.shared_memory)
