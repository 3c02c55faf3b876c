"""When a run has learned what it can: what was measured last is hardly better than what was measured before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Look = dict[str, Any]  # an entry of a run's history: scores on held-out text and, under "engine", of a trial


def measured(history: Sequence[Look]) -> list[float]:
    """Block efficiencies in the engine, where there were trials; otherwise those of held-out text."""
    tried = [look["engine"]["block_efficiency"] for look in history if "engine" in look]
    return tried or [look["block_efficiency"] for look in history]


def flat(history: Sequence[Look], patience: int, gain: float) -> bool:
    """Did the last `patience` measurements bring less than `gain` over the best one before? Never with a patience of 0."""
    values = measured(history)
    if not patience or len(values) <= patience:
        return False
    return max(values[-patience:]) < max(values[:-patience]) + gain


def best_look(history: Sequence[Look]) -> Look | None:
    """The first of the best ones on held-out text, whose weights are what is exported."""
    return max(history, key=lambda look: look["block_efficiency"]) if history else None
