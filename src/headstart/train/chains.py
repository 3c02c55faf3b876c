"""Attention of a head while it learns: every row of a text drafts its own chain, all of them at once.

At level 0 a row sees level 0 of the rows up to itself, in its own document, as at inference. At level k it sees what it saw at
level 0, and what its own chain left at levels 1 to k: the guesses of others are none of its business, since at inference
they are made anew from real features. So the scores of a row are those of level 0's keys, and k more.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F


class Chains:
    """The context that a head's `advance` attends through. Call `advance` for level 0, 1, ... in order."""

    def __init__(self, docs: torch.Tensor) -> None:
        """docs (B, S): which document each token belongs to."""
        self.shape = docs.shape
        causal = torch.ones(docs.shape[1], docs.shape[1], dtype=torch.bool, device=docs.device).tril()
        self.mask = ((docs[:, :, None] == docs[:, None, :]) & causal)[:, None]  # (B, 1, S, S)
        self.kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)  # by layer, one per level

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # (T, H, D), T = B·S
        key: torch.Tensor,  # (T, K, D)
        value: torch.Tensor,  # (T, K, D)
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T, H, D)."""
        assert window is None and softcap is None and sinks is None, "heads have plain attention"
        heads = query.shape[1]
        q, k, v = (self._by_head(x, heads) for x in (query, key, value))
        kept = self.kept[layer]
        kept.append((k, v))
        if len(kept) == 1:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=scale)
        else:
            out = self._chain(q * scale, kept)
        return out.transpose(1, 2).reshape(query.shape)

    def _by_head(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """(T, K, D) -> (B, H, S, D); key heads repeated for the query heads that share them."""
        x = x.view(*self.shape, *x.shape[1:]).transpose(1, 2)
        return x.repeat_interleave(heads // x.shape[1], 1)

    def _chain(self, q: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """A softmax over the S keys of level 0 and the row's own key of each later level."""
        (first_key, first_value), *own = kept
        length = self.shape[1]
        scores = (q @ first_key.transpose(-1, -2)).masked_fill(~self.mask, -torch.inf)  # (B, H, S, S)
        more = [(q * k).sum(-1, keepdim=True) for k, _ in own]  # each (B, H, S, 1)
        weights = torch.cat([scores, *more], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = weights[..., :length] @ first_value
        for i, (_, v) in enumerate(own):
            out = out + weights[..., length + i, None] * v
        return out
