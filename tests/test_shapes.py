"""Shapes of static trees: what a file may say, what is kept of one, and the best one against brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart import shapes
from headstart.config import SpeculativeConfig, parse_speculative
from headstart.core import Tree, Verdict
from headstart.errors import ConfigError
from headstart.tally import PRIOR, Tally

PATHS = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]
SHAPE = tuple(map(tuple, PATHS))


@st.composite
def any_shape(draw: st.DrawFn, most: int = 12) -> shapes.Shape:
    """Paths behind their parents, with gaps between ranks, in any such order."""
    paths: list[shapes.Path] = []
    for _ in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from([(), *paths]))
        rank = draw(st.integers(0, 4).filter(lambda r, p=parent: (*p, r) not in paths))
        paths.append((*parent, rank))
    return tuple(paths)


# ------------------------------------------------------------------ what a file may say
@pytest.mark.parametrize(
    "text",
    [json.dumps(PATHS), json.dumps({"paths": PATHS, "model": "x"}), str(list(SHAPE)), json.dumps(PATHS, indent=1)],
    ids=["list", "object", "tuples", "lines"],
)
def test_every_spelling_is_the_same_shape(text: str, tmp_path: Path):
    file = tmp_path / "tree.json"
    file.write_text(text)
    assert shapes.read_shape(str(file)) == shapes.read_shape(text) == shapes.read_shape(PATHS) == SHAPE


def test_a_shape_is_written_for_people_and_read_again(tmp_path: Path):
    shapes.write_shape(tmp_path / "t.json", SHAPE, model="m", chances=[[0.5]])
    assert shapes.read_shape(str(tmp_path / "t.json")) == SHAPE
    text = (tmp_path / "t.json").read_text()
    assert text.splitlines()[1].startswith('  "paths": [[0], [1]') and json.loads(text)["chances"] == [[0.5]]
    with pytest.raises(ConfigError, match="cannot be written"):
        shapes.write_shape(tmp_path / "no" / "t.json", SHAPE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[0], [1, 0]]", r"path 2, \[1, 0\], has no parent: put \[1\] before it"),
        ("[[0, 0], [0]]", r"path 1, \[0, 0\], has no parent"),
        ("[[0], [1], [0]]", r"path 3, \[0\], stands there twice"),
        ("[[0], [-1]]", "ranks from 0 to 1023"),
        ("[[0], [1024]]", "ranks from 0 to 1023"),
        ("[[0], [0.5]]", "ranks from 0"),
        ("[[0], [true]]", "ranks from 0"),
        ("[[0], []]", "should be a list of ranks"),
        ("[0, 1]", "path 1, 0, should be a list of ranks"),
        ("[]", "has no paths"),
        ("", "is empty"),
        ("  \n", "is empty"),
        ("[[0], [1]", "is not JSON"),
        ("[(0,), (1,]", "neither JSON nor a list of tuples"),
        ("[" * 100_000, "is not JSON"),
        ("{}", 'holds no "paths"'),
        ('{"paths": 5}', "not int"),
        ("7", "not int"),
        (json.dumps([[i] for i in range(1000)] + [[0, i] for i in range(1000)] * 4), "has 5000 nodes, and 4096"),
    ],
)
def test_what_is_no_tree_is_one_sentence(text: str, words: str, tmp_path: Path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        parse_speculative({"method": "eagle3", "static_tree": str(tmp_path / "t.json")})
    message = str(caught.value)
    assert "t.json" in message and "\n" not in message and message.endswith(".") and len(message) < 400


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00\x80")
    for name, words in (("none", "cannot be read: No such file"), ("", "cannot be read"), ("b", "is not text")):
        with pytest.raises(ConfigError, match=words):
            shapes.read_shape(str(tmp_path / name))
    with pytest.raises(ConfigError, match="not int"):
        shapes.read_shape(5)


# ------------------------------------------------------------------ in a config
def test_a_shape_sets_depth_and_nodes():
    config, notes = parse_speculative({"method": "draft_model", "model": "x", "static_tree": PATHS})
    assert (config.static_tree, config.tree, config.num_speculative_tokens, config.nodes) == (SHAPE, True, 3, 7)
    assert notes == []
    wider = {"method": "eagle3", "speculative_token_tree": str(list(SHAPE)), "num_speculative_tokens": 7, "tree": True}
    config, _ = parse_speculative(wider | {"policy": "adaptive", "num_draft_nodes": 50})
    assert (config.static_tree, config.num_speculative_tokens, config.nodes) == (SHAPE, 3, 7)
    assert SpeculativeConfig("eagle3", tree=True, static_tree=SHAPE).static_tree == SHAPE


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_speculative_tokens": 2}, "3 levels deep, and num_speculative_tokens=2 allows less"),
        ({"num_draft_nodes": 6}, "7 nodes, and num_draft_nodes=6 allows less"),
        ({"tree": False}, "tree=False contradict"),
        ({"tree": "yes"}, "tree='yes'"),
        ({"num_draft_nodes": "9"}, "num_draft_nodes='9'"),
        ({"top_k": 4, "p_min": 0.5}, "leave out top_k, p_min"),
        ({"n_parallel": 4}, "leave out max_branches"),
        ({"min_draft_tokens": 1}, "leave out min_draft_tokens"),
        ({"static_tree": [[1, 1]]}, "has no parent"),
    ],
)
def test_what_contradicts_a_shape(more: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        parse_speculative({"method": "eagle3", "static_tree": PATHS} | more)


def test_a_method_that_grows_no_trees_says_so():
    config, notes = parse_speculative({"method": "ngram", "static_tree": PATHS})
    assert config.nodes == 5 and not config.tree and "no effect with method 'ngram'" in notes[0]
    with pytest.raises(ConfigError, match="static_tree"):
        SpeculativeConfig("eagle3", static_tree=((0, 0),))
    with pytest.raises(ConfigError, match="static_tree"):
        SpeculativeConfig("eagle3", static_tree="tree.json")  # type: ignore[arg-type]


def test_512_nodes_over_24_levels():
    shape = shapes.best_shape([[0.85, 0.08, 0.03, 0.01, 0.01, 0.005, 0.003, 0.002]] * 24, 512)
    assert len(shape) == 512 and shapes.depth_of(shape) == 24 and shapes.check(shape) is None
    config, _ = parse_speculative({"method": "eagle3", "static_tree": shape})
    assert (config.nodes, config.num_speculative_tokens) == (512, 24)


# ------------------------------------------------------------------ what is kept
@given(any_shape(), st.integers(0, 13), st.integers(0, 5))
def test_a_plan_is_the_first_nodes_within_the_depth(shape: shapes.Shape, budget: int, depth: int):
    plan = shapes.plan(shape, budget, depth)
    kept = [p for p in shape if len(p) <= depth][:budget]
    assert sorted(plan.place, key=plan.place.__getitem__) == kept
    assert {(*p, r) for p, ranks in plan.children.items() for r in ranks} == set(kept)
    assert not kept or shapes.check(kept) is None  # a tree again
    inner = {p for p in plan.children if p}
    ways = [p for p in plan.children if not any(q[: len(p)] == p and q != p for q in inner)]
    assert plan.num_paths == max(1, len(ways))


@given(any_shape(), st.integers(1, 13), st.integers(1, 5))
def test_drawn_children_are_the_first_draws_in_order(shape: shapes.Shape, budget: int, depth: int):
    """As many children everywhere as without draws, and never a draw left out."""
    plan, drawn = shapes.plan(shape, budget, depth), shapes.plan(shape, budget, depth, drawn=True)
    for ranks in drawn.children.values():
        assert list(ranks) == list(range(len(ranks)))
    order = sorted(drawn.place, key=drawn.place.__getitem__)
    for parent, ranks in drawn.children.items():
        assert [p[-1] for p in order if p[:-1] == parent] == list(ranks)  # siblings stand in the order of drawing
    sizes = [sorted(len(r) for r in p.children.values()) for p in (plan, drawn)]
    assert sizes[0] == sizes[1]
    assert [len(p) for p in order] == [len(p) for p in sorted(plan.place, key=plan.place.__getitem__)]


@given(any_shape())
def test_sizes_that_a_drafter_needs(shape: shapes.Shape):
    parents = {p[:-1] for p in shape} - {()}
    levels = shapes.inner_by_level(shape)
    assert levels == [sum(len(p) == d for p in parents) for d in range(1, max(map(len, shape)))]
    assert shapes.num_ranks(shape) == max(r for p in shape for r in p) + 1
    assert sum(levels) >= shapes.depth_of(shape) - 1  # a chain of the same depth fits in


# ------------------------------------------------------------------ the best one
def value(path: shapes.Path, chances: shapes.Chances) -> float:
    out = 1.0
    for depth, rank in enumerate(path):
        out *= chances[depth][rank]
    return out


def brute_force(chances: shapes.Chances, nodes: int) -> float:
    """The highest sum over all sets of nodes that are trees."""
    depth, ranks = len(chances), len(chances[0])
    everything = [p for d in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=d)]
    best = 0.0
    for some in itertools.combinations(everything, min(nodes, len(everything))):
        own = set(some)
        if all(len(p) == 1 or p[:-1] in own for p in own):
            best = max(best, sum(value(p, chances) for p in own))
    return best


CHANCE = st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0])


@given(
    st.sampled_from([(1, 4), (2, 2), (2, 3), (3, 2)]).flatmap(
        lambda s: st.lists(st.lists(CHANCE, min_size=s[1], max_size=s[1]), min_size=s[0], max_size=s[0])
    ),
    st.integers(1, 5),
)
def test_the_best_shape_is_that_of_brute_force(chances: list[list[float]], nodes: int):
    shape = shapes.best_shape(chances, nodes)
    assert shapes.check(shape) is None
    values = [value(p, chances) for p in shape]
    assert values == sorted(values, reverse=True)  # best first
    assert sum(values) == pytest.approx(brute_force(chances, nodes))
    assert shapes.expected_tokens(shape, chances) == pytest.approx(1 + sum(values))


@given(st.lists(st.lists(CHANCE, min_size=3, max_size=3), min_size=1, max_size=6), st.integers(1, 40))
def test_a_smaller_best_shape_begins_a_larger_one(chances: list[list[float]], nodes: int):
    shape = shapes.best_shape(chances, nodes)
    assert len(shape) == min(nodes, sum(3**d for d in range(1, len(chances) + 1)))
    assert shapes.best_shape(chances, nodes + 1)[: len(shape)] == shape


def test_expected_tokens_of_chains():
    chances = [[0.5, 0.2], [0.4, 0.1]]
    assert shapes.expected_tokens(shapes.chain(2), chances) == pytest.approx(1 + 0.5 + 0.2)
    assert shapes.expected_tokens(shapes.chain(4), chances) == pytest.approx(1 + 0.5 + 0.2 + 0.08 + 0.032)
    assert shapes.expected_tokens(((0,), (1,), (1, 1)), chances) == pytest.approx(1 + 0.5 + 0.2 + 0.02)


@pytest.mark.parametrize(("depth", "ranks", "nodes"), [(1, 1, 1), (5, 8, 12), (3, 4, 60), (24, 8, 512)])
def test_a_wide_shape_offers_every_rank_at_every_depth(depth: int, ranks: int, nodes: int):
    shape = shapes.wide_shape(depth, ranks, nodes)
    assert shapes.check(shape) is None and shapes.depth_of(shape) == depth
    below: dict[shapes.Path, list[int]] = {}
    for path in shape:
        below.setdefault(path[:-1], []).append(path[-1])
    assert all(own == list(range(len(own))) for own in below.values())  # siblings stand by rank
    assert all(len(below[(0,) * d]) == ranks for d in range(depth))
    assert len(shape) >= min(nodes, sum(ranks**d for d in range(1, depth + 1)))


# ------------------------------------------------------------------ counts
def test_a_node_is_tried_where_its_parent_was_right():
    tally = Tally(depth=3, ranks=2)
    draft = Tree([5, 6, 7, 8, 9, 4], [-1, -1, 0, 1, 1, 4])
    tally.add(draft, Verdict([1, 4], 3))
    tally.add(draft, Verdict([0], 3))
    tally.add(draft, Verdict([], 3))
    assert tally.tried == [[3, 3], [2, 1], [1, 0]]
    assert tally.right == [[1, 1], [0, 1], [0, 0]]
    assert tally.steps == 3
    first, second, third = tally.chances()
    assert first == pytest.approx([(1 + PRIOR * 0.5) / (3 + PRIOR), (1 + PRIOR * 0.25) / (3 + PRIOR)])
    assert second == pytest.approx([PRIOR * first[0] / (2 + PRIOR), (1 + PRIOR * first[1]) / (1 + PRIOR)])
    assert third[1] == second[1]  # never tried: as above


def test_wider_and_deeper_drafts_than_asked_for_are_cut():
    tally = Tally(depth=1, ranks=2)
    tally.add(Tree([5, 6, 7, 8], [-1, -1, -1, 2]), Verdict([2, 3], 1))
    assert tally.tried == [[1, 1]] and tally.right == [[0, 0]]
