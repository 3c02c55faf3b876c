"""How kernels are launched on this machine: whether Triton can be used at all, and whether a launch may begin early."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


@functools.cache
def interpreted() -> bool:
    """Kernels run in Triton's interpreter, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def unusable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, or None when they can."""
    if device.type != "cuda" and not interpreted():
        return "they need a CUDA GPU"
    try:
        import triton
    except ImportError:
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return None
    if torch.version.hip:
        return "they need an NVIDIA GPU"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"they need compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    try:
        triton.runtime.driver.active.get_current_device()  # builds a small library, which needs a C compiler
    except Exception as error:
        return f"Triton does not start ({str(error).splitlines()[0]})"
    return None


def early_launch() -> dict[str, Any]:
    """From Hopper on, a kernel may be set up while the one before it still runs; it waits inside for its data."""
    return {"EARLY": False} if interpreted() else _early_launch(torch.cuda.current_device())


@functools.cache
def _early_launch(device: int) -> dict[str, Any]:
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}
