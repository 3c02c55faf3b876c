"""AdamW on float32 copies of the weights, and the learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import torch

from headstart.errors import ConfigError, nearest

SCHEDULES = ("cosine", "linear", "constant")
FLOOR = 0.02  # of the learning rate, at the end


class Optimizer:
    """The student computes in its own dtype; steps are taken on float32 copies, so that small ones are not rounded away."""

    def __init__(
        self, module: torch.nn.Module, rate: float, betas: tuple[float, float], decay: float, clip: float
    ) -> None:
        self.rate, self.clip = rate, clip
        self.weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {name: p.detach().float().clone() for name, p in self.weights.items()}
        matrices = [m for m in self.masters.values() if m.dim() > 1]
        vectors = [m for m in self.masters.values() if m.dim() == 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        fused = next(iter(self.masters.values())).is_cuda
        self.adam = torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)

    def step(self, scale: float) -> torch.Tensor:
        """One step at `scale` times the learning rate; returns the gradient's norm."""
        for name, p in self.weights.items():
            self.masters[name].grad = None if p.grad is None else p.grad.float()
            p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.clip)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * scale
        self.adam.step()
        self.publish()
        return norm

    def publish(self) -> None:
        """Give the student the weights as they are now."""
        with torch.no_grad():
            for name, p in self.weights.items():
                p.copy_(self.masters[name])

    def state(self) -> dict[str, Any]:
        return {"masters": {n: m.detach().cpu() for n, m in self.masters.items()}, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, m in self.masters.items():
                m.copy_(state["masters"][name])
        self.adam.load_state_dict(state["adam"])
        self.publish()


def check_schedule(name: str) -> None:
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r} is not known.{nearest(name, SCHEDULES)}")


def rate_scale(schedule: str, step: int, warmup: int, progress: float) -> float:
    """Share of the learning rate at a step, when `progress` (0 to 1) of the run is over."""
    begun = min(1.0, (step + 1) / max(1, warmup))
    if schedule == "constant":
        return begun
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return begun * (FLOOR + (1 - FLOOR) * max(0.0, left))
