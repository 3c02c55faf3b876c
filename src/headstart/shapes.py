"""Static trees: the shape of a draft, fixed before anything is drafted. Read, written, and the best for measured chances.

A shape is a list of paths, and a path holds the ranks from the root down: (0, 2) is the third best child of the best child. A
path stands behind its parent, best nodes first, so that the first n paths of a shape are a shape again.

The best shape of n nodes has the highest expected number of accepted tokens: the sum, over its nodes, of the chance that the
node is reached and right. With chances that depend on depth and rank alone this is a product along the path. It never rises
from a node to its children, so the n nodes of highest value are a tree: the greedy choice of Medusa (Cai et al. 2024) is
optimal here, and finds what the dynamic programme of Sequoia (Chen et al. 2024) does.
"""

from __future__ import annotations

import ast
import heapq
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from headstart.errors import ConfigError

Path = tuple[int, ...]
Shape = tuple[Path, ...]
Size = tuple[int, int]  # nodes, and how deep; a chain has as many of both
Chances = Sequence[Sequence[float]]  # [depth - 1][rank]: that this candidate is right, given that its parent is

MOST_NODES, MOST_RANKS = 4096, 1024
USUAL_SIZES: tuple[Size, ...] = (
    (2, 2),
    (4, 4),
    (15, 5),
)  # of drafts on a device, where a policy chooses: few, since each has graphs of its own
GROWN = {"tree": True, "top_k": 8, "max_branches": 8, "p_split": 0.0}  # options of trees that branch freely
GUESS = (
    0.6,
    0.35,
)  # chance of the best candidate, and of each further one in terms of the one before, when nothing is measured


# ------------------------------------------------------------------ from files and options
def read_shape(value: Any) -> Shape:
    """A file's name, a list of paths, or the same as text in JSON or in Python's tuples (as vLLM had it)."""
    what = "static_tree"
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        what, value = f"The tree file {value}", _read_text(value)
    if isinstance(value, str):
        value = _parse(value, what)
    if isinstance(value, Mapping):
        if "paths" not in value:
            raise ConfigError(f'{what} holds no "paths": write {{"paths": [[0], [1], [0, 0]]}}.')
        value = value["paths"]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{what} should hold a list of paths such as [[0], [1], [0, 0]], not {type(value).__name__}.")
    if wrong := check(value):
        raise ConfigError(f"{what}: {wrong}.")
    return tuple(tuple(path) for path in value)


def _read_text(name: str) -> str:
    try:
        return FilePath(name).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(
            f"The tree file {name} is not text: it should be JSON, as `headstart tree` writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The tree file {name} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None


def _parse(text: str, what: str) -> Any:
    if not text.strip():
        raise ConfigError(f"{what} is empty: it should hold a list of paths such as [[0], [1], [0, 0]].")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if "(" not in text:
            raise ConfigError(f"{what} is not JSON: {error}.") from None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(f"{what} is neither JSON nor a list of tuples such as [(0,), (1,), (0, 0)].") from None


def check(paths: Sequence[Any]) -> str | None:
    """Why these paths are no shape, or None when they are one."""
    if not paths:
        return "it has no paths, and a tree needs one at least"
    if len(paths) > MOST_NODES:
        return f"it has {len(paths)} nodes, and {MOST_NODES} are the most"
    seen: set[Path] = {()}
    for number, path in enumerate(paths, start=1):
        where = f"path {number}, {_short(path)},"
        if not isinstance(path, (list, tuple)) or not path:
            return f"{where} should be a list of ranks, such as [0, 1]"
        if not all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r < MOST_RANKS for r in path):
            return f"{where} holds something else than ranks from 0 to {MOST_RANKS - 1}"
        own = tuple(path)
        if own in seen:
            return f"{where} stands there twice"
        if own[:-1] not in seen:
            return f"{where} has no parent: put {_short(own[:-1])} before it"
        seen.add(own)
    return None


def _short(path: Any) -> str:
    text = str(list(path)) if isinstance(path, (list, tuple)) else repr(path)
    return text if len(text) <= 60 else text[:56] + " ..."


def write_shape(file: FilePath, shape: Shape, **more: Any) -> None:
    """As JSON, a line for each key: the paths first, then what else is worth knowing."""
    fields = {"paths": [list(path) for path in shape]} | more
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()]
    try:
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}.") from error


# ------------------------------------------------------------------ as a drafter grows it
@dataclass(frozen=True)
class Plan:
    """What one draft grows: the ranks of each node's children, and each node's place in the result. () is the root."""

    children: Mapping[Path, Sequence[int]]
    place: Mapping[Path, int]

    @property
    def num_paths(self) -> int:
        """Ways down to a node that has children, but none that has children itself."""
        inner = self.children.keys()
        return max(1, sum(1 for p, ranks in self.children.items() if not any((*p, r) in inner for r in ranks)))


def plan(shape: Shape, budget: int, depth: int, drawn: bool = False) -> Plan:
    """The first `budget` nodes of a shape within `depth`.

    Children that are `drawn` come in the order of drawing, whatever their ranks: the first k draws for k children. To leave a
    draw out would bias the text.
    """
    kept = [path for path in shape if len(path) <= depth][:budget]
    children: dict[Path, list[int]] = {}
    place: dict[Path, int] = {}
    renamed: dict[Path, Path] = {(): ()}
    for i, path in enumerate(kept):
        parent = renamed[path[:-1]]
        siblings = children.setdefault(parent, [])
        siblings.append(len(siblings) if drawn else path[-1])
        renamed[path] = (*parent, siblings[-1])
        place[renamed[path]] = i
    return Plan(children, place)


def depth_of(shape: Shape) -> int:
    return max(map(len, shape))


def num_ranks(shape: Shape) -> int:
    """Candidates that have to be looked at."""
    return 1 + max(path[-1] for path in shape)


def inner_by_level(shape: Shape) -> list[int]:
    """How many nodes of depth 1, 2, ... have children: those that a drafter has to compute."""
    count = Counter(len(path) for path in {path[:-1] for path in shape})
    return [count[d] for d in range(1, depth_of(shape))]


# ------------------------------------------------------------------ the best one
def best_shape(chances: Chances, nodes: int) -> Shape:
    """The `nodes` nodes of highest value, best first; fewer where the table has no more."""
    order = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in chances]
    heap: list[
        tuple[float, int, Path, int, float]
    ] = []  # value, depth, parent, place among siblings, the parent's value

    def offer(parent: Path, at: int, value: float) -> None:
        level = len(parent)
        if level < len(order) and at < len(order[level]):
            heapq.heappush(heap, (-value * chances[level][order[level][at]], level, parent, at, value))

    offer((), 0, 1.0)
    out: list[Path] = []
    while heap and len(out) < nodes:
        negative, level, parent, at, above = heapq.heappop(heap)
        out.append((*parent, order[level][at]))
        offer(out[-1], 0, -negative)
        offer(parent, at + 1, above)
    return tuple(out)


def expected_tokens(shape: Shape, chances: Chances) -> float:
    """Block efficiency: the accepted nodes that can be expected, and the target's own token."""
    values: dict[Path, float] = {(): 1.0}
    for path in shape:
        row = chances[min(len(path), len(chances)) - 1]  # deeper than measured: as at the last depth
        values[path] = values[path[:-1]] * (row[path[-1]] if path[-1] < len(row) else 0.0)
    return sum(values.values())


def chain(depth: int) -> Shape:
    return tuple((0,) * d for d in range(1, depth + 1))


def wide_shape(depth: int, ranks: int, nodes: int) -> Shape:
    """A shape to measure with: all ranks behind the likeliest path, and the best nodes beside it as far as one can guess."""
    first, further = GUESS
    guess = [[first * further**r for r in range(ranks)]] * depth
    comb = {(*parent, r) for parent in ((), *chain(depth - 1)) for r in range(ranks)}
    return tuple(sorted(comb | set(best_shape(guess, nodes)), key=lambda p: (-_guessed(p), len(p), p)))


def _guessed(path: Path) -> float:
    first, further = GUESS
    return first ** len(path) * further ** sum(path)


def within(sizes: Sequence[Size], most_depth: int, most_nodes: int) -> list[Size]:
    """These sizes, the smallest first, none of them larger than that. A chain stays one."""
    out = set()
    for nodes, depth in sizes:
        shallow = min(depth, most_depth, most_nodes)
        out.add((shallow if nodes == depth else max(shallow, min(nodes, most_nodes)), shallow))
    return sorted(size for size in out if size[1] > 0)
