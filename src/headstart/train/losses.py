"""How far a student's distribution is from the target's: one number for each row, and one for each level of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from headstart.errors import ConfigError, nearest
from headstart.train.packing import Batch
from headstart.train.student import Student
from headstart.train.target import Lesson

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kl(ours: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target ‖ ours), of log probabilities (R, V)."""
    return (target.exp() * (target - ours)).sum(-1)


def reverse_kl(ours: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (ours.exp() * (ours - target)).sum(-1)


def tv(ours: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Total variation: the chance that sampling rejects the draft."""
    return 0.5 * (ours.exp() - target.exp()).abs().sum(-1)


def ce(ours: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy with the target's first choice alone."""
    return F.nll_loss(ours, target.argmax(-1), reduction="none")


LOSSES: dict[str, Loss] = {"kl": kl, "rkl": reverse_kl, "tv": tv, "ce": ce}


def find(name: str) -> Loss:
    """A loss by its name; `kl+tv` is the sum of two."""
    parts = name.split("+")
    for part in parts:
        if part not in LOSSES:
            raise ConfigError(f"loss={name!r} is not known.{nearest(part, LOSSES)}")
    return lambda ours, target: sum((LOSSES[p](ours, target) for p in parts[1:]), LOSSES[parts[0]](ours, target))


# ------------------------------------------------------------------ of a step
def step_losses(student: Student, lesson: Lesson, batch: Batch, loss: Loss) -> torch.Tensor:
    """(levels,) mean loss of the rows that count at each level."""
    features = lesson.features
    if student.noise:
        features = features + student.noise * features.std() * torch.randn_like(features)
    out = []
    for level, state in enumerate(student.states(features, batch, student.levels)):
        args = (student, level, state, lesson.log_probs, batch.levels[level][1], loss)
        out.append(checkpoint(_level_loss, *args, use_reentrant=False) if student.recompute else _level_loss(*args))
    return torch.stack(out)


def _level_loss(
    student: Student, level: int, state: torch.Tensor, target: torch.Tensor, places: torch.Tensor, loss: Loss
) -> torch.Tensor:
    ours = student.logits(level, state).float().log_softmax(-1)
    return loss(ours, target[places]).sum() / max(1, len(places))


def level_weights(levels: int, decay: float) -> torch.Tensor:
    """How much each level's loss counts; they sum to one."""
    weights = decay ** torch.arange(levels, dtype=torch.float32)
    return weights / weights.sum()
