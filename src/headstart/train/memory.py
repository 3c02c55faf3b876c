"""How much memory a run takes, said before it starts. A sum of the large pieces, not a promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headstart.models.heads.eagle import Eagle3Head
from headstart.models.memory import free_memory


@dataclass(frozen=True)
class Need:
    """Bytes."""

    target: int
    head: int  # with float32 copies and the optimiser's two
    step: int  # what a step holds at its fullest
    free: int  # before the step; target and head lie in memory already

    @property
    def total(self) -> int:
        return self.target + self.head + self.step

    def line(self) -> str:
        text = (
            f"Memory: about {self.total / 1e9:.1f} GB ({self.target / 1e9:.1f} target, {self.head / 1e9:.1f} head and "
            f"optimiser, {self.step / 1e9:.1f} for a step); {self.free / 1e9:.1f} GB are free for the step."
        )
        return text + (
            " That may not be enough: lower the batch or the draft vocabulary." if self.step > self.free else ""
        )


def estimate(model: Any, head: Eagle3Head, batch: int, length: int, levels: int) -> Need:
    rows, size = batch * length, head.fc.weight.element_size()
    learned = sum(p.numel() for p in head.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in head.parameters() if not p.requires_grad)
    spec, config = head.spec, head.config
    target_logits = rows * spec.vocab_size * size * 2
    target_states = rows * spec.hidden_size * size * (model.config.get_text_config().num_hidden_layers + 8)
    draft_logits = rows * spec.draft_vocab_size * (8 + levels * (size + 12))
    scores = batch * config.num_attention_heads * length**2 * (levels - 1) * config.num_hidden_layers * (2 * size + 4)
    layers = rows * levels * config.num_hidden_layers * size * (20 * config.hidden_size + 4 * config.intermediate_size)
    target = sum(p.numel() * p.element_size() for p in model.parameters())
    step = max(target_states + target_logits, target_logits // 2 + draft_logits + scores + layers)
    return Need(target, learned * (2 * size + 16) + frozen * size, step, free_bytes(model.device))


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
