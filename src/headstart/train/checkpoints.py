"""Checkpoints that a kill cannot break: written beside the old one, then put in its place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from headstart.errors import BadInput


def save(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_suffix(".new")
    with open(beside, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise BadInput(f"{path} is damaged and cannot be read: remove it to begin anew.") from error


def check_same(path: Path, kept: str, now: str) -> None:
    """A checkpoint goes on only with the options that it began with."""
    if kept == now:
        return
    old, new = json.loads(kept), json.loads(now)
    names = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    changes = ", ".join(f"{n} was {old.get(n)!r} and is {new.get(n)!r}" for n in names)
    raise BadInput(
        f"{path} is of a run with other options ({changes}): use another folder, or remove it to begin anew."
    )


def random_state() -> dict[str, torch.Tensor]:
    out = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
