"""The house rule: arrows point up the list. Nothing imports what stands below it, drafters do not know each other."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headstart

ROOT = Path(headstart.__file__).parent
# From the ground up. A name may import those before it; within a folder see below.
ORDER = [
    "version",
    "errors",
    "core",
    "shapes",
    "config",
    "noise",
    "threads",
    "progress",
    "traffic",
    "sampling",
    "tree",
    "grammar",
    "tally",
    "verify",
    "text",
    "delivery",
    "kv",
    "models",
    "drafters",
    "policy",
    "scheduler",
    "simulate",
    "drafting",
    "engine",
    "rehearse",
    "tryouts",
    "loop",
    "llm",
    "server",
    "bench",
    "advise",
    "train",
    "engines",
    "cli",
]
TOOLS = ("server", "bench", "advise", "train", "engines", "cli")
MODULES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def name_of(path: Path) -> str:
    """Dotted name inside the package: models/load.py -> models.load, models/__init__.py -> models."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(p) for p in MODULES}


def imports(path: Path) -> set[str]:
    """Every module of the package that a file imports, at the top or inside a function; "" is the package itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(a.name.removeprefix("headstart").removeprefix(".") for a in node.names if is_own(a.name))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are written in full"
            if node.module and is_own(node.module):
                base = node.module.removeprefix("headstart").removeprefix(".")
                for a in (
                    node.names
                ):  # `from headstart import tree` names a module, `from headstart.core import Tree` does not
                    inner = f"{base}.{a.name}".removeprefix(".")
                    found.add(inner if inner in NAMES else base)
    return found


def is_own(module: str) -> bool:
    return module == "headstart" or module.startswith("headstart.")


def layer(name: str) -> int:
    return ORDER.index(name.split(".")[0])


def test_every_module_has_its_place():
    strangers = sorted({n.split(".")[0] for n in NAMES} - set(ORDER))
    assert not strangers, f"add {strangers} to ORDER, where they stand"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_imports_what_stands_below_it(path: Path):
    own = name_of(path)
    top = own.split(".")[0]
    for other in imports(path):
        if not other:
            assert top in TOOLS, f"{own} imports the package from inside; only tools use it as users do"
            continue
        assert other.split(".")[0] == top or layer(other) < layer(own), f"{own} imports {other}, which stands below it"


@pytest.mark.parametrize("path", sorted((ROOT / "drafters").glob("*.py")), ids=name_of)
def test_drafters_know_neither_each_other_nor_the_engine(path: Path):
    own = name_of(path)
    for other in imports(path):
        if other.split(".")[0] == "drafters":
            assert other in ("drafters", "drafters.growing") and own != "drafters", f"{own} imports {other}"
        assert other.split(".")[0] not in ("engine", "loop", "llm", "scheduler", "policy"), f"{own} imports {other}"


def test_there_is_no_circle():
    """Also inside a folder: modules can be put in a line."""
    left = {name_of(p): {o for o in imports(p) if o and o != name_of(p)} for p in MODULES}
    while left:
        free = [n for n, others in left.items() if not others & left.keys()]
        assert free, f"these import each other: {sorted(left)}"
        for n in free:
            del left[n]


@pytest.mark.parametrize(
    "module",
    [
        "errors",
        "core",
        "shapes",
        "config",
        "progress",
        "traffic",
        "tree",
        "tally",
        "text",
        "kv",
        "scheduler",
        "simulate/machines",
        "simulate/replay",
    ],
)
def test_numbers_and_text_need_no_tensors(module: str):
    """torch may be named for types, but not imported when the module is."""
    body = ast.parse((ROOT / f"{module}.py").read_text(encoding="utf-8")).body
    heavy = {"torch", "transformers"}
    for node in body:
        if isinstance(node, ast.Import):
            assert not heavy & {a.name.split(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in heavy


def test_importing_headstart_is_light():
    """`import headstart` brings neither torch nor transformers, nor what else takes long."""
    code = "import headstart, json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "headstart" in loaded
    assert not loaded & {
        "torch",
        "transformers",
        "tokenizers",
        "huggingface_hub",
        "gguf",
        "accelerate",
        "typer",
        "rich",
    }
