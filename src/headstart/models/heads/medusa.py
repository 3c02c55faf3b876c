"""Medusa: a small network for each token of a draft. All read the target's last state, none the drafted tokens."""

from __future__ import annotations

import torch
from torch import nn

from headstart.models.attention import Attends
from headstart.models.heads import Head, HeadSpec


class ResBlock(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHead(Head):
    """`heads.i.j.linear` is block j of level i, `heads.i.{blocks}` its lm_head; Medusa's files say `i.j.linear`."""

    def __init__(self, spec: HeadSpec, blocks: int, bias: bool = True) -> None:
        super().__init__()
        assert spec.max_depth is not None
        self.spec, self.blocks = spec, blocks
        self.heads = nn.ModuleList(self._level(blocks, bias) for _ in range(spec.max_depth))

    def _level(self, blocks: int, bias: bool) -> nn.Sequential:
        size, vocab = self.spec.hidden_size, self.spec.draft_vocab_size
        return nn.Sequential(*(ResBlock(size, bias) for _ in range(blocks)), nn.Linear(size, vocab, bias=False))

    def advance(
        self, level: int, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> torch.Tensor:
        return state

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.heads[level](state)
