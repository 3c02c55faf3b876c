"""Curves for TensorBoard, which is an extra: `pip install 'headstart[tensorboard]'`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from headstart.errors import ConfigError

Log = Callable[[int, dict[str, float]], None]  # (step, values by name)


def check(asked: bool | None) -> None:
    """Say that it is missing before anything is loaded."""
    if asked and find_spec("tensorboard") is None:
        raise ConfigError("TensorBoard is not installed: pip install 'headstart[tensorboard]', or leave it out.")


def open_board(folder: Path, asked: bool | None, step: int) -> Log:
    """None asks for it where it is installed. What an earlier run wrote behind `step`, and lost, is taken back."""
    if asked is False or find_spec("tensorboard") is None:
        return lambda step, values: None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log
