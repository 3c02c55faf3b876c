"""IBM's MLP speculator: a recurrent network. Each level has weights of its own, which a checkpoint may tie."""

from __future__ import annotations

import math

import torch
from torch import nn

from headstart.models.attention import Attends
from headstart.models.heads import Head, HeadSpec

EPS = 1e-6  # not in its config


class Norm(nn.Module):
    """A root-mean-square norm with a shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * scaled(x) + self.bias


class MlpHead(Head):
    """`inner` is the width of its state behind a token; at first the state is as wide as the target's."""

    def __init__(self, spec: HeadSpec, inner: int, scale_input: bool) -> None:
        super().__init__()
        assert spec.max_depth is not None
        self.spec, self.inner, self.scale_input = spec, inner, scale_input
        depth, vocab = spec.max_depth, spec.draft_vocab_size
        self.emb = nn.ModuleList(nn.Embedding(spec.vocab_size, inner) for _ in range(depth))
        self.proj = nn.ModuleList(nn.Linear(inner if i else spec.hidden_size, inner, bias=False) for i in range(depth))
        self.ln = nn.ModuleList(Norm(inner) for _ in range(depth))
        self.head = nn.ModuleList(nn.Linear(inner, vocab, bias=False) for _ in range(depth))
        state_weight = 0.5 ** (0.5 / depth)  # of the state, so that it is halved over all levels
        self.token_weight = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight

    def tie(self) -> None:
        """Let all levels share their weights. The first projection stays its own, since it reads the target's width."""
        for parts, first in ((self.emb, 0), (self.ln, 0), (self.head, 0), (self.proj, 1)):
            for i in range(first + 1, len(parts)):
                parts[i] = parts[first]

    @property
    def tied(self) -> bool:
        first = [next(level.parameters()).data_ptr() for level in self.emb]
        return len(first) > 1 and first[0] == first[1]

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        return scaled(features) / math.sqrt(2) if self.scale_input else features

    def advance(
        self, level: int, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> torch.Tensor:
        joined = self.proj[level](state) + self.token_weight * self.emb[level](tokens)
        return nn.functional.gelu(self.ln[level](joined))

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.head[level](state)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
