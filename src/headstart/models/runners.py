"""Which runner a model gets on its device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from headstart.errors import ConfigError
from headstart.models import quantized
from headstart.models.base import Runner
from headstart.models.kernels.launch import unusable
from headstart.models.llamacpp.native import LlamaFile
from headstart.models.llamacpp.runner import LlamaRunner
from headstart.models.runner import TorchRunner
from headstart.progress import note

if TYPE_CHECKING:
    import torch


def make_runner(
    model: Any,
    fuse: bool = True,
    wide: bool = False,
    kernels: bool = True,
    deterministic: bool = False,
    quantize: str | None = None,
) -> Runner:
    """llama.cpp for its files; Triton kernels and graphs on a GPU that can; the reference path everywhere else."""
    if isinstance(model, LlamaFile):
        if deterministic or quantize:
            asked = "deterministic" if deterministic else "quantize"
            raise ConfigError(f"{asked} is for models that torch runs, and llama.cpp runs this one.")
        return LlamaRunner(model)
    parameter = next(model.parameters())
    device = parameter.device
    if quantize:
        quantized.refuse(quantize, device, parameter.dtype)
    if deterministic:
        require_kernels(device, kernels)
    why_not = _why_not(device, kernels)
    if why_not is None:
        from headstart.models.kernel_runner import KernelRunner

        return KernelRunner(model, fuse, deterministic)
    if device.type == "cuda" and kernels:
        _say(f"Headstart's GPU kernels are not used: {why_not}. Steps take the slower reference path.")
    return TorchRunner(model, fuse, wide, quantize)


def require_kernels(device: torch.device, kernels: bool) -> None:
    """Say at once that `deterministic` cannot be had."""
    if (why_not := _why_not(device, kernels)) is not None:
        raise ConfigError(f"deterministic needs Headstart's GPU kernels, and {why_not}. Leave deterministic out.")


def _why_not(device: torch.device, kernels: bool) -> str | None:
    return unusable(device) if kernels else "they were switched off"


@functools.cache
def _say(text: str) -> None:
    """Once."""
    note(text)
