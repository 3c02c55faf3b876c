"""The Llama family through the kernels: five launches a layer for a few rows, library products for many.

Built in place from a loaded transformers model, on the fused weights of `lean`. Under `deterministic`, every number of
rows goes through the same kernels with the same tiles, so that a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from headstart.models.attention import Attends
from headstart.models.kernels import block as kernels
from headstart.models.kernels.products import Scratch, Stream, Tile, add_product, embed, gate_up, normed_product, qkv
from headstart.models.kernels.tiles import FEW, FIXED_ROWS, tile
from headstart.models.lean import Block, LeanModel
from headstart.models.paged import Device, PagedContext

Angles = tuple[torch.Tensor, torch.Tensor]


class FusedModel(LeanModel):
    def __init__(self, model: Any, deterministic: bool, limits: Device) -> None:
        super().__init__(model)
        self.deterministic, self.limits = deterministic, limits
        self.dtype, self.device = self.norm.dtype, self.norm.device
        self.widest_few = 0 if self.dtype == torch.float16 else FEW  # h = x · gain may leave float16's range
        windows = [b.window for b in self.blocks]
        self.variety = 1 + max(windows.index(w) for w in windows)  # the first so many layers have all kinds of them
        self.angles: Angles | None = None
        self.scratch: Scratch | None = None

    @torch.inference_mode()
    def prepare(self, positions: int, rows: int) -> None:
        """Make the angles of every position, and room for forwards of up to `rows` rows."""
        self.angles = position_angles(self.rotary, positions, self.dtype, self.device)
        rows = -(-rows // FIXED_ROWS) * FIXED_ROWS if self.deterministic else FEW
        widest = max(len(b.down.weight) for b in self.blocks)
        self.scratch = Scratch(self.device, 4 * rows * (widest + 64), rows * (widest + 64) // 16)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Attends,
        rows: torch.Tensor | None,
        taps: tuple[int, ...],
        layers: int | None = None,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As `LeanModel`, with logits in float32, written to `into` where that is possible."""
        assert isinstance(context, PagedContext) and self.angles is not None
        if self.deterministic or len(tokens) <= self.widest_few:
            return self._few(tokens, positions, context, rows, taps, layers, into)
        return self._many(tokens, positions, context, rows, taps, layers)

    # ------------------------------------------------------------------ a few rows
    def _few(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: PagedContext,
        rows: torch.Tensor | None,
        taps: tuple[int, ...],
        layers: int | None,
        into: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        assert self.scratch is not None
        stream = Stream.of(len(tokens), self.embed.weight.shape[1], self.dtype, self.device, self.eps)
        embed(tokens, context.source, context.chosen, context.mail, self.embed.weight, self.blocks[0].norm_in, stream)
        hidden = {0: stream.x.clone()} if 0 in taps else {}
        blocks = self.blocks[:layers]
        gains = [b.norm_in for b in blocks[1:]] + [self.norm]
        for i, (block, gain) in enumerate(zip(blocks, gains, strict=True)):
            out = context.read(i, self._queries(i, block, stream, positions, context), self.scale, block.window)
            self._add(out.view(len(tokens), -1), block.out.weight, block.out.bias, stream, block.norm_mlp)
            inner = gate_up(stream, block.gate_up.weight, self._tile("gate_up", len(tokens), block.gate_up.weight))
            self._add(inner, block.down.weight, None, stream, gain)
            if i + 1 in taps:
                hidden[i + 1] = stream.x.clone()
        if len(self.blocks) in taps:
            hidden[len(self.blocks)] = F.rms_norm(stream.x, stream.x.shape[-1:], self.norm, self.eps)
        if rows is not None:
            stream = replace(stream, x=stream.x[rows], h=stream.h[rows], squares=stream.squares[rows])
        how = self._tile("head", len(stream.x), self.head.weight)
        return normed_product(stream, self.head.weight, None, how, self.scratch, torch.float32, into), hidden

    def _queries(
        self, i: int, block: Block, stream: Stream, positions: torch.Tensor, context: PagedContext
    ) -> torch.Tensor:
        keys, values, slots, weight = context.keys[i], context.values[i], context.layout.slots, block.qkv.weight
        assert self.angles is not None and self.scratch is not None
        if block.head_gains is None and self.head_dim % 32 == 0:
            how = self._tile("qkv", len(stream.x), weight)
            return qkv(stream, weight, block.qkv.bias, self.angles, positions, slots, keys, values, how)
        how = replace(self._tile("add", len(stream.x), weight), split=1)
        heads = normed_product(stream, weight, block.qkv.bias, how, self.scratch, self.dtype)
        return kernels.rotate(heads, block.head_gains, self.eps, self.angles, positions, slots, keys, values)

    def _add(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: Stream, gain: torch.Tensor
    ) -> None:
        assert self.scratch is not None
        add_product(rows, weight, bias, stream, gain, self._tile("add", len(rows), weight), self.scratch)

    def _tile(self, kind: str, rows: int, weight: torch.Tensor) -> Tile:
        rows = FIXED_ROWS if self.deterministic else rows
        return tile(kind, rows, *weight.shape, weight.element_size(), self.limits.shared_memory, self.limits.processors)

    # ------------------------------------------------------------------ many rows
    def _many(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: PagedContext,
        rows: torch.Tensor | None,
        taps: tuple[int, ...],
        layers: int | None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        assert self.angles is not None
        x = self.embed(tokens.copy_(context.resolve(tokens)))  # the walk reads them too
        hidden = {0: x} if 0 in taps else {}
        for i, block in enumerate(self.blocks[:layers]):
            h = F.rms_norm(x, x.shape[-1:], block.norm_in, self.eps)
            keys, values, slots = context.keys[i], context.values[i], context.layout.slots
            query = kernels.rotate(
                block.qkv(h), block.head_gains, self.eps, self.angles, positions, slots, keys, values
            )
            out = context.read(i, query, self.scale, block.window).view(len(x), -1)
            x = torch.addmm(x, out, block.out.weight.t())
            if block.out.bias is not None:
                x = x + block.out.bias
            h = F.rms_norm(x, x.shape[-1:], block.norm_mlp, self.eps)
            x = torch.addmm(x, kernels.swiglu(block.gate_up(h)), block.down.weight.t())
            if i + 1 in taps:
                hidden[i + 1] = x
        if len(self.blocks) in taps:
            hidden[len(self.blocks)] = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        h = F.rms_norm(x if rows is None else x[rows], x.shape[-1:], self.norm, self.eps)
        return _float_product(h, self.head.weight), hidden


def _float_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with its sums left in float32."""
    if x.dtype == torch.float32 or x.device.type != "cuda":
        return F.linear(x, weight).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def position_angles(rotary: Any, positions: int, dtype: torch.dtype, device: torch.device) -> Angles:
    """cos and sin of every position, (positions, D/2), rounded as the model rounds them."""
    some = torch.zeros(1, dtype=dtype, device=device)
    cos, sin = rotary(some, torch.arange(positions, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
