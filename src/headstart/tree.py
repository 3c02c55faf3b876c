"""Trees as lists of parents: depths, ancestor masks, paths, pruning. Pure functions; -1 is the root's parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from headstart.core import Tree

T = TypeVar("T")


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
    return [*parents] == [*range(-1, len(parents) - 1)]


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
    if len(keep) == len(tree) and all(i == n for i, n in enumerate(keep)):
        return tree
    new = {-1: -1} | {old: i for i, old in enumerate(keep)}

    def of(values: list[T] | None) -> list[T] | None:
        return None if values is None else [values[i] for i in keep]

    parents = [new[tree.parents[i]] for i in keep]
    tokens = [tree.tokens[i] for i in keep]
    return Tree(tokens, parents, of(tree.logq_rows), of(tree.kinds), of(tree.confidence), of(tree.origins))


def merge(parts: Sequence[tuple[Tree, Sequence[float]]], least: float = 0.0) -> tuple[Tree, list[float]]:
    """One tree of the nodes of several that have at least this value, and the values of its nodes. A node that several have is
    there once, with its highest value and the origin that gave it. Values never rise from parent to child, in the parts and so
    in the whole."""
    if len(parts) == 1:
        part, own = parts[0]
        keep = [i for i, value in enumerate(own) if value >= least]
        return select(part, keep), [own[i] for i in keep]
    out, values, sources = Tree(), [], []
    place: dict[tuple[int, int], int] = {}
    for part, own in parts:
        new = {-1: -1}
        origins = part.origins or [""] * len(part)
        for i, (token, parent) in enumerate(zip(part.tokens, part.parents, strict=True)):
            if own[i] < least:
                continue
            key = new[parent], token
            if key not in place:
                place[key] = len(out)
                out.tokens.append(token)
                out.parents.append(key[0])
                sources.append(origins[i])
                values.append(own[i])
            elif own[i] > values[place[key]]:
                values[place[key]], sources[place[key]] = own[i], origins[i]
            new[i] = place[key]
    out.origins = sources
    return out, values


def follow(tree: Tree, text: Sequence[int]) -> list[int]:
    """The nodes that a text goes along with, from the top down."""
    out, here, below = [], -1, children(tree.parents)
    for token in text:
        child = next((n for n in below.get(here, ()) if tree.tokens[n] == token), None)
        if child is None:
            break
        out.append(child)
        here = child
    return out


def best_nodes(values: Sequence[float], parents: Sequence[int], budget: int) -> list[int]:
    """The `budget` nodes of highest value, ascending. Values never rise from parent to child, so the set is a tree."""
    order = sorted(range(len(parents)), key=lambda i: (-values[i], i))
    return sorted(order[:budget])
