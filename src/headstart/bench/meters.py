"""What the machine tells about itself: load, memory, energy."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

RAPL = Path("/sys/class/powercap")


def load() -> float | None:
    """The load average of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def held_bytes() -> int:
    """Memory of this process, and of the GPU that it computes on."""
    torch = sys.modules.get("torch")
    device = torch.cuda.memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0
    return device or _resident()


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):  # no Linux: the most so far is the best that is known
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def joules() -> float | None:
    """Of the GPU's counter where there is one, else of the CPU's packages; None where neither can be read."""
    gpu = _gpu_joules()
    return gpu if gpu is not None else _cpu_joules()


def since(before: float | None) -> float | None:
    """A counter that began anew meanwhile tells nothing."""
    now = joules()
    return now - before if before is not None and now is not None and now >= before else None


def _gpu_joules() -> float | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3
    except Exception:  # not installed, or the driver does not tell
        return None


def _cpu_joules() -> float | None:
    try:
        files = [path / "energy_uj" for path in RAPL.glob("intel-rapl:?")]
        return sum(int(file.read_text()) for file in files) / 1e6 if files else None
    except (OSError, ValueError):
        return None
