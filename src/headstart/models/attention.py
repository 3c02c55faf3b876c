"""Reference attention over the KV pool, for any transformers model on any device.

transformers lets a model's attention be replaced by a registered function and hands it extra keyword arguments
untouched. Ours gets one, `context`: the pool and what this forward reads and writes. New keys and values are written to
their slots first, so a row may read what another row of the same forward wrote. Then requests attend in groups of like
size, each padded under one mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from headstart.core import Batch, Segment
from headstart.tree import ancestor_mask

NAME = "headstart"
HARMLESS = {  # keyword arguments that say nothing about what a row may see
    "dropout",
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "head_mask",
}
FOLD_LIMIT = 32  # up to so many new tokens, query heads that share a key head are folded into the query length


@dataclass
class LayerShape:
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Of the keys and values of one token."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass
class Group:
    """Segments that attend in one call: B of them, padded to T new rows and S slots."""

    segments: list[Segment]
    rows: torch.Tensor | slice  # (B*T,) rows of the packed forward, padding repeats a row
    valid: torch.Tensor | None  # (B*T,) bool, None when nothing is padded
    slots: torch.Tensor | slice  # (B*S,) slots to read
    num_new: int
    num_slots: int
    device: torch.device
    masks: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.segments)

    def mask(self, window: int | None, repeat: int) -> torch.Tensor | None:
        """(B, 1, repeat*T, S) bool, or None when every row may see every slot. Built once per forward, not per layer."""
        key = (window, repeat)
        if key not in self.masks:
            self.masks[key] = self._build_mask(window, repeat)
        return self.masks[key]

    def _build_mask(self, window: int | None, repeat: int) -> torch.Tensor | None:
        mask = np.zeros((self.size, self.num_new, self.num_slots), dtype=bool)
        mask[:, :, 0] = True  # padding rows must see something; real rows are written below
        for b, seg in enumerate(self.segments):
            mask[b, : seg.num_new, : len(seg.slots)] = segment_mask(seg, window)
            mask[b, : seg.num_new, len(seg.slots) :] = False
        if mask.all():
            return None
        return torch.from_numpy(mask).to(self.device).unsqueeze(1).repeat(1, 1, repeat, 1)


def segment_mask(seg: Segment, window: int | None) -> np.ndarray:
    """(new, slots) bool: all of the context, and the row's own ancestors, within the window if there is one."""
    new = seg.num_new
    if seg.parents is None:
        own, depth = np.tri(new, dtype=bool), np.arange(new)
    else:
        own = ancestor_mask(seg.parents)
        depth, own = own.sum(1) - 1, own[-new:]
    mask = np.concatenate([np.ones((new, seg.context), dtype=bool), own], axis=1)
    if window:
        position = np.concatenate([np.arange(seg.context), seg.context + depth])
        mask &= position[-new:, None] - position[None, :] < window
    return mask


class Context:
    """What one forward reads and writes. Travels through the model as a single keyword argument."""

    def __init__(self, batch: Batch, keys: list[torch.Tensor], values: list[torch.Tensor], device: torch.device):
        self.keys, self.values, self.segments = keys, values, batch.segments  # L tensors (S, K, D)
        self.write = torch.from_numpy(batch.write_slots).to(device)
        self.device = device

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # (T, H, D)
        key: torch.Tensor,  # (T, K, D)
        value: torch.Tensor,  # (T, K, Dv)
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend. Returns (T, H, Dv)."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, self.write, key.to(keys.dtype))
        values.index_copy_(0, self.write, value.to(values.dtype))
        return self.read(layer, query, scale, window, softcap, sinks)

    @functools.cached_property
    def groups(self) -> list[Group]:
        return [make_group(segments, self.device) for segments in bucket(self.segments)]

    def read(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend alone: what is new has been written."""
        keys, values = self.keys[layer], self.values[layer]
        if len(self.groups) == 1:
            return _attend_group(query, keys, values, self.groups[0], scale, window, softcap, sinks)
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
        for group in self.groups:
            index = group.rows if group.valid is None or isinstance(group.rows, slice) else group.rows[group.valid]
            out[index] = _attend_group(query, keys, values, group, scale, window, softcap, sinks)
        return out


class Attends(Protocol):
    """How a model reaches the pool: `Context` here, `PagedContext` through kernels."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Probe:
    """Stands in for a context once, at load: notes the shape of each layer's keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}


def bucket(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments of like size together: new rows within a factor of 2, slots within a factor of 4."""
    if len(segments) == 1:
        return [list(segments)]
    groups: dict[tuple[int, int], list[Segment]] = {}
    for seg in segments:
        key = ((seg.num_new - 1).bit_length(), max(8, len(seg.slots).bit_length() + 1) // 2)
        groups.setdefault(key, []).append(seg)
    return list(groups.values())


def make_group(segments: list[Segment], device: torch.device) -> Group:
    num_new = max(s.num_new for s in segments)
    num_slots = max(len(s.slots) for s in segments)
    if len(segments) == 1:
        seg = segments[0]
        return Group(segments, slice(seg.start, seg.stop), None, _run(seg.slots, device), num_new, num_slots, device)
    rows = np.empty((len(segments), num_new), dtype=np.int64)
    slots = np.empty((len(segments), num_slots), dtype=np.int64)
    for b, seg in enumerate(segments):
        rows[b] = seg.start
        rows[b, : seg.num_new] = np.arange(seg.start, seg.stop)
        slots[b] = seg.slots[0]
        slots[b, : len(seg.slots)] = seg.slots
    valid = np.arange(num_new) < np.array([[s.num_new] for s in segments])
    padded = None if valid.all() else torch.from_numpy(valid.reshape(-1)).to(device)
    return Group(
        segments, _run(rows.reshape(-1), device), padded, torch.from_numpy(slots.reshape(-1)).to(device),
        num_new, num_slots, device,
    )  # fmt: skip


def _run(index: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """A slice where the index is a run, so that reading it copies nothing."""
    if index[-1] - index[0] == len(index) - 1 and bool((np.diff(index) == 1).all()):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index).to(device)


def _rows(x: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _attend_group(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: Group,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    b, t, s = group.size, group.num_new, group.num_slots
    heads, kv_heads = query.shape[1], keys.shape[1]
    share = heads // kv_heads
    k = _rows(keys, group.slots).view(b, s, kv_heads, -1).transpose(1, 2).to(query.dtype)
    v = _rows(values, group.slots).view(b, s, kv_heads, -1).transpose(1, 2).to(query.dtype)
    q = _rows(query, group.rows).reshape(b, t, kv_heads, share, -1)
    window = window if window and window < max(len(x.slots) for x in group.segments) else None
    if softcap is not None or sinks is not None:
        q = q.permute(0, 2, 3, 1, 4).reshape(b, heads, t, -1)
        out = _eager(q, k, v, group.mask(window, 1), scale, softcap, sinks).transpose(1, 2)
    elif t <= FOLD_LIMIT:
        q = q.permute(0, 2, 3, 1, 4).reshape(b, kv_heads, share * t, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask(window, share), scale=scale)
        out = out.view(b, kv_heads, share, t, -1).permute(0, 3, 1, 2, 4)
    else:
        q = q.permute(0, 2, 3, 1, 4).reshape(b, heads, t, -1)
        mask = group.mask(window, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=share > 1)
        out = out.transpose(1, 2)
    out = out.reshape(b * t, heads, -1)
    return out if group.valid is None else out[group.valid]


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention spelled out, for logit soft-capping and attention sinks."""
    share = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(share, 1).transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # one learned logit per head that takes probability and returns nothing
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.float().softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return weights @ v.repeat_interleave(share, 1)


def transformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    key: torch.Tensor,  # (1, K, T, D)
    value: torch.Tensor,  # (1, K, T, Dv)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    context: Attends | Probe | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: object,
) -> tuple[torch.Tensor, None]:
    """The signature that transformers calls."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(context, Probe):
        unknown = sorted(k for k, v in more.items() if v is not None and v is not False and k not in HARMLESS)
        if attention_mask is not None or unknown:
            raise ValueError(f"its attention asks for {', '.join(unknown) or 'a mask of its own'}")
        context.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    assert context is not None, "this model was prepared for Headstart's runner; call it through the runner"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = context.attend(layer, q, k, v, scale, sliding_window, softcap, s_aux)
    return out.unsqueeze(0), None


def register() -> None:
    """Make the attention known to transformers. No mask function is registered, so models build no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, transformers_attention)
