"""What the device could do at most, measured, and where a forward stands against it.

A forward reads all weights once, however many tokens it computes: plain decoding of one request waits for the memory, and a
forward that verifies a draft gets more tokens for the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headstart.bench.records import Counts, Point, Result

if TYPE_CHECKING:
    import torch

TRIES = 7  # the best one counts: what disturbs only makes it slower
READ = {"cpu": 1 << 28, "cuda": 1 << 32}  # bytes
SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices


def measure(result: Result, model: Any) -> dict[str, Any] | None:
    """For a model in torch, at the point with one request at once; None where there is neither."""
    point = next((p for p in result.points() if p.concurrency == 1), None)
    if point is None or not hasattr(model, "parameters"):
        return None
    weights = list(model.parameters())
    device, dtype = weights[0].device, weights[0].dtype
    points = {method: found for method in result.methods if (found := _forward(result, method, point)) is not None}
    return {
        "bandwidth": bandwidth(device),
        "peak": peak(device, dtype),
        "weights": weight_bytes(model),
        "flops_per_token": 2.0 * sum(p.numel() for p in weights),
        "points": points,
    }


def weight_bytes(model: Any) -> int:
    """0 where it is not torch that holds them."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) if hasattr(model, "parameters") else 0


def _forward(result: Result, method: str, point: Point) -> dict[str, float] | None:
    """One forward behind the prompt: its rows, and its seconds without those of drafting."""
    samples = result.of(method, point)
    counts = Counts.total([s.counts for s in samples])
    if counts.steps is None or counts.steps <= len(samples):
        return None
    forwards = counts.steps - len(samples)  # the first one of each request reads its prompt
    seconds = sum(s.seconds - s.first_seconds for s in samples) - (counts.draft_seconds or 0.0)
    if seconds <= 0:
        return None
    rows = 1 + (counts.drafted or 0) / forwards
    return {"rows": rows, "seconds": seconds / forwards}


def bandwidth(device: torch.device) -> float:
    """Bytes that are read in a second."""
    import torch

    data = torch.ones(READ[device.type] // 4, device=device)
    return 4 * len(data) / _best(data.sum, device)


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations in a second, of a product of large matrices."""
    import torch

    side = SIDE[device.type]
    a = torch.ones(side, side, device=device, dtype=dtype)
    return 2.0 * side**3 / _best(lambda: a @ a, device)


def _best(work: Callable[[], Any], device: torch.device) -> float:
    import torch

    seconds = []
    for _ in range(TRIES + 1):  # the first one prepares
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
