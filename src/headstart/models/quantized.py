"""Products with weights of 8 or 4 bits, by torch's own operators for CPUs. A row's result does not depend on its neighbours.

int4  a scale for each 32 weights of an output; activations are rounded to 8 bits, row by row
int8  the same twice: the second product has what the first left over. Where that is slower than torch's product of 8 bits, as
      on chips without fast products of 4 bits, that one: a scale for each output, and activations as they are

Both keep the embedding as it is and the head in 8 bits. The float weights are let go: the transformers model cannot run on its
own any more.
"""

from __future__ import annotations

from typing import Any

import torch

from headstart.errors import ConfigError
from headstart.models.lean import LeanModel, Product, race
from headstart.progress import note

_product_int8 = torch.ops.aten._weight_int8pack_mm.default  # looking an operator up takes as long as a small one
_product_int4 = torch.ops.aten._dyn_quant_matmul_4bit.default

Rounded = tuple[torch.Tensor, torch.Tensor]
FORMATS = ("int8", "int4")
GROUP = 32
SLOWER = 2.0  # times, from which on it is said: one block may lie in a cache


class Int8Product(Product):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.scale = weight.abs().amax(1).clamp_min(1e-12) / 127
        self.weight = (weight / self.scale[:, None]).round().to(torch.int8)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = _product_int8(x, self.weight, self.scale)
        return out if self.bias is None else out.add_(self.bias)


class Int4Product(Product):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, rounded: Rounded | None = None) -> None:
        super().__init__(weight, bias)
        scale, codes = rounded or _codes(weight)
        nibbles = (codes.to(torch.int32) + 8).view(self.outputs, self.inputs)
        pairs = (nibbles[:, 1::2] << 4 | nibbles[:, ::2]).to(torch.uint8)
        scales = scale.view(self.outputs, -1).bfloat16()
        pack = torch.ops.aten._dyn_quant_pack_4bit_weight
        self.weight = pack(pairs, scales, None, GROUP, self.inputs, self.outputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = _product_int4(x if x.is_contiguous() else x.contiguous(), self.weight, GROUP, self.inputs, self.outputs)
        return out if self.bias is None else out.add_(self.bias)


class TwiceInt4Product(Product):
    """8 bits as 4 and 4."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        scale, codes = _codes(weight)
        self.first = Int4Product(weight, bias, (scale, codes))
        self.second = Int4Product(weight - (scale * codes).view_as(weight))
        self.weight = self.first.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).add_(self.second(x))

    @property
    def extra_bytes(self) -> int:
        return self.second.weight.nbytes


def _codes(weight: torch.Tensor) -> Rounded:
    """Scales (outputs, groups, 1) and whole numbers from -8 to 7 (outputs, groups, GROUP)."""
    groups = weight.view(len(weight), -1, GROUP)
    scale = _best_scale(groups)
    return scale, (groups / scale).round().clamp(-8, 7)


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
    uneven = next((p.inputs for p in lean.products if p.inputs % GROUP), None)
    if kind == "int4" and uneven is not None:
        raise ConfigError(
            f"quantize='int4' needs rows of a multiple of {GROUP} weights; this model has {uneven}: use int8."
        )
    eight = Int8Product if uneven else eight_bits(lean.blocks[0].gate_up.weight)
    make = Int4Product if kind == "int4" else eight
    _say_if_slow(kind, make, lean.blocks[0].gate_up.weight)
    for block in lean.blocks:
        for name in ("qkv", "out", "gate_up", "down"):
            old: Product = getattr(block, name)
            setattr(block, name, make(old.weight, old.bias))
    lean.head = eight(lean.head.weight)  # of all weights, the head's suffer most from 4 bits
    embedding = model.get_input_embeddings().weight
    for linear in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        if linear.weight is not embedding:
            linear.weight.data = linear.weight.data.new_empty(0)


def _say_if_slow(kind: str, make: type[Product], weight: torch.Tensor) -> None:
    """Not every chip has fast products of few bits."""
    plain, small = race([Product(weight), make(weight)], torch.zeros(1, weight.shape[1]))
    if small > SLOWER * plain:
        note(
            f"quantize={kind!r} takes {small / plain:.1f} times as long as float32 on this CPU: it saves memory, not time. "
            "For speed, leave it out, or take a GGUF file with llama.cpp (headstart[llamacpp])."
        )


class SmallLinear(torch.nn.Module):
    """A Linear of a network that is not lean, by one of these products."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.register_buffer("weight", torch.empty(0), persistent=False)  # whose dtype and device others may ask for

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, inputs) -> (T, outputs)."""
        return self.product(x)


@torch.inference_mode()
def shrink(network: torch.nn.Module) -> None:
    """8 bits for all Linears of a network in float32 on a CPU, where that is faster. For drafts: it changes them little, and
    the text not at all."""
    linears = [m for m in network.modules() if isinstance(m, torch.nn.Linear) and m.in_features % GROUP == 0]
    if not linears:
        return
    make = for_drafts(max(linears, key=lambda m: m.weight.numel()).weight[:4096])
    if make is Product:
        return
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if child in linears:
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, SmallLinear(make(child.weight.detach(), bias)))


def for_drafts(weight: torch.Tensor) -> type[Product]:
    """8 bits where they are faster for one row than weights as they are: not every chip has fast products for them."""
    make = eight_bits(weight)
    plain, small = race([Product(weight), make(weight)], torch.zeros(1, weight.shape[1]))
    return make if small < plain else Product


def eight_bits(weight: torch.Tensor) -> type[Product]:
    """The second of two where it is clearly faster for one row, measured on one block."""
    plain, twice = race([Int8Product(weight), TwiceInt4Product(weight)], torch.zeros(1, weight.shape[1]))
    return TwiceInt4Product if twice < 0.7 * plain else Int8Product
