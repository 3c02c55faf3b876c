"""What the machine tells about itself: load, memory, energy."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")


def load() -> float | None:
    """The load average of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def cores() -> int:
    """That this process may compute on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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


def joules(gpus: Sequence[int] | None = None) -> float | None:
    """That were spent so far: by these GPUs, which another process computes on; by the one that this process computes on; else
    by the CPU's packages. None where that cannot be read."""
    handles = [_by_number(number) for number in gpus] if gpus else _own_gpu()
    return _gpu_joules(handles) if handles else _cpu_joules()


def since(before: float | None, gpus: Sequence[int] | None = None) -> float | None:
    """A counter that began anew meanwhile tells nothing."""
    now = joules(gpus)
    return now - before if before is not None and now is not None and now >= before else None


@functools.cache
def _nvml() -> Any:
    """The driver's library, which counts what GPUs spend."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def count_gpus() -> int:
    library, count = _nvml(), ctypes.c_uint()
    return count.value if library is not None and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0


def visible_gpus() -> list[int]:
    """Those that programs see here, as the driver counts them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = list(range(count_gpus()))
    chosen = [int(part) for part in told.split(",") if part.strip().isdigit()] if told is not None else every
    return [number for number in chosen if number in every]


def _by_number(number: int) -> ctypes.c_void_p | None:
    library, handle = _nvml(), ctypes.c_void_p()
    found = library is not None and library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0
    return handle if found else None


def _own_gpu() -> list[ctypes.c_void_p | None]:
    """By its name: programs may see fewer GPUs than the driver does."""
    torch, library = sys.modules.get("torch"), _nvml()
    if torch is None or library is None or not torch.cuda.is_initialized():
        return []
    name, handle = f"GPU-{torch.cuda.get_device_properties().uuid}", ctypes.c_void_p()
    return [handle if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0 else None]


def _gpu_joules(handles: Sequence[ctypes.c_void_p | None]) -> float | None:
    library, total = _nvml(), 0
    for handle in handles:
        spent = ctypes.c_ulonglong()
        if handle is None or library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(spent)) != 0:
            return None  # before Volta they do not count
        total += spent.value
    return total / 1e3


def _cpu_joules() -> float | None:
    try:
        files = [path / "energy_uj" for path in RAPL.glob("intel-rapl:?")]
        return sum(int(file.read_text()) for file in files) / 1e6 if files else None
    except (OSError, ValueError):
        return None
