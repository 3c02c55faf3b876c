"""Trees as lists of parents, against definitions written out the slow way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart import tree as trees
from headstart.core import Tree


@st.composite
def any_tree(draw: st.DrawFn, max_size: int = 14, drawn: bool = False) -> Tree:
    size = draw(st.integers(0, max_size))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    tokens = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    return Tree(tokens, parents, [100 + i for i in range(size)] if drawn else None)


def above(parents: list[int], node: int) -> list[int]:
    """The node and everything above it."""
    return [node, *above(parents, parents[node])] if node >= 0 else []


@given(any_tree())
def test_depths_paths_and_children(tree: Tree):
    parents = tree.parents
    assert trees.depths(parents) == [len(above(parents, i)) for i in range(len(tree))]
    assert [trees.path(parents, i) for i in range(len(tree))] == [above(parents, i)[::-1] for i in range(len(tree))]
    assert trees.path(parents, -1) == []
    below = trees.children(parents)
    assert sorted(c for cs in below.values() for c in cs) == list(range(len(tree)))
    assert all(parents[c] == node for node, cs in below.items() for c in cs)
    assert all(cs == sorted(cs) for cs in below.values())  # the order proposed


@given(any_tree())
def test_mask_shows_each_node_its_ancestors_and_itself(tree: Tree):
    mask = trees.ancestor_mask(tree.parents)
    expected = np.zeros((len(tree), len(tree)), dtype=bool)
    for i in range(len(tree)):
        expected[i, above(tree.parents, i)] = True
    assert mask.dtype == bool
    assert np.array_equal(mask, expected)
    assert np.array_equal(trees.ancestor_mask(np.array(tree.parents, dtype=np.int64)), expected)


@given(any_tree())
def test_a_chain_is_the_tree_in_which_each_node_has_one_child(tree: Tree):
    assert trees.is_chain(tree.parents) == (tree.parents == Tree.chain(tree.tokens).parents)
    assert trees.is_chain(Tree.chain(tree.tokens).parents)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (Tree([1, 2], [-1]), "2 tokens but 1 parents"),
        (Tree([1], [0]), "node 0 has parent 0"),
        (Tree([1, 2], [-1, 1]), "node 1 has parent 1"),
        (Tree([1, 2, 3], [-1, 2, 0]), "node 1 has parent 2"),
        (Tree([1, 2], [-1, -2]), "node 1 has parent -2"),
        (Tree([1, 10], [-1, 0]), "token 10, outside the vocabulary of 10"),
        (Tree([-1], [-1]), "token -1, outside"),
    ],
)
def test_what_is_no_tree_is_said(tree: Tree, words: str):
    assert words in (trees.check(tree, 10) or "")


@given(any_tree())
def test_every_tree_passes_the_check(tree: Tree):
    assert trees.check(tree, 10) is None


@given(any_tree(drawn=True), st.integers(0, 15), st.integers(0, 8))
def test_pruning_keeps_the_first_nodes_within_the_depth(tree: Tree, budget: int, max_depth: int):
    out = trees.prune(tree, budget, max_depth)
    shallow = [i for i in range(len(tree)) if len(above(tree.parents, i)) <= max_depth]
    assert len(out) == min(budget, len(shallow))
    assert max(trees.depths(out.parents), default=0) <= max_depth
    assert trees.check(out, 10) is None
    assert out.logq_rows == [100 + i for i in shallow[:budget]]
    for new, old in enumerate(shallow[:budget]):  # each node keeps the tokens above it
        kept = [out.tokens[i] for i in trees.path(out.parents, new)]
        assert kept == [tree.tokens[i] for i in trees.path(tree.parents, old)]


@given(any_tree(drawn=True), st.data())
def test_selecting_keeps_paths_and_rows(tree: Tree, data: st.DataObject):
    leaves = data.draw(st.lists(st.integers(0, max(len(tree) - 1, 0)), max_size=4)) if len(tree) else []
    keep = sorted({n for leaf in leaves for n in above(tree.parents, leaf)})
    out = trees.select(tree, keep)
    for new, old in enumerate(keep):
        kept = [out.tokens[i] for i in trees.path(out.parents, new)]
        assert kept == [tree.tokens[i] for i in trees.path(tree.parents, old)]
    assert out.logq_rows == [100 + i for i in keep]
    assert trees.select(Tree(tree.tokens, tree.parents), keep).logq_rows is None


@given(any_tree(drawn=True))
def test_the_first_path_is_a_chain_of_first_children(tree: Tree):
    out = trees.first_path(tree)
    below, kept = trees.children(tree.parents), []
    while below.get(kept[-1] if kept else -1):
        kept.append(below[kept[-1] if kept else -1][0])
    assert trees.is_chain(out.parents) and trees.check(out, 10) is None
    assert out.tokens == [tree.tokens[i] for i in kept] and out.logq_rows == [100 + i for i in kept]
    assert trees.first_path(out) == out
    assert len(out) > 0 or not len(tree)


@given(any_tree())
def test_there_are_as_many_paths_as_leaves(tree: Tree):
    leaves = [i for i in range(len(tree)) if i not in tree.parents]
    assert trees.num_paths(tree) == max(1, len(leaves))
    assert trees.num_paths(trees.first_path(tree)) == 1
    assert {n for leaf in leaves for n in above(tree.parents, leaf)} == set(range(len(tree)))


@given(any_tree(), st.integers(0, 15), st.data())
def test_the_best_nodes_form_a_tree_of_the_highest_value(tree: Tree, budget: int, data: st.DataObject):
    shares = data.draw(st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=len(tree), max_size=len(tree)))
    values: list[float] = []
    for share, parent in zip(shares, tree.parents, strict=True):
        values.append(share * (values[parent] if parent >= 0 else 1.0))
    keep = trees.best_nodes(values, tree.parents, budget)
    assert keep == sorted(set(keep))
    assert len(keep) == min(budget, len(tree))
    assert all(tree.parents[i] in (-1, *keep) for i in keep)
    assert sum(values[i] for i in keep) == pytest.approx(sum(sorted(values, reverse=True)[:budget]))


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in trees.path(tree.parents, n)) for n in range(len(tree))}


def falling(tree: Tree, factors: list[float]) -> list[float]:
    out: list[float] = []
    for i, p in enumerate(tree.parents):
        out.append(factors[i % len(factors)] * (out[p] if p >= 0 else 1.0))
    return out


@given(
    st.lists(any_tree(8), min_size=1, max_size=3),
    st.lists(st.floats(0.1, 1.0), min_size=1, max_size=5),
    st.floats(0, 0.6),
)
def test_a_merged_tree_has_every_path_that_is_worth_enough_once(parts: list[Tree], factors: list[float], least: float):
    for i, part in enumerate(parts):
        part.origins = [f"d{i}"] * len(part)
    valued = [(part, falling(part, factors)) for part in parts]
    whole, values = trees.merge(valued, least)
    assert trees.check(whole, 10) is None and len(values) == len(whole) == len(whole.origins or ())
    wanted: dict[tuple[int, ...], tuple[float, str]] = {}
    for part, own in valued:
        for n in range(len(part)):
            key = tuple(part.tokens[i] for i in trees.path(part.parents, n))
            if own[n] >= least and own[n] > wanted.get(key, (-1.0, ""))[0]:
                wanted[key] = own[n], (part.origins or [])[n]
    assert paths(whole) == set(wanted)
    if len(parts) > 1:
        assert len(whole) == len(wanted)
        for n, value in enumerate(values):
            key = tuple(whole.tokens[i] for i in trees.path(whole.parents, n))
            assert value == wanted[key][0]
    assert all(values[n] <= values[p] for n, p in enumerate(whole.parents) if p >= 0)


@given(any_tree(), st.lists(st.integers(0, 9), max_size=6))
def test_following_a_text_is_the_longest_path_that_agrees(tree: Tree, text: list[int]):
    nodes = trees.follow(tree, text)
    assert [tree.tokens[n] for n in nodes] == text[: len(nodes)]
    assert all(tree.parents[n] == p for n, p in zip(nodes, [-1, *nodes], strict=False))
    last = nodes[-1] if nodes else -1
    below = [tree.tokens[c] for c in trees.children(tree.parents).get(last, [])]
    assert len(nodes) == len(text) or text[len(nodes)] not in below
