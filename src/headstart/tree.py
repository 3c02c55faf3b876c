"""Trees as lists of parents: depths, ancestor masks, paths, pruning. Pure functions; -1 is the root's parent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstart.core import Tree


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node: 1 for the root's children."""
    out: list[int] = []
    for p in parents:
        out.append(1 if p < 0 else out[p] + 1)
    return out


def path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the top down to `node`; empty for -1, the root."""
    out = []
    while node >= 0:
        out.append(node)
        node = parents[node]
    return out[::-1]


def children(parents: Sequence[int]) -> dict[int, list[int]]:
    """Node -> its children in the order proposed; -1 is the root."""
    out: dict[int, list[int]] = {}
    for i, p in enumerate(parents):
        out.setdefault(p, []).append(i)
    return out


def is_chain(parents: Sequence[int]) -> bool:
    return all(p == i - 1 for i, p in enumerate(parents))


def ancestor_mask(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """(N, N) bool: row i may see column j when j is i or stands above it."""
    mask = np.eye(len(parents), dtype=bool)
    for i, p in enumerate(parents):
        if p >= 0:
            mask[i] |= mask[p]
    return mask


def check(tree: Tree, vocab_size: int, pending: bool = False) -> str | None:
    """Why this is no tree, or None when it is one. `pending`: its tokens are not known yet."""
    if len(tree.parents) != len(tree.tokens):
        return f"{len(tree.tokens)} tokens but {len(tree.parents)} parents"
    for i, (t, p) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not -1 <= p < i:
            return f"node {i} has parent {p}; a parent stands before its child"
        if not (pending or 0 <= t < vocab_size):
            return f"node {i} holds token {t}, outside the vocabulary of {vocab_size}"
    return None


def prune(tree: Tree, budget: int, max_depth: int) -> Tree:
    """The first `budget` nodes that are not deeper than `max_depth`. Order is kept, so parents stay in front."""
    if len(tree) <= budget and len(tree) <= max_depth:
        return tree
    keep = [i for i, d in enumerate(depths(tree.parents)) if d <= max_depth][: max(budget, 0)]
    return select(tree, keep)


def first_path(tree: Tree) -> Tree:
    """The chain of the nodes that were proposed first at each depth."""
    first: dict[int, int] = {}
    for i, p in enumerate(tree.parents):
        first.setdefault(p, i)
    keep, node = [], first.get(-1)
    while node is not None:
        keep.append(node)
        node = first.get(node)
    return select(tree, keep)


def num_paths(tree: Tree) -> int:
    """Ways from the root to a leaf; 1 without a draft."""
    return max(1, len(set(range(len(tree))) - set(tree.parents)))


def select(tree: Tree, keep: Sequence[int]) -> Tree:
    """The subtree of the nodes `keep` (closed under parents, which stand before their children), renumbered."""
    new = {-1: -1} | {old: i for i, old in enumerate(keep)}
    rows = None if tree.logq_rows is None else [tree.logq_rows[i] for i in keep]
    kinds = None if tree.kinds is None else [tree.kinds[i] for i in keep]
    return Tree([tree.tokens[i] for i in keep], [new[tree.parents[i]] for i in keep], rows, kinds)


def best_nodes(values: Sequence[float], parents: Sequence[int], budget: int) -> list[int]:
    """The `budget` nodes of highest value, ascending. Values never rise from parent to child, so the set is a tree."""
    order = sorted(range(len(parents)), key=lambda i: (-values[i], i))
    return sorted(order[:budget])
