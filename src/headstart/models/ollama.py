"""Models in the local Ollama store, by name: `ollama:llama3.2:1b` is a GGUF file among its blobs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from headstart.errors import ModelError, nearest

PREFIX = "ollama:"
WEIGHTS = "application/vnd.ollama.image.model"
USUAL = ("registry.ollama.ai", "library")  # whose models go by their name alone
PLACES = ("~/.ollama/models", "/usr/share/ollama/.ollama/models", "/var/lib/ollama/models")


def store() -> Path:
    """The folder that holds `manifests` and `blobs`."""
    places = [os.environ["OLLAMA_MODELS"]] if os.environ.get("OLLAMA_MODELS") else PLACES
    for place in places:
        if (found := Path(place).expanduser()).joinpath("manifests").is_dir():
            return found
    raise ModelError(
        f"There is no Ollama store in {' or '.join(str(p) for p in places)}. Set OLLAMA_MODELS to the folder that has it."
    )


def names(root: Path) -> list[str]:
    """What the store has, as Ollama shows it."""
    out = []
    for manifest in sorted((root / "manifests").glob("*/*/*/*")):
        *owner, model, tag = manifest.parts[-4:]
        shown = [] if tuple(owner) == USUAL else owner[1:] if owner[0] == USUAL[0] else owner
        out.append(f"{'/'.join([*shown, model])}:{tag}")
    return out


def find(name: str) -> Path:
    """The GGUF file of a name such as llama3.2, llama3.2:1b or someone/model:tag."""
    root = store()
    model, _, tag = name.removeprefix(PREFIX).partition(":")
    parts = [*USUAL[: max(0, 3 - len(model.split("/")))], *model.split("/"), tag or "latest"]
    if len(parts) != 4 or any(not re.fullmatch(r"[\w-][\w.-]*", p) for p in parts):
        raise ModelError(f"{name!r} is not a name in an Ollama store: write ollama:model or ollama:model:tag.")
    manifest = root.joinpath("manifests", *parts)
    if not manifest.is_file():
        asked, known = f"{model}:{parts[-1]}", names(root)
        raise ModelError(f"The Ollama store has no {asked}.{nearest(asked, known) if known else ' It is empty.'}")
    return _weights(root, manifest)


def _weights(root: Path, manifest: Path) -> Path:
    try:
        layers = json.loads(manifest.read_text())["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == WEIGHTS)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ModelError(f"{manifest} names no GGUF weights: pull the model again.") from error
    blob = root / "blobs" / str(digest).replace(":", "-")
    if blob.parent != root / "blobs" or not blob.is_file():
        raise ModelError(f"{blob} is missing from the Ollama store: pull the model again.")
    return blob
