"""How much memory a run takes, said before it starts. A sum of the large pieces, not a promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headstart.models.memory import free_memory
from headstart.train.student import Student


@dataclass(frozen=True)
class Need:
    """Bytes."""

    target: int
    student: int  # with float32 copies and the optimiser's two
    step: int  # what a step holds at its fullest
    free: int  # before the step; target and student lie in memory already

    @property
    def total(self) -> int:
        return self.target + self.student + self.step

    def line(self) -> str:
        text = (
            f"Memory: about {self.total / 1e9:.1f} GB ({self.target / 1e9:.1f} target, {self.student / 1e9:.1f} student and "
            f"optimiser, {self.step / 1e9:.1f} for a step); {self.free / 1e9:.1f} GB are free for the step."
        )
        return text + (" That may not be enough: lower the batch or the length." if self.step > self.free else "")


def estimate(model: Any, student: Student, batch: int, length: int) -> Need:
    rows, weights = batch * length, list(student.module.parameters())
    size = weights[0].element_size()
    learned = sum(p.numel() for p in weights if p.requires_grad)
    frozen = sum(p.numel() for p in weights if not p.requires_grad)
    config = model.config.get_text_config()
    target_logits = rows * config.vocab_size * size * 2
    target_states = rows * config.hidden_size * size * (config.num_hidden_layers + 8)
    kept = 1 if student.recompute else student.levels
    draft_logits = rows * student.vocab * (8 + kept * (size + 12))
    target = sum(p.numel() * p.element_size() for p in model.parameters())
    step = max(target_states + target_logits, target_logits // 2 + draft_logits + student.activations(batch, length))
    return Need(target, learned * (2 * size + 16) + frozen * size, step, free_bytes(model.device))


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
