"""The target as a teacher: features and logits of packed sequences, from its own transformers code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headstart.train.packing import Batch


@dataclass(frozen=True)
class Lesson:
    """What the target says about a batch."""

    features: torch.Tensor  # (T, taps · hidden) of each row
    log_probs: torch.Tensor  # (P, V) float32, over the student's vocabulary, at each asked place
    best: torch.Tensor  # (P,) its first choice there, of the whole vocabulary


class Teacher:
    def __init__(self, model: Any, taps: tuple[int, ...], choices: torch.Tensor | None) -> None:
        """choices: the target's token for each token of the student's vocabulary; None where they are the same."""
        self.model, self.taps, self.choices = model.eval().requires_grad_(False), taps, choices

    @torch.no_grad()
    def teach(self, batch: Batch) -> Lesson:
        out = forward(self.model, batch, output_hidden_states=bool(self.taps))
        found = [out.hidden_states[i].flatten(0, 1) for i in self.taps]
        features = torch.cat(found, -1) if found else out.logits.new_empty(batch.tokens.numel(), 0)
        logits = out.logits.flatten(0, 1)[batch.asked]
        best = logits.argmax(-1)
        chosen = logits if self.choices is None else logits[:, self.choices]
        return Lesson(features, chosen.float().log_softmax(-1), best)


def forward(model: Any, batch: Batch, **more: Any) -> Any:
    """What a transformers model computes of packed sequences, in which documents do not see each other."""
    mask = block_mask(batch.docs, model.dtype)
    return model(batch.tokens, attention_mask=mask, position_ids=batch.positions, use_cache=False, **more)


def block_mask(docs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, 1, S, S) to add to scores: 0 where a row may look (back, in its own document), very negative elsewhere."""
    length = docs.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=docs.device).tril()
    seen = (docs[:, :, None] == docs[:, None, :]) & causal
    mask = torch.zeros(seen.shape, dtype=dtype, device=docs.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
