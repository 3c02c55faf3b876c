"""Lean forward for the Llama family: the same weights, fewer and larger operations.

Query, key and value products become one, gate and up become one, and Python calls nothing but the operations that
count. The fused weights replace the originals as views of one block, so no weight is held twice and the transformers
model still works.

On CPUs where torch's product for a few rows is slow, `wide` adds a second copy of the weights in oneDNN's own order: one row
uses the plain weights, several rows the reordered ones. Whether it pays is measured when the model is loaded. Several engines
over one model share its weights, in both orders.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from headstart.models.attention import Attends
from headstart.models.memory import free_memory
from headstart.progress import note

_packed_product = torch.ops.mkldnn._linear_pointwise.default  # looking an operator up takes as long as a small one

T = TypeVar("T")
FAMILY = ("llama", "mistral", "qwen2", "qwen3")
# second copies of weights, by where those are, while some product has one
_packed: weakref.WeakValueDictionary[tuple[int, torch.Size], torch.Tensor] = weakref.WeakValueDictionary()
# what was done and measured once for a model: engines over it go by that, whatever disturbed the machine when they came
_findings: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class Product:
    """x -> x W^T + b for one block of weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight, self.bias = weight, bias
        self.packed: torch.Tensor | None = None
        self.team: Any = None  # that computes products of a few rows, where it is there and at work

    @functools.cached_property
    def across(self) -> torch.Tensor:
        return self.weight.t()

    def pack(self) -> None:
        """Keep a copy in oneDNN's order too, for forwards of several rows: that of another product with these weights, if it
        has one."""
        self.packed = _packed.get(self._place)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            _packed[self._place] = self.packed

    @property
    def is_packed(self) -> bool:
        """By this product or by another with these weights."""
        return self._place in _packed

    @property
    def _place(self) -> tuple[int, torch.Size]:
        """Of its weights. It stays theirs while somebody has a second copy of them: whoever has that has them, too."""
        return self.weight.data_ptr(), self.weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.team is not None and x.shape[0] <= self.team.most_rows and self.team.working:
            out = self.team.product(x, self.weight)
            return out if self.bias is None else out.add_(self.bias)
        if self.packed is None or x.numel() == self.inputs:  # one row
            return torch.mm(x, self.across) if self.bias is None else torch.addmm(self.bias, x, self.across)
        return _packed_product(x, self.packed, self.bias, "none", [], "")

    @property
    def extra_bytes(self) -> int:
        return 0 if self.packed is None else self.weight.nbytes


@dataclass
class Block:
    norm_in: torch.Tensor
    qkv: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Product
    norm_mlp: torch.Tensor
    gate_up: Product
    down: Product
    window: int | None

    @property
    def head_gains(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of a norm over each query and each key head, where the model has one."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)


class LeanModel:
    """Runs a loaded Llama-family model without its module tree."""

    def __init__(self, model: Any) -> None:
        body = model.model
        config = model.config
        self.embed, self.rotary, self.head = body.embed_tokens, body.rotary_emb, Product(model.lm_head.weight)
        self.norm, self.eps = body.norm.weight, config.rms_norm_eps
        self.blocks = [_block(layer, config) for layer in body.layers]
        attention = body.layers[0].self_attn
        self.head_dim, self.scale = attention.head_dim, attention.scaling
        self.num_heads = config.num_attention_heads
        self.num_kv = config.num_key_value_heads
        self._found = _findings.setdefault(model, {})

    def once(self, what: str, do: Callable[[], T]) -> T:
        """What this finds, or has found for another engine over the same model."""
        if what not in self._found:
            self._found[what] = do()
        found: T = self._found[what]
        return found

    def release(self) -> None:
        """The KV tensors go."""

    @property
    def products(self) -> list[Product]:
        return [self.head, *(p for b in self.blocks for p in (b.qkv, b.out, b.gate_up, b.down))]

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Attends,
        rows: torch.Tensor,
        taps: tuple[int, ...],
        layers: int | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """tokens, positions (T,), rows (R,) -> logits (R, V) and the tapped hidden states, each (T, hidden). With `layers`, so
        many of them run."""
        x = self.embed(tokens)
        cos, sin = self.rotary(x[None], positions[None])
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)  # (T, 1, D)
        hidden = {0: x} if 0 in taps else {}
        for i, block in enumerate(self.blocks[:layers]):
            x = self._attention(i, block, x, cos, sin, context)
            x = self._mlp(block, x)
            if i + 1 in taps:
                hidden[i + 1] = x
        if len(self.blocks) in taps:  # as transformers reports it: after the final norm
            hidden[len(self.blocks)] = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        if len(rows) < len(x):
            x = x[rows]
        return self.head(F.rms_norm(x, x.shape[-1:], self.norm, self.eps)), hidden

    def _attention(
        self, i: int, block: Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: Attends
    ) -> torch.Tensor:
        h = F.rms_norm(x, x.shape[-1:], block.norm_in, self.eps)
        qkv = block.qkv(h).view(len(x), -1, self.head_dim)
        heads = self.num_heads + self.num_kv
        qk, value = qkv[:, :heads], qkv[:, heads:]
        if (gains := block.head_gains) is not None:
            q = F.rms_norm(qk[:, : self.num_heads], (self.head_dim,), gains[0], self.eps)
            k = F.rms_norm(qk[:, self.num_heads :], (self.head_dim,), gains[1], self.eps)
            qk = torch.cat([q, k], 1)
        half = self.head_dim // 2
        qk = qk * cos + torch.cat([-qk[..., half:], qk[..., :half]], -1) * sin
        query, key = qk[:, : self.num_heads], qk[:, self.num_heads :]
        out = context.attend(i, query, key, value, self.scale, block.window)
        return x + block.out(out.reshape(len(x), -1))

    def _mlp(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, x.shape[-1:], block.norm_mlp, self.eps)
        gate, up = block.gate_up(h).chunk(2, -1)
        return x + block.down(F.silu(gate) * up)


def in_family(model: Any) -> bool:
    """Are this model's parts exactly those of the family?"""
    config = model.config
    if config.model_type not in FAMILY or getattr(config, "hidden_act", "silu") != "silu":
        return False
    try:
        layers = model.model.layers
        parts = [m for layer in layers for m in _linears(layer)] + [model.lm_head]
        plain = all(type(m) is nn.Linear for m in parts) and model.lm_head.bias is None
        mlp_bias = any(m.bias is not None for layer in layers for m in (layer.mlp.gate_proj, layer.mlp.down_proj))
        same_device = len({p.device for p in model.parameters()}) == 1
    except AttributeError:
        return False
    return plain and same_device and not mlp_bias


def lean(model: Any, wide: bool = False, kind: type[LeanModel] = LeanModel) -> LeanModel | None:
    """A lean runner for this model, or None where its parts are not exactly those of the family."""
    if not in_family(model):
        return None
    out = kind(model)
    out.once("own weights", lambda: _own(model, out))
    if wide and out.once("wide", lambda: wide_pays(out.blocks[0].gate_up.weight)):
        _pack_all(out)
    return out


def _pack_all(model: LeanModel) -> None:
    """The second copy, unless it would take more than a quarter of the free memory."""
    size = sum(p.weight.nbytes for p in model.products if not p.is_packed)
    if size > free_memory() // 4:
        note(f"No second copy of the weights ({size >> 20} MB) for several rows: memory is short, so drafts cost more.")
        return
    for product in model.products:
        product.pack()


@torch.inference_mode()
def wide_pays(weight: torch.Tensor, rows: int = 16) -> bool:
    """Is oneDNN with its own order of the weights clearly faster here for several rows? Measured on one block."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    plain, packed = Product(weight), Product(weight)
    try:
        packed.pack()
        slow, fast = race([plain, packed], torch.zeros(rows, weight.shape[1]))
    except (RuntimeError, AttributeError):  # a torch built without it
        return False
    return fast < 0.8 * slow


def race(ways: Sequence[Callable[[T], Any]], x: T, tries: int = 9) -> list[float]:
    """The least seconds of each, in turns: what takes longer was disturbed."""
    least = [math.inf for _ in ways]
    for _ in range(tries):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            way(x)
            least[i] = min(least[i], time.perf_counter() - start)
    return least


def _own(model: Any, fused: LeanModel) -> None:
    """Take the other weights out of the mapped file too, so that the file is let go and nothing is held twice."""
    blocks = {
        b.untyped_storage().data_ptr() for block in fused.blocks for b in (block.qkv.weight, block.gate_up.weight)
    }
    for p in model.parameters():
        if p.device.type == "cpu" and p.data.untyped_storage().data_ptr() not in blocks:
            p.data = p.data.clone()


def _linears(layer: Any) -> list[Any]:
    a, m = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]


def _block(layer: Any, config: Any) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [p.bias for p in projections]
    return Block(
        norm_in=layer.input_layernorm.weight,
        qkv=Product(_fuse(projections), None if biases[0] is None else torch.cat(biases)),
        q_norm=getattr(getattr(attention, "q_norm", None), "weight", None),
        k_norm=getattr(getattr(attention, "k_norm", None), "weight", None),
        out=Product(attention.o_proj.weight, attention.o_proj.bias),
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=Product(_fuse([mlp.gate_proj, mlp.up_proj])),
        down=Product(mlp.down_proj.weight),
        window=_window(attention, config),
    )


def _window(attention: Any, config: Any) -> int | None:
    """Qwen's layers carry their own window; Mistral has one for all; Llama has none."""
    if config.model_type == "mistral":
        return config.sliding_window
    return getattr(attention, "sliding_window", None)


def _fuse(linears: list[nn.Linear]) -> torch.Tensor:
    """One block of weights; the originals become views of it, if another engine has not made them so."""
    if (known := _fused([m.weight.data for m in linears])) is not None:
        return known
    block = torch.cat([m.weight.data for m in linears])
    start = 0
    for m in linears:
        stop = start + m.weight.shape[0]
        m.weight.data = block[start:stop]
        start = stop
    return block


def _fused(weights: list[torch.Tensor]) -> torch.Tensor | None:
    """The block that these fill one behind the other, and nothing else does."""
    memory, first = weights[0].untyped_storage(), weights[0]
    *starts, end = itertools.accumulate((w.nbytes for w in weights), initial=memory.data_ptr())
    if [w.data_ptr() for w in weights] != starts or end != memory.data_ptr() + memory.nbytes() or not memory.nbytes():
        return None
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())
