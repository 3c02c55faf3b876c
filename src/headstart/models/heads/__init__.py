"""Heads: small networks that draft from what the target computed anyway. One contract for all kinds.

The target has computed the token at position t; its hidden states there are the *features* of t. It chose the token at
t + 1. A head goes on from these two:

    state = head.begin(features of t)
    state = head.advance(0, state, token at t + 1, position t, context)
    logits = head.logits(0, state)                                  # of the token at t + 2: the first of a draft
    state = head.advance(1, state, that token, position t + 1, context)
    logits = head.logits(1, state)                                  # of the token at t + 3

and so on. What an EAGLE head remembers of a position is one entry of its own KV, made by `advance(0, ...)` from real features:
those of drafted tokens are guesses, and are made anew once the target has been there.

A head that drafts in parallel does not read what it drafted. It has a `blank`, a token and features that stand for one that is
not known: rows of blanks behind the last token give the states of all further levels in the same `advance(0, ...)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.models.attention import Attends, LayerShape


@dataclass(frozen=True)
class Blank:
    """What a head reads in place of a token that is not known yet."""

    token: int
    features: torch.Tensor  # (1, taps · hidden)


@dataclass(frozen=True)
class HeadSpec:
    """What a head is and which target it fits. `taps` count as transformers' hidden_states do: 0 is the embedding, k the stream
    after k layers; the number of layers itself is the stream after the final norm."""

    kind: str  # eagle3, peagle, eagle, medusa, mlp, mtp
    hidden_size: int  # of the target
    vocab_size: int  # of the target
    draft_vocab_size: int
    taps: tuple[int, ...]  # features, concatenated in this order
    max_depth: int | None = None  # tokens that it can draft; None: any number
    target: str | None = None  # the name that its checkpoint gives
    dialect: str = "headstart"

    @property
    def method(self) -> str:
        """The name of the method that drafts with such a head."""
        return "mlp_speculator" if self.kind == "mlp" else self.kind


class Head(torch.nn.Module):
    """The contract. T rows at once; a row is one place of one request."""

    spec: HeadSpec
    shapes: tuple[LayerShape, ...] = ()  # of the KV of each of its layers; none where it remembers nothing
    targets: torch.Tensor | None = None  # (draft vocabulary,) the target's token for each of its own; None: the same
    blank: Blank | None = None  # of heads that draft all levels at once
    remembers = False  # whether `remember` is much cheaper than `advance`

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """(T, taps · hidden) features of the target -> (T, S) states. As they are, unless a head says otherwise."""
        return features

    def advance(
        self, level: int, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> torch.Tensor:
        """States (T, S) behind these tokens (T,), which stand one place behind `positions` (T,)."""
        raise NotImplementedError

    def remember(
        self, state: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: Attends | None
    ) -> None:
        """As `advance(0, ...)`, for rows whose states nobody asks for: their entries alone."""
        self.advance(0, state, tokens, positions, context)

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        """(T, draft vocabulary) of the token that comes after level + 1 tokens."""
        raise NotImplementedError
