"""Exported files in a folder. What somebody else wrote, or has changed since, is not written over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.errors import BadInput

RECORD = ".headstart-export.json"  # which files were written here, and what was in them


def write(folder: Path, files: Sequence[tuple[str, str]], force: bool = False) -> list[Path]:
    """All files, or none: they are looked at before the first is written."""
    known = _record(folder)
    if not force:
        for name, text in files:
            _refuse(folder / name, known.get(name), text)
    try:
        for name, text in files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        known |= {name: _sum(text.encode()) for name, text in files}
        (folder / RECORD).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{error.filename or folder} cannot be written: {error.strerror}.") from error
    return [folder / name for name, _ in files]


def _refuse(path: Path, known: str | None, text: str) -> None:
    if path.is_dir():
        raise BadInput(f"{path} is a folder, and would be written as a file: choose another --out.")
    if not path.exists():
        return
    try:
        now = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from error
    if _sum(now) in (known, _sum(text.encode())):
        return
    why = "has been changed since it was exported" if known else "is not a file of headstart export"
    raise BadInput(f"{path} {why}: choose another --out, or write over it with --force.")


def _record(folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
