"""The tensors of a checkpoint folder: names and shapes at once, contents only when they are asked for."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.errors import ModelError
from headstart.models import files

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Store:
    folder: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]

    def weight(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of finite numbers."""
        found = self.read(name)
        if found.dtype not in FLOATS:
            kind = str(found.dtype).removeprefix("torch.")
            raise ModelError(
                f"{self.folder}: tensor {name!r} is of type {kind}; heads have to be in float32, bfloat16 or float16."
            )
        if not bool(found.isfinite().all()):
            raise ModelError(
                f"{self.folder}: tensor {name!r} holds NaN or infinite values, so the checkpoint is damaged. "
                "Fetch it again, or train it again."
            )
        made = found.to(device, dtype)
        if dtype == torch.float16 and not bool(made.isfinite().all()):
            raise ModelError(f"{self.folder}: tensor {name!r} has values beyond float16: use bfloat16 or float32.")
        return made


def open_store(folder: Path) -> Store:
    """safetensors where there are any, else one of the pickles that heads are known to come in."""
    if next(folder.glob("*.safetensors"), None) or (folder / "model.safetensors.index.json").is_file():
        return _safetensors(folder, files.shards(folder))
    for name in PICKLES:
        if (folder / name).is_file():
            return _pickled(folder / name)
    raise ModelError(
        f"{folder} holds no weights of a head: no *.safetensors file, and neither of {' and '.join(PICKLES)}."
    )


def _safetensors(folder: Path, shards: list[Path]) -> Store:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    homes: dict[str, Path] = {}
    for path in shards:
        for name, info in files.safetensors_header(path).items():
            if name in homes:
                raise ModelError(f"{folder} holds tensor {name!r} twice, in {homes[name].name} and {path.name}.")
            shapes[name], homes[name] = tuple(info["shape"]), path

    def read(name: str) -> torch.Tensor:
        try:
            with safe_open(homes[name], framework="pt", device="cpu") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{homes[name]}: tensor {name!r} cannot be read: {error}. Fetch the file again."
            ) from error

    return Store(folder, shapes, read)


def _pickled(path: Path) -> Store:
    """torch's own format. `weights_only` refuses whatever is no plain tensor: a pickle could run code."""
    with path.open("rb") as stream:
        zipped = stream.read(2) == b"PK"
    if zipped and not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is truncated: the end of the file is missing. Fetch the file again.")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} is a Python pickle with more in it than plain tensors, or a damaged one. It was not loaded, since "
            "it could run code: save its state dict as model.safetensors on a machine that you trust."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path} cannot be read, it may be cut short: {_line(error)}. Fetch the file again."
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(n, str) for n in loaded):
        raise ModelError(f"{path} should hold a dict from names to tensors: save the head's state dict alone.")
    for name, value in loaded.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            raise ModelError(f"{path}: the entry {name!r} is no plain tensor. Save the head's state dict alone.")
    return Store(path.parent, {n: tuple(t.shape) for n, t in loaded.items()}, loaded.__getitem__)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
