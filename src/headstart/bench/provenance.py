"""Where a number comes from: commit, versions, machine, when, and how it was called."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from headstart.bench import meters
from headstart.version import VERSION

SECRETS = ("--api-key",)
ARM = {  # parts of implementer 0x41, as Linux tells them
    "0xd03": "Cortex-A53", "0xd07": "Cortex-A57", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2", "0xd83": "Neoverse-V3", "0xd8e": "Neoverse-N3",
}  # fmt: skip
PACKAGES = ("torch", "transformers", "triton", "numpy")


def provenance(argv: Sequence[str] | None = None, more: Sequence[str] = ()) -> dict[str, Any]:
    """`more` are packages that took part."""
    return {
        "headstart": VERSION,
        "commit": commit(),
        "versions": versions([*PACKAGES, *more]),
        "machine": machine(),
        "load": meters.load(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": without_secrets(sys.argv if argv is None else argv),
    }


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Results are shown to others."""
    out: list[str] = []
    for word in argv:
        hidden = bool(out) and out[-1] in SECRETS
        name, told, _ = word.partition("=")
        out.append("***" if hidden else f"{name}=***" if told and name in SECRETS else word)
    return out


def versions(names: Sequence[str]) -> dict[str, str]:
    """Of Python, and of those that are installed."""
    out = {"python": platform.python_version()}
    for name in names:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def commit() -> str | None:
    """Of the checkout that this code is run from; None where it was installed."""
    if told := os.environ.get("HEADSTART_COMMIT"):
        return told
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        how = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
        return subprocess.run(how, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    out: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_facts()[0],
        "cores": meters.cores(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        out["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            out["gpu"] = torch.cuda.get_device_name()
    return out


def cpu_facts() -> tuple[str, set[str]]:
    """Its name, where it has one (Arm's tell numbers), and its features as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown", set()
    told = dict(reversed([[p.strip() for p in line.split(":", 1)] for line in lines if ":" in line]))
    maker, part = told.get("CPU implementer", "?"), told.get("CPU part", "?")
    arm = ARM[part] if maker == "0x41" and part in ARM else f"implementer {maker}, part {part}"
    return str(told.get("model name", arm)), set(str(told.get("flags") or told.get("Features") or "").split())
