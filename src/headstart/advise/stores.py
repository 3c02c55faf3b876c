"""Which models are on this disk: in the hub's cache, in folders, in Ollama's store and in Headstart's own cache.

Nothing here raises over a model that is broken: it is listed with what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.advise.facts import GGUF, PARTS, Facts, look
from headstart.errors import BadInput, HeadstartError, ModelError
from headstart.models import ollama
from headstart.models.builtin import BUILTIN, cache_dir, head_of, path_of

HUB, FOLDER, OLLAMA, OWN = "hub cache", "folder", "ollama", "headstart"
DEEP = 4  # folders below a given one
CACHED = "models--"  # how the hub's client begins the names of its folders
WRITERS = ("CausalLM", "ConditionalGeneration", "LMHeadModel", "ForTextGeneration")  # architectures that write text
SILENT = ("clip", "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "gemma-embedding",
          "t5encoder", "wavtokenizer-dec")  # GGUF's that do not  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A model, by the name under which every command takes it."""

    name: str
    place: str
    path: Path
    problem: str = ""


@dataclass(frozen=True)
class Model:
    """A model that was looked at."""

    found: Found
    facts: Facts | None
    problem: str = ""  # why it is of no use here

    @property
    def name(self) -> str:
        return self.found.name


def find(folders: Sequence[Path] = ()) -> list[Found]:
    """Everything, each file once: the folders that were named come first."""
    out: dict[Path, Found] = {}
    for one in (*in_folders(folders), *in_own_cache(), *in_hub(), *in_ollama()):
        out.setdefault(one.path.resolve(), one)
    return list(out.values())


def read(found: Found) -> Model:
    """Look at it, and at its tokenizer while its file is open."""
    if found.problem:
        return Model(found, None, found.problem)
    try:
        facts = look(found.name)
        _ = facts.vocabulary
    except (HeadstartError, OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        return Model(found, None, str(error) or repr(error))
    return Model(found, facts, facts.problems[0] if facts.problems else _mute(facts))


def _mute(facts: Facts) -> str:
    """Why it is no language model; empty where it is one, or a head."""
    kind = facts.architecture
    writes = kind not in SILENT if facts.form == GGUF else facts.head or not kind or _writes(kind)
    return "" if writes else f"it is no model that writes text ({kind})."


def _writes(architecture: str) -> bool:
    return architecture.endswith(WRITERS) or architecture.islower()  # a bare model_type says nothing against it


# ------------------------------------------------------------------ folders
def in_folders(folders: Sequence[Path]) -> list[Found]:
    out: list[Found] = []
    for folder in folders:
        place = folder.expanduser()
        if place.is_file() and place.suffix == ".gguf":
            out.append(Found(str(place), FOLDER, place))
        elif place.is_dir():
            out += [Found(str(path), FOLDER, path) for path in _below(place)]
        else:
            raise BadInput(f"{folder} is no folder and no GGUF file: name folders that hold models.")
    return out


def _below(top: Path) -> Iterator[Path]:
    """Folders with a config.json, and GGUF files. A model's own folder is not searched further."""
    for here, inner, names in os.walk(top):
        folder = Path(here)
        if any(name.startswith(CACHED) for name in inner):
            yield from (path for _, path in _in_hub_folder(folder))
            inner[:] = [name for name in inner if not name.startswith(CACHED)]
        if "config.json" in names:
            yield folder
            inner.clear()
        yield from _gguf_files(folder, names)
        if len(folder.relative_to(top).parts) >= DEEP:
            inner.clear()
        inner[:] = sorted(name for name in inner if not name.startswith("."))


def _gguf_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Of a model that is split, the first part alone."""
    first = [n for n in sorted(names) if n.endswith(".gguf")]
    return [folder / n for n in first if (match := PARTS.fullmatch(n)) is None or int(match[2]) == 1]


# ------------------------------------------------------------------ the hub's cache
def in_hub() -> list[Found]:
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    return [Found(name, HUB, path) for name, path in _in_hub_folder(root)]


def _in_hub_folder(root: Path) -> Iterator[tuple[str, Path]]:
    """The snapshot that the hub's client would take, by the model's id; GGUF files by their paths."""
    for repo in sorted(root.glob(f"{CACHED}*")):
        snapshot, is_main = _snapshot(repo)
        if snapshot is None:
            continue
        if (snapshot / "config.json").is_file():
            name = "/".join(repo.name.removeprefix(CACHED).split("--"))
            yield name if is_main else str(snapshot), snapshot
        for here, _, names in os.walk(snapshot):
            yield from ((str(path), path) for path in _gguf_files(Path(here), names))


def _snapshot(repo: Path) -> tuple[Path | None, bool]:
    """The one that `main` names, or else the newest; and whether it is `main`."""
    try:
        main = repo / "snapshots" / (repo / "refs" / "main").read_text(encoding="utf-8").strip()
        if main.is_dir():
            return main, True
    except (OSError, ValueError):
        pass
    every = [path for path in (repo / "snapshots").glob("*") if path.is_dir()]
    return max(every, key=lambda path: path.stat().st_mtime, default=None), False


# ------------------------------------------------------------------ Ollama and Headstart
def in_ollama() -> list[Found]:
    out = []
    try:
        root = ollama.store()
        names = ollama.names(root)
    except (ModelError, OSError):
        return []
    for name in names:
        own = f"{ollama.PREFIX}{name}"
        try:
            out.append(Found(own, OLLAMA, ollama.find(own)))
        except (ModelError, OSError, ValueError) as error:
            out.append(Found(own, OLLAMA, root / "manifests" / name, str(error)))
    return out


def in_own_cache() -> list[Found]:
    """Built-in models that were fetched, and heads: those that come along, and those in the cache."""
    out = [Found(model.name, OWN, path_of(model)) for model in BUILTIN.values() if path_of(model).is_file()]
    along = [head for model in BUILTIN.values() for method in model.heads if (head := head_of(model.name, method))]
    kept = sorted(config.parent for config in (cache_dir() / "heads").glob("*/config.json"))
    return out + [Found(str(path), OWN, path) for path in (*along, *kept)]
