"""EAGLE-1 and 2, and the multi-token prediction of DeepSeek-V3: token and feature are joined before an ordinary layer.

Both read the target's stream after its final norm, and speak through the target's lm_head where their files have none.
Parameters have the names of the original checkpoints; what MTP has beside its norms stands under `layers.0` here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headstart.models.attention import Attends
from headstart.models.heads import HeadSpec
from headstart.models.heads.eagle import Layer, LayeredHead, make_rotary


class Eagle1Head(LayeredHead):
    """The first of its layers has no norm before its attention, and none comes before the lm_head."""

    def __init__(self, spec: HeadSpec, config: Any, bias: bool) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        self.embed_tokens = nn.Embedding(spec.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(Layer(config, i, normed=i > 0) for i in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, spec.vocab_size, bias=False)
        self.rotary = make_rotary(config)

    def advance(
        self, level: int, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> torch.Tensor:
        assert context is not None
        angles = self.angles(positions, state)
        state = self.fc(torch.cat([self.embed_tokens(tokens), state], -1))
        for layer in self.layers:
            state = layer(state, angles, context)
        return state

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.lm_head(state)


class SharedHead(nn.Module):
    """The way out of an MTP layer, named as in its files."""

    def __init__(self, config: Any, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, vocab_size, bias=False)


class MtpHead(LayeredHead):
    """One MTP layer, used again and again: what goes on to the next level is normed, as the target's stream is."""

    def __init__(self, spec: HeadSpec, config: Any) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(spec.vocab_size, size)
        self.enorm, self.hnorm = (nn.RMSNorm(size, eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(config, 0)])
        self.shared_head = SharedHead(config, spec.vocab_size)
        self.rotary = make_rotary(config)

    def advance(
        self, level: int, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> torch.Tensor:
        assert context is not None
        joined = torch.cat([self.enorm(self.embed_tokens(tokens)), self.hnorm(state)], -1)
        state = self.layers[0](self.eh_proj(joined), self.angles(positions, state), context)
        return self.shared_head.norm(state)

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.shared_head.head(state)
