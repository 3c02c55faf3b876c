"""An EAGLE-3 head through the kernels: eight launches a level, where its own modules take sixty.

The first layer reads a token and a state side by side, each with a norm of its own, so these norms are computed on the way in
(`enter`); from there on everything goes as in `models.fused`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from headstart.models.heads import Head
from headstart.models.heads.eagle import Eagle3Head, Layer
from headstart.models.kernels.block import rotate
from headstart.models.kernels.enter import enter
from headstart.models.kernels.products import Scratch, Stream, Tile, add_product, gate_up, normed_product, qkv
from headstart.models.kernels.tiles import FEW, tile
from headstart.models.paged import Device, PagedContext


def fusible(head: Head) -> TypeGuard[Eagle3Head]:
    """Is this a head that these kernels know?"""
    if not isinstance(head, Eagle3Head) or head.lm_head.weight.dtype == torch.float16:
        return False
    first, mlp = head.layers[0].self_attn, head.layers[0].mlp
    return first.dim % 32 == 0 and not hasattr(first, "q_norm") and mlp.gate_proj.bias is None


@dataclass
class Weights:
    """One layer, with products joined that read the same."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    norm_in: torch.Tensor
    norm_mlp: torch.Tensor

    @staticmethod
    def of(layer: Layer) -> Weights:
        a, m = layer.self_attn, layer.mlp
        parts = (a.q_proj, a.k_proj, a.v_proj)
        bias = None if a.q_proj.bias is None else torch.cat([p.bias for p in parts])
        return Weights(
            _join(*parts), bias, a.o_proj.weight.data, a.o_proj.bias, _join(m.gate_proj, m.up_proj), m.down_proj.weight.data,
            layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data,  # type: ignore[arg-type]
        )  # fmt: skip


def _join(*parts: torch.nn.Linear) -> torch.Tensor:
    """The weights one below the other; the modules keep views of them. A head on trial goes on learning with these."""
    with torch.inference_mode(False):
        joined = torch.cat([p.weight.data for p in parts])
    for part, own in zip(parts, joined.split([len(p.weight) for p in parts]), strict=True):
        part.weight.data = own
    return joined


class FusedEagle3:
    """Reads and advances as the head does, for a few rows at a time. A state is a stream behind the last layer."""

    most_rows = FEW

    def __init__(self, head: Eagle3Head, limits: Device, positions: int) -> None:
        self.head, self.limits = head, limits
        weight = head.lm_head.weight
        self.dtype, self.device, self.eps = weight.dtype, weight.device, head.config.rms_norm_eps
        self.layers = [Weights.of(layer) for layer in head.layers]
        self.dim = head.layers[0].self_attn.dim
        self.angles = _angles(head, positions, self.dtype, self.device)
        size = head.config.hidden_size
        self.scratch = Scratch(self.device, 4 * FEW * (size + 64), FEW * (size + 64) // 16)

    def read(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Any, last: torch.Tensor
    ) -> Stream:
        """Behind real features; the state of the rows `last`."""
        x = self.head.begin(features)
        stream = self._layers(x, None, tokens, positions, context, False)
        x, h, squares = (t.index_select(0, last) for t in (stream.x, stream.h, stream.squares))
        return Stream(x, h, squares, stream.eps, stream.blocks)

    def remember(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Entries behind real features, of a head with one layer; nobody asks for states."""
        head, first, w = self.head, self.head.layers[0], self.layers[0]
        gains = (first.input_layernorm.weight, first.hidden_norm.weight, None)
        x = head.begin(features)
        both, _ = enter(tokens, head.embed_tokens.weight, x, None, gains, self.eps, first.norm_before_residual)
        own = 2 * keys.shape[1] * self.dim  # rows of the weights that make keys and values
        entries = F.linear(both.x, w.qkv[-own:], None if w.qkv_bias is None else w.qkv_bias[-own:])
        rotate(entries, None, self.eps, self.angles, positions, slots, keys, values)

    def advance(
        self,
        level: int,
        state: Stream,
        parents: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Any,
    ) -> Stream:
        """Each row goes on from the state of its parent."""
        return self._layers(state.x, parents, tokens, positions, context, self.head.flags.norm_output)

    def logits(self, level: int, state: Stream) -> torch.Tensor:
        weight = self.head.lm_head.weight
        return normed_product(
            state, weight, None, self._tile("head", len(state.x), weight), self.scratch, torch.float32
        )

    def _layers(
        self,
        x: torch.Tensor,
        parents: torch.Tensor | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: PagedContext,
        normed: bool,
    ) -> Stream:
        head, rows = self.head, len(tokens)
        first = head.layers[0]
        gains = (first.input_layernorm.weight, first.hidden_norm.weight, head.norm.weight if normed else None)
        both, rest = enter(tokens, head.embed_tokens.weight, x, parents, gains, self.eps, first.norm_before_residual)
        stream = Stream.of(rows, x.shape[1], self.dtype, self.device, self.eps)
        stream.x = rest
        nexts = [w.norm_in for w in self.layers[1:]] + [head.norm.weight.data]
        for i, (w, gain) in enumerate(zip(self.layers, nexts, strict=True)):
            source = both if i == 0 else stream
            how = self._tile("qkv", rows, w.qkv)
            query = qkv(
                source, w.qkv, w.qkv_bias, self.angles, positions, context.layout.slots, context.keys[i], context.values[i],
                how,
            )  # fmt: skip
            out = context.read(i, query, self.dim**-0.5).view(rows, -1)
            add_product(out, w.out, w.out_bias, stream, w.norm_mlp, self._tile("add", rows, w.out), self.scratch)
            inner = gate_up(stream, w.gate_up, self._tile("gate_up", rows, w.gate_up))
            add_product(inner, w.down, None, stream, gain, self._tile("add", rows, w.down), self.scratch)
        return stream

    def _tile(self, kind: str, rows: int, weight: torch.Tensor) -> Tile:
        return tile(kind, rows, *weight.shape, weight.element_size(), self.limits.shared_memory, self.limits.processors)


def _angles(
    head: Eagle3Head, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    from headstart.models.fused import position_angles

    return position_angles(head.rotary, positions, dtype, device)
