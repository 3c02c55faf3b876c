"""A batch as one block of numbers: what goes in comes out, and padding belongs to nobody."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstart.core import Batch, Choice
from headstart.models import packing
from headstart.models.packing import Shape, draft_shapes, prompt_shapes, step_up, stride_up
from tests.interpreted.support import PAGE, Part, make_batch, pack, seen_by

MIXED = [Part(8, 13), Part(21, 4), Part(10, 6, older=3, tree=True), Part(17), Part(2, 5, older=40, tree=True)]
PLAIN = [Part(5), Part(0), Part(31)]


def chosen(batch: Batch, nodes: list[int]) -> Batch:
    """The same batch with a choice: draft nodes are the last rows of their segments."""
    rng = np.random.default_rng(1)
    asked = [r for s, n in zip(batch.segments, nodes, strict=True) for r in range(s.stop - 1 - max(n, 0), s.stop)]
    batch.rows = np.array(asked)
    choice = batch.choice = Choice.of(len(asked), len(nodes))
    for name in ("temperature", "top_p", "min_p"):
        getattr(choice, name)[:] = rng.random(len(asked))
    choice.seeds[:], choice.top_k[:] = rng.integers(0, 2**32, (len(asked), 2)), rng.integers(0, 50, len(asked))
    choice.nodes[:] = nodes
    choice.draws = choice.truncates = True
    return batch


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("parts", [MIXED, PLAIN])
def test_rows_and_segments_come_out_as_they_went_in(parts: list[Part], padded: bool) -> None:
    batch, _ = make_batch(parts)
    shape = Shape.of(batch).padded() if padded else Shape.of(batch)
    block, layout = pack(batch, shape)
    count, rows = len(batch.segments), len(batch.tokens)
    tokens = packing.places(shape).on_device(block, "tokens")
    assert tokens[:rows].tolist() == batch.tokens.tolist()
    assert layout.positions[:rows].tolist() == batch.positions.tolist()
    assert layout.slots[:rows].tolist() == batch.write_slots.tolist()
    for name in ("start", "stop", "context"):
        assert getattr(layout, name)[:count].tolist() == [getattr(s, name) for s in batch.segments]
    assert layout.entries[:count].tolist() == [len(s.slots) - s.context for s in batch.segments]
    assert layout.is_tree[:count].tolist() == [int(s.parents is not None) for s in batch.segments]
    for b, segment in enumerate(batch.segments):
        size = len(segment.slots)
        for table in {int(layout.table[b]), *layout.at[segment.start : segment.stop].tolist()}:
            found = [int(layout.pages[table + i // PAGE]) * PAGE + i % PAGE for i in range(size)]
            assert found == segment.slots.tolist()
    assert (layout.max_new, layout.trees, layout.page_size) == (shape.new, shape.width > 0, PAGE)
    assert layout.single == (parts is PLAIN)


def test_a_batch_behind_itself_is_the_batch_one_token_further() -> None:
    """All that has no draft; what has one is for the device to move."""
    parts = [Part(3), Part(7, 4), Part(8), Part(0)]
    further = [Part(p.context + 1, p.new) for p in parts]
    (batch, _), nodes = make_batch(further), [0, 3, 0, 0]  # the last one moved before
    longer = chosen(batch, nodes)
    segments = [
        replace(s, slots=s.slots[:-1], pages=s.slots[::PAGE] // PAGE, context=s.context - 1) for s in longer.segments
    ]
    earlier = replace(longer, positions=longer.positions - 1, segments=segments)
    for s in longer.segments:
        s.seat = 0
    for s in earlier.segments:
        s.seat = 0
    earlier.segments[3].moves = longer.segments[3].moves = True
    shape = Shape.of(longer)
    got, _ = pack(earlier, shape)
    packing.step_on(got.numpy(), shape, earlier, PAGE)
    longer.source = np.array([0, -1, -1, -1, -1, 5, -1])  # each goes on with what its own row chose, or with its text
    longer.segments[1].moves = True
    want, _ = pack(longer, shape)
    places = packing.places(shape)
    for name in places.places:
        a, b = (places.on_device(x, name) for x in (got, want))
        if name == "slots":  # of a draft, only the device can say
            a, b = a[[0, 1, 5, 6]], b[[0, 1, 5, 6]]
        assert torch.equal(a, b), name
    assert torch.equal(got[places.pages :], want[places.pages :])


@pytest.mark.parametrize("padded", [False, True])
def test_masks_paths_and_depths_tell_what_a_row_sees(padded: bool) -> None:
    batch, _ = make_batch(MIXED)
    shape = Shape.of(batch).padded() if padded else Shape.of(batch)
    _, layout = pack(batch, shape)
    words = layout.words.numpy().view(np.uint32)
    for b, segment in enumerate(batch.segments):
        for row, seen in enumerate(seen_by(segment), segment.start):
            position, common = int(layout.positions[row]), int(layout.shared[row])
            path = [i - segment.context for i in seen[segment.context :]]
            if segment.parents is None:
                assert common > position
                continue
            assert common == segment.context and layout.above[row, : len(path)].tolist() == path
            bits = {i for i in range(shape.width) if words[row, i // 32] >> np.uint32(i % 32) & 1}
            assert bits == set(path)
            own = len(segment.slots) - segment.context - (segment.stop - row)
            assert int(layout.depths[int(layout.depth_at[b]) + own]) == len(path) - 1 == position - segment.context


def test_padding_belongs_to_nobody() -> None:
    for parts in (MIXED, PLAIN):
        batch, _ = make_batch(parts)
        batch = chosen(batch, [0] * len(parts))
        shape = Shape.of(batch).padded()
        block, layout = pack(batch, shape)
        rows, count = len(batch.tokens), len(parts)
        assert shape.rows > rows and shape.segments > count
        assert (layout.slots[rows:] == -1).all() and (layout.at[rows:] == -1).all()
        sections = packing.places(shape)
        assert (sections.on_device(block, "source") == -1).all()
        assert (sections.on_device(block, "nodes")[count:] == -1).all()
        assert (layout.stop[count:] == layout.start[count:]).all()


def test_a_token_that_the_device_will_put_in_may_be_unknown() -> None:
    batch, _ = make_batch(PLAIN)
    batch.tokens[1], batch.source = -1, np.array([-1, 7, -1])
    shape = Shape.of(batch).padded()
    block, _ = pack(batch, shape)
    sections = packing.places(shape)
    assert sections.on_device(block, "source").tolist() == [-1, 7, -1, -1]
    assert (sections.on_device(block, "tokens") >= 0).all()


@pytest.mark.parametrize("padded", [False, True])
def test_a_choice_is_told_row_by_row(padded: bool) -> None:
    """A prefill piece that chooses nothing, a chain of 3 nodes, a tree of 4, and a plain row."""
    batch, _ = make_batch(MIXED[:4])
    tree = batch.segments[2].parents
    tree[:] = [-1, 0, 1, 2, 3, 4, 4, 6, 4]  # known tokens are a chain; nodes hang behind the last of them
    nodes = [-1, 3, 4, 0]
    batch = chosen(batch, nodes)
    shape = Shape.of(batch).padded() if padded else Shape.of(batch)
    block, _ = pack(batch, shape)

    def get(name: str) -> np.ndarray:
        return packing.places(shape).on_device(block, name).numpy()

    assert get("nodes")[:4].tolist() == nodes
    for name in ("temperature", "top_p", "min_p"):
        assert get(name).view(np.float32)[batch.rows].tolist() == getattr(batch.choice, name).tolist()
    assert get("top_k")[batch.rows].tolist() == batch.choice.top_k.tolist()
    assert get("seeds").view(np.uint32)[:, batch.rows].T.tolist() == batch.choice.seeds.tolist()
    chain, grown = batch.segments[1], batch.segments[2]
    assert get("root")[1:4].tolist() == [chain.stop - 4, grown.stop - 5, batch.segments[3].stop - 1]
    assert get("parent")[chain.stop - 3 : chain.stop].tolist() == [0, 1, 2]  # 0 is the root, i + 1 is node i
    assert get("parent")[grown.stop - 4 : grown.stop].tolist() == [0, 0, 2, 0]


# ------------------------------------------------------------------ shapes
NUMBERS = st.integers(1, 3000)


@given(NUMBERS, NUMBERS)
def test_steps_never_shrink_and_never_cross(a: int, b: int) -> None:
    low, high = sorted((a, b))
    for up in (step_up, stride_up):
        assert low <= up(low) <= up(high)
        assert up(up(a)) == up(a) and up(a) <= max(2 * a - 1, a + 63)


def test_a_prompt_of_one_row_beside_plain_ones_stays_a_prompt() -> None:
    """What a head reads of it has a place in the batch."""
    shape = Shape(16, 16, 1, 0, prompts=True)
    assert shape.padded().prompts and shape.padded().covers(shape)
    assert "behind" in packing.places(shape.padded()).places


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 70), st.booleans()), min_size=1, max_size=70), st.booleans()
)
def test_a_padded_shape_is_never_smaller(parts: list[tuple[int, int, bool]], truncates: bool) -> None:
    rows, new = sum(n for n, _, _ in parts), max(n for n, _, _ in parts)
    width = max((n + older for n, older, tree in parts if tree), default=0)
    exact = Shape(rows, len(parts), new, width, truncates)
    padded = exact.padded()
    assert all(p >= e for p, e in zip(astuple(padded), astuple(exact), strict=True)) and padded.words >= exact.words
    assert (padded.width > 0, padded.truncates) == (exact.width > 0, truncates)


def test_the_exact_shape_of_a_batch() -> None:
    assert Shape.of(make_batch(MIXED)[0]) == Shape(29, 5, 13, 45)
    assert Shape.of(make_batch(PLAIN)[0]) == Shape(3, 3, 1, 0)
    assert Shape.of(chosen(make_batch(PLAIN)[0], [0, 0, 0])) == Shape(3, 3, 1, 0, truncates=True)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=64), st.booleans())
def test_every_step_with_drafts_has_its_shape_among_those_that_are_prepared(nodes: list[int], wide: bool) -> None:
    if not any(nodes):
        return
    sizes = [2 * n if wide else n for n in nodes]
    width = 1 + max(sizes) if wide else 0
    shape = Shape(sum(sizes) + len(sizes), len(sizes), 1 + max(sizes), width).padded()
    prepared = set(draft_shapes(64, 15, 16)) if wide else set(draft_shapes(64, 7))
    assert shape in prepared and len(prepared) < 60


@given(st.lists(st.integers(1, 512), min_size=1, max_size=64))
def test_every_step_with_prompts_has_its_shape_among_those_that_are_prepared(pieces: list[int]) -> None:
    if max(pieces) == 1 or sum(pieces) > 512:
        return
    prepared = set(prompt_shapes(64, 512))
    assert Shape(sum(pieces), len(pieces), max(pieces), prompts=True).padded() in prepared and len(prepared) < 60
