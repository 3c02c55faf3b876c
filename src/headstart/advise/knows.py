"""Which architectures the engines that are installed know: read from their tables, without starting them."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

REGISTRY = Path("model_executor") / "models" / "registry.py"  # of vLLM: tables from architectures to classes


def gguf_by_transformers(architecture: str) -> bool:
    """Does the installed transformers read GGUF files of this architecture?"""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    plain = architecture.replace("-", "_")
    spelled = plain.removesuffix("moe") + "_moe" if plain.endswith("moe") and not plain.endswith("_moe") else plain
    return bool({architecture, plain, spelled} & set(GGUF_CONFIG_MAPPING))


def gguf_by_llamacpp(architecture: str) -> bool | None:
    """Is it one of llama.cpp's, as of the installed package gguf? None: there is no such package."""
    try:
        from gguf import MODEL_ARCH_NAMES
    except ImportError:
        return None
    return architecture in MODEL_ARCH_NAMES.values()


def by_vllm(architecture: str) -> bool | None:
    """Has the installed vLLM a class for it? None: there is no vLLM, or its table cannot be read."""
    registry = vllm_registry()
    known = vllm_architectures(registry) if registry is not None else frozenset()
    return architecture in known if known else None


def vllm_registry() -> Path | None:
    """In this environment, or in that of the command `vllm`."""
    spec, command = _spec(), _command()
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    if command is not None:
        places += Path(command).resolve().parent.parent.glob("lib/python*/site-packages/vllm")
    return next((file for place in places if (file := place / REGISTRY).is_file()), None)


def _spec() -> ModuleSpec | None:
    return importlib.util.find_spec("vllm")


def _command() -> str | None:
    return shutil.which("vllm")


@functools.lru_cache(2)
def vllm_architectures(registry: Path) -> frozenset[str]:
    """The names in its tables, which are plain dictionaries; nothing of it is run."""
    try:
        tree = ast.parse(registry.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    return frozenset(name for node in tree.body for name in _names(node))


def _names(node: ast.stmt) -> list[str]:
    """Of a table `_..._MODELS = {"Architecture": ("module", "Class"), ...}`."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    named = any(isinstance(t, ast.Name) and t.id.endswith("_MODELS") for t in targets)
    if not named or not isinstance(value, ast.Dict):
        return []
    return [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
