"""What was measured, kept on disk: for one model on one device with one version. What cannot be read is measured anew."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FORMAT = 7


class Keeps(Protocol):
    """A policy that has something to keep."""

    def kept(self) -> dict[str, Any]:
        """As JSON can say it."""
        ...

    def recall(self, kept: Mapping[str, Any]) -> None:
        """Begin with it. What is no such thing raises, and changes nothing."""
        ...


@dataclass(frozen=True)
class Store:
    """The file for these facts: model, device, dtype, threads, versions."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def path(self) -> Path:
        said = json.dumps({"format": FORMAT, **self.facts}, sort_keys=True)
        return self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"

    def load(self, policy: Keeps) -> bool:
        """Begin with what is known. False: nothing is, or nothing that can be read."""
        try:
            policy.recall(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            return False
        return True

    def save(self, policy: Keeps) -> None:
        """Whole or not at all. A folder that cannot be written to is no reason to stop."""
        kept = {"facts": dict(self.facts), **policy.kept()}
        part = self.path.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            part.replace(self.path)
        except OSError:
            return
