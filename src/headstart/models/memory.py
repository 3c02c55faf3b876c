"""How much memory there is: for the KV pools, and for a second copy of the weights."""

from __future__ import annotations

import os


def free_memory() -> int:
    """Bytes of main memory that can be had now."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 4 << 30
