"""How far a head's distribution is from the target's, over the draft vocabulary: one number for each row."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headstart.errors import ConfigError, nearest

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
