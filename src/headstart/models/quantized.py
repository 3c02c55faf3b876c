"""Products with weights of 8 or 4 bits, by torch's own operators for CPUs. A row's result does not depend on its neighbours.

int8  a scale for each output; activations stay as they are
int4  a scale for each 32 weights of an output; activations are rounded to 8 bits, row by row

Both keep the embedding as it is and the head in int8. The float weights are let go: the transformers model cannot run on its
own any more.
"""

from __future__ import annotations

from typing import Any

import torch

from headstart.errors import ConfigError
from headstart.models.lean import LeanModel, Product

FORMATS = ("int8", "int4")
GROUP = 32


class Int8Product(Product):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        scale = weight.abs().amax(1).clamp_min(1e-12) / 127
        super().__init__((weight / scale[:, None]).round().to(torch.int8), bias)
        self.scale = scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scale)
        return out if self.bias is None else out + self.bias


class Int4Product(Product):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        groups = weight.view(self.outputs, -1, GROUP)
        scale = _best_scale(groups)
        nibbles = ((groups / scale).round().clamp(-8, 7).to(torch.int32) + 8).view(self.outputs, self.inputs)
        pairs = (nibbles[:, 1::2] << 4 | nibbles[:, ::2]).to(torch.uint8)
        scales = scale.view(self.outputs, -1).bfloat16()
        packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scales, None, GROUP, self.inputs, self.outputs)
        super().__init__(packed, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.ops.aten._dyn_quant_matmul_4bit(x.contiguous(), self.weight, GROUP, self.inputs, self.outputs)
        return out if self.bias is None else out + self.bias


def _best_scale(groups: torch.Tensor) -> torch.Tensor:
    """(..., 1) of several, the scale that loses least; one of them gives the largest weight of a group the value -8."""
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = torch.ones_like(extreme), torch.full_like(extreme, torch.inf)
    for divisor in (-8.0, -8.5, -9.0, -9.5, 7.0):
        scale = (extreme / divisor).bfloat16().float()  # as it will be kept
        scale = torch.where(scale.abs() < 1e-12, torch.ones_like(scale), scale)
        error = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


KINDS: dict[str, type[Product]] = {"int8": Int8Product, "int4": Int4Product}


def refuse(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Say what `quantize` needs, before a model is loaded."""
    if kind not in FORMATS:
        raise ConfigError(f"quantize={kind!r} is not known: use int8 or int4.")
    if device.type != "cpu":
        raise ConfigError(f"quantize={kind!r} is for CPUs; on {device.type} leave it out.")
    if dtype != torch.float32:
        raise ConfigError(f"quantize={kind!r} computes in float32: use dtype='float32' or leave dtype out.")


@torch.inference_mode()
def quantize(model: Any, lean: LeanModel | None, kind: str) -> None:
    """Replace the products of a lean model, and let the float weights go."""
    if lean is None:
        raise ConfigError(
            f"quantize={kind!r} needs the lean forward, which {type(model).__name__} has none of here "
            "(Llama, Mistral, Qwen2 and Qwen3 have, with fuse=True). Leave quantize out."
        )
    uneven = next((p.weight.shape[1] for p in lean.products if p.weight.shape[1] % GROUP), None)
    if kind == "int4" and uneven is not None:
        raise ConfigError(
            f"quantize='int4' needs rows of a multiple of {GROUP} weights; this model has {uneven}: use int8."
        )
    make = KINDS[kind]
    for block in lean.blocks:
        for name in ("qkv", "out", "gate_up", "down"):
            old: Product = getattr(block, name)
            setattr(block, name, make(old.weight, old.bias))
    lean.head = Int8Product(lean.head.weight)  # of all weights, the head's suffer most from 4 bits
    embedding = model.get_input_embeddings().weight
    for linear in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        if linear.weight is not embedding:
            linear.weight.data = linear.weight.data.new_empty(0)
