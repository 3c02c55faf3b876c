"""Which head a target gets where nobody names one: the one that comes along, or one of its own in the cache.

A head in the cache is a folder `heads/ANY-NAME` there, whose config.json names its target, as `headstart train` writes it.
"""

from __future__ import annotations

from pathlib import Path

from headstart.errors import ModelError
from headstart.models import files
from headstart.models.builtin import BUILTIN, cache_dir, head_of, hub_id
from headstart.models.heads.load import last_name


def is_head(path: str | Path | None) -> bool:
    """Is this the folder of a head? A draft model's has a tokenizer."""
    if path is None:
        return False
    folder = Path(path).expanduser()
    return (folder / "config.json").is_file() and not any(folder.glob("tokenizer*"))


def find_head(target: str) -> Path | None:
    """The folder of a head for this target."""
    if target in BUILTIN:
        for method in BUILTIN[target].heads:
            return head_of(target, method)
    wanted = last_name(hub_id(target))
    for config in sorted((cache_dir() / "heads").glob("*/config.json")):
        if (made_for := _target_of(config)) is not None and last_name(made_for) == wanted:
            return config.parent
    return None


def _target_of(config: Path) -> str | None:
    """The target that a checkpoint in the speculators format names."""
    try:
        found = files.read_json(config)["speculators_config"]["verifier"]["name_or_path"]
    except (ModelError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
