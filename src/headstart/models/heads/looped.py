"""An EAGLE-3 head on CPUs: its small operations as compiled loops, its products with weights of 8 bits.

torch spends most of a level's time on starting operations, of which a level has fifty. Drafts change a little with the 8 bits,
the text not at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headstart.models import quantized
from headstart.models.attention import Attends, Context
from headstart.models.heads import Head
from headstart.models.heads.eagle import Eagle3Head
from headstart.models.lean import Product
from headstart.models.looped import Reader, Reads, available

NO_GAINS = np.empty((0, 1), np.float32)


def shrink(head: Head) -> Head:
    """8 bits for a head in float32 on a CPU, where they are faster; and loops, where it is of a kind that they know."""
    fits = isinstance(head, Eagle3Head) and type(head) is Eagle3Head and len(head.layers) == 1
    if fits and available() and _is_plain(head):
        return LoopedEagle3(head)  # type: ignore[arg-type]
    quantized.shrink(head)
    return head


def _is_plain(head: Any) -> bool:
    layer = head.layers[0]
    even = all(p.shape[1] % quantized.GROUP == 0 for p in head.parameters() if p.ndim == 2)
    return even and not hasattr(layer.self_attn, "q_norm") and layer.mlp.gate_proj.bias is None


class LoopedEagle3(Head):
    """The same network, of one layer."""

    remembers = True

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.inner, self.spec, self.eps = head, head.spec, head.config.rms_norm_eps
        layer = head.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None if attention.q_proj.bias is None else torch.cat([p.bias for p in parts])
        make = quantized.for_drafts(head.lm_head.weight[:4096].detach())

        def product(*weights: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
            return make(torch.cat(weights).detach(), bias)

        head.fc, head.lm_head = (quantized.SmallLinear(product(m.weight)) for m in (head.fc, head.lm_head))  # type: ignore[assignment]
        self.qkv = product(*(p.weight for p in parts), bias=bias)
        kv = None if bias is None else bias[len(bias) - 2 * len(attention.k_proj.bias) :]
        self.kv = product(attention.k_proj.weight, attention.v_proj.weight, bias=kv)
        self.out = product(attention.o_proj.weight, bias=attention.o_proj.bias)
        self.gate_up, self.down = product(mlp.gate_proj.weight, mlp.up_proj.weight), product(mlp.down_proj.weight)
        self.shapes = head.shapes
        self.targets = head.targets
        heads, kv = head.config.num_attention_heads, head.config.num_key_value_heads
        self.reads = Reads(heads, kv, attention.dim, attention.dim**-0.5)
        self.loops = self.reads.loops
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, head.norm)
        self.gains = [n.weight.detach().numpy() for n in norms]
        for linear in (m for m in head.modules() if isinstance(m, torch.nn.Linear)):
            linear.weight.data = linear.weight.data.new_empty(0)

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner.begin(features)

    def _both(self, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """What the layer reads: the token's embedding and the state, normed, side by side; and the normed state alone."""
        size, (of_token, of_state, *_) = state.shape[1], self.gains
        embedded = torch.index_select(self.inner.embed_tokens.weight, 0, tokens)
        both, normed = np.empty((len(tokens), 2 * size), np.float32), np.empty(state.shape, np.float32)
        self.loops.norm(embedded.numpy(), of_token, self.eps, normed)
        both[:, :size] = normed
        self.loops.norm(state.numpy(), of_state, self.eps, normed)
        both[:, size:] = normed
        return torch.from_numpy(both), normed

    def _turn(self, heads: torch.Tensor, queries: int, positions: torch.Tensor, reader: Reader) -> np.ndarray:
        """Turn query and key heads by the angles of their positions; keys and values go to their slots."""
        own = heads.numpy().reshape(len(heads), -1, self.reads.head_dim)
        cos, sin = (a[:, 0].numpy() for a in self.inner.angles(positions, heads))
        self.loops.rotate(own, queries, NO_GAINS, self.eps, cos, sin, *reader.pools[0], reader.write)
        return own

    def remember(
        self, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> None:
        assert isinstance(context, Context)
        both, _ = self._both(state, tokens)
        self._turn(self.kv(both), 0, positions, Reader(self.reads, context, torch.empty(0)))

    def advance(
        self, level: int, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> torch.Tensor:
        assert isinstance(context, Context)
        loops, eps, flags = self.loops, self.eps, self.inner.flags
        *_, of_mlp, of_last = self.gains
        both, normed = self._both(state, tokens)
        rest = normed if flags.norm_before_residual else state.numpy().copy()
        found = torch.empty(len(tokens), self.reads.num_heads * self.reads.head_dim, dtype=torch.float32)
        reader = Reader(self.reads, context, found)
        heads = self._turn(self.qkv(both), self.reads.num_heads, positions, reader)
        mixed = self.out(reader.read(0, heads, None))
        h = np.empty_like(rest)
        loops.add_norm(rest, mixed.numpy(), of_mlp, eps, h)
        act = np.empty((len(tokens), self.down.inputs), np.float32)
        loops.gate(self.gate_up(torch.from_numpy(h)).numpy(), act)
        loops.add_norm(rest, self.down(torch.from_numpy(act)).numpy(), of_last, eps, h)
        return torch.from_numpy(h if flags.norm_output else rest)

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(level, state)
