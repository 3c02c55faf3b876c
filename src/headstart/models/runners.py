"""Which runner a model gets on its device."""

from __future__ import annotations

import functools
from typing import Any

from headstart.errors import ConfigError
from headstart.models.kernels.launch import unusable
from headstart.models.runner import TorchRunner
from headstart.progress import note


def make_runner(
    model: Any, fuse: bool = True, wide: bool = False, kernels: bool = True, deterministic: bool = False
) -> TorchRunner:
    """Through Triton kernels and graphs on a GPU that can, the reference path everywhere else."""
    device = next(model.parameters()).device
    why_not = unusable(device) if kernels else "they were switched off"
    if why_not is None:
        from headstart.models.kernel_runner import KernelRunner

        return KernelRunner(model, fuse, deterministic)
    if deterministic:
        raise ConfigError(f"deterministic needs Headstart's GPU kernels, and {why_not}. Leave deterministic out.")
    if device.type == "cuda" and kernels:
        _say(f"Headstart's GPU kernels are not used: {why_not}. Steps take the slower reference path.")
    return TorchRunner(model, fuse, wide)


@functools.cache
def _say(text: str) -> None:
    """Once."""
    note(text)
