"""GGUF files: checked, read through transformers (dequantised), converted once, then loaded from the cache.

Reading a GGUF file takes transformers half a minute for a small model: it reads the header three times, element by element, and
makes the table of names anew for each part of the model. While we convert, both are done once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import shutil
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.models.builtin import cache_dir
from headstart.progress import note, status

MAGIC = b"GGUF"


def check(path: Path) -> None:
    """Is it a GGUF file, and is all of it there?"""
    with path.open("rb") as stream:
        head = stream.read(24)
    if len(head) < 24 or head[:4] != MAGIC:
        raise ModelError(f"{path} is not a GGUF file (it does not start with the letters GGUF).")
    version = struct.unpack("<I", head[4:8])[0]
    if version not in (2, 3):
        raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 can be read.")
    try:
        reader = open_reader(path)
    except ImportError as error:
        raise ModelError("Reading GGUF files needs the package gguf: pip install gguf.") from error
    except Exception as error:  # the reader raises whatever NumPy raises on a short file
        raise ModelError(f"{path} is truncated or damaged ({error}). Fetch the file again.") from error
    size = path.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise ModelError(f"{path} is truncated: tensor {tensor.name!r} ends behind the file. Fetch it again.")


def fingerprint(path: Path) -> str:
    """Tells two GGUF files apart without reading all of them: size, first and last megabyte (a cut file is another)."""
    digest = hashlib.blake2b(str(path.stat().st_size).encode(), digest_size=8)
    with path.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(-min(1 << 20, path.stat().st_size), os.SEEK_END)
        digest.update(stream.read())
    return digest.hexdigest()


def converted(path: Path) -> Path:
    """A transformers folder with this file's weights in float32 and its tokenizer; made on first use."""
    folder = cache_dir() / "converted" / f"{path.stem}-{fingerprint(path)}"
    if (folder / "config.json").is_file():
        return folder
    with quickly():
        check(path)
        with status(f"Converting {path.name} once (dequantised to float32, kept in {folder.parent})"):
            _convert(path, folder)
    return folder


def open_reader(path: Path) -> Any:
    import gguf

    return gguf.GGUFReader(str(path))


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Readers and tables of names are made once and kept to the end of this block."""
    try:
        module: Any = importlib.import_module("gguf")
    except ImportError:  # said by `check`
        yield
        return
    slow = module.GGUFReader, module.get_tensor_name_map
    module.GGUFReader = functools.cache(_quick_reader(module.GGUFReader))
    module.get_tensor_name_map = functools.cache(module.get_tensor_name_map)
    try:
        yield
    finally:
        module.GGUFReader, module.get_tensor_name_map = slow


def _quick_reader(base: Any) -> Any:
    """gguf's reader takes each of a vocabulary's strings out of the file as two small arrays; here without the detours."""

    class Quick(base):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> Any:
            if (override_order or self.byte_order) not in ("I", "<") or sys.byteorder != "little":
                return super()._get(offset, dtype, count, override_order)
            return self.data[offset : offset + _itemsize(dtype) * int(count)].view(dtype)

    return Quick


@functools.cache
def _itemsize(dtype: Any) -> int:
    return np.dtype(dtype).itemsize


def _convert(path: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True, exist_ok=True)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bars = _silence_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=torch.float32
            )
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if folder.exists():  # another process was faster
            return
        part.replace(folder)
    except OSError as error:
        raise ModelError(f"{path} could not be converted into {folder.parent}: {error}.") from error
    except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ModelError(f"transformers cannot read {path.name}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
        bars()


def _silence_bars() -> Callable[[], None]:
    """transformers draws its own bar while it reads a GGUF file; ours is enough. Returns the undoing."""
    from transformers import modeling_gguf_pytorch_utils as module

    original = getattr(module, "tqdm", None)
    if original is None:
        return lambda: None
    module.tqdm = lambda items, *args, **kwargs: items
    return lambda: setattr(module, "tqdm", original)


def only_file(folder: Path) -> Path | None:
    """The GGUF file of a folder that holds one and no config.json."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(f.name for f in files[:4])
        raise ModelError(f"{folder} holds several GGUF files ({names} ...): name the one to load.")
    if files:
        note(f"Loading {files[0].name}")
    return files[0] if files else None
