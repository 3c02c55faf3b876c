"""EAGLE-3: one transformer layer that reads the target's features and the next token, and then its own states.

Modules and parameters have the names of vLLM's speculators format, so that a state dict is a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headstart.models.attention import Attends, LayerShape
from headstart.models.heads import Head, HeadSpec


@dataclass(frozen=True)
class Eagle3Flags:
    """Where an EAGLE-3 head has norms; families differ."""

    norm_before_residual: bool = False  # the residual is the normed feature
    norm_before_fc: bool = False  # one norm over all features together
    fc_norm: bool = False  # one norm for each feature
    norm_output: bool = False  # the next level reads the normed state


class Attention(nn.Module):
    """Llama's, Qwen2's (biases, but none on the way out) or Qwen3's (queries and keys normed)."""

    def __init__(self, config: Any, inputs: int) -> None:
        super().__init__()
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, kv_heads, qwen2 = config.num_attention_heads, config.num_key_value_heads, config.model_type == "qwen2"
        bias = qwen2 or getattr(config, "attention_bias", False)
        self.q_proj = nn.Linear(inputs, heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.dim, config.hidden_size, bias=bias and not qwen2)
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = (nn.RMSNorm(self.dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], layer: int, context: Attends):
        """x (T, inputs) -> (T, hidden)."""
        q, k, v = (p(x).view(len(x), -1, self.dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        return self.o_proj(context.attend(layer, q, k, v, self.dim**-0.5).reshape(len(x), -1))


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """An ordinary decoder layer. That of EAGLE-1 has no norm before its attention."""

    def __init__(self, config: Any, index: int, inputs: int | None = None, normed: bool = True) -> None:
        super().__init__()
        self.index = index
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, inputs or size)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(size, eps) if normed else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(self, x: torch.Tensor, angles: Any, context: Attends) -> torch.Tensor:
        """x (T, hidden) -> (T, hidden)."""
        return self.run(x, self.input_layernorm(x), angles, context)

    def run(self, rest: torch.Tensor, read: torch.Tensor, angles: Any, context: Attends) -> torch.Tensor:
        """Attention reads `read`, and is added to `rest`."""
        x = rest + self.self_attn(read, angles, self.index, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class FirstLayer(Layer):
    """The first layer of EAGLE-3: it reads token and feature side by side."""

    def __init__(self, config: Any, norm_before_residual: bool) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(  # type: ignore[override]
        self, token: torch.Tensor, x: torch.Tensor, angles: Any, context: Attends
    ) -> torch.Tensor:
        """token, x (T, hidden): the token's embedding, and the feature or state."""
        normed = self.hidden_norm(x)
        read = torch.cat([self.input_layernorm(token), normed], -1)
        return self.run(normed if self.norm_before_residual else x, read, angles, context)


STEADY = ("default", "linear", "llama3")  # kinds of RoPE whose angles depend on the position alone


class LayeredHead(Head):
    """A head with layers that attend, and so with KV of its own. `config` is theirs, as transformers has it."""

    config: Any
    layers: Any  # a ModuleList of Layer
    rotary: nn.Module

    @property
    def shapes(self) -> tuple[LayerShape, ...]:  # type: ignore[override]
        first = self.layers[0].self_attn
        one = LayerShape(self.config.num_key_value_heads, first.dim, first.dim, first.q_proj.weight.dtype)
        return (one,) * len(self.layers)

    def angles(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (T, 1, head size), of the dtype of `like`."""
        if self.training or like.device.type != "cpu" or self.rotary.rope_type not in STEADY:
            cos, sin = self.rotary(like, positions[None])
            return cos[0, :, None], sin[0, :, None]
        cos, sin = self._table(int(positions.max()) + 1, like)
        return cos[positions], sin[positions]

    def _table(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Angles of the first positions: looked up, they cost a tenth of being computed."""
        known = self.__dict__.get("_angles")
        if known is None or len(known[0]) < length or known[0].dtype != like.dtype:
            cos, sin = self.rotary(like, torch.arange(2 * length)[None])
            known = self.__dict__["_angles"] = (cos[0, :, None], sin[0, :, None])
        return known


class Eagle3Head(LayeredHead):
    """Its layers are those of llama or qwen3."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, spec: HeadSpec, config: Any, flags: Eagle3Flags) -> None:
        super().__init__()
        self.spec, self.config, self.flags = spec, config, flags
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(spec.vocab_size, size)
        self.fc = nn.Linear(len(spec.taps) * spec.hidden_size, size, bias=False)
        others = (Layer(config, i) for i in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(config, flags.norm_before_residual), *others])
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, spec.draft_vocab_size, bias=False)
        if flags.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(spec.taps) * spec.hidden_size, eps)
        if flags.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(spec.hidden_size, eps) for _ in spec.taps)
        if spec.draft_vocab_size != spec.vocab_size:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool))
        self.rotary = make_rotary(config)

    @property
    def targets(self) -> torch.Tensor | None:  # type: ignore[override]
        """d2t holds offsets: own token i is the target's token i + d2t[i]."""
        if self.spec.draft_vocab_size == self.spec.vocab_size:
            return None
        return target_tokens(self.d2t)

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        if self.flags.norm_before_fc:
            features = self.input_norm(features)
        if self.flags.fc_norm:
            parts = features.split(self.spec.hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def advance(
        self, level: int, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> torch.Tensor:
        assert context is not None
        first, *others = self.layers
        angles = self.angles(positions, state)
        state = first(self.embed_tokens(tokens), state, angles, context)
        for layer in others:
            state = layer(state, angles, context)
        return self.norm(state) if self.flags.norm_output else state

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.lm_head(state if self.flags.norm_output else self.norm(state))


def target_tokens(offsets: torch.Tensor) -> torch.Tensor:
    """The target's token for each of a head's own, from d2t."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def make_rotary(config: Any) -> nn.Module:
    """transformers' own rotary embedding, with whatever scaling the config asks for."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config)


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x (T, heads, D), rotated by halves as Llama does."""
    cos, sin = angles
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
