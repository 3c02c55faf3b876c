"""Attention over pages, against float64; and a token that gets the same bits from a draft as from the context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headstart.core import Batch, Segment
from headstart.models import paged
from headstart.models.kernels.attention import Cut, Room, attention, cut, fit
from headstart.models.packing import Shape
from headstart.models.paged import Device, PagedContext
from tests.interpreted.support import CPU, PAGE, Part, assert_close, ints, make_batch, pack, seen_by

SCALE = 0.4
DEVICE = Device(8, 1 << 16)
CASES = {
    "plain rows": [Part(37), Part(3), Part(0)],
    "trees": [Part(20, 7, tree=True), Part(5, 4, tree=True)],
    "chains": [Part(18, 5), Part(0, 3), Part(33, 2)],
    "older entries": [Part(9, 4, older=5, tree=True), Part(17, 1, older=2, tree=True)],
    "a tree of more than one word": [Part(6, 6, older=36, tree=True)],
    "prefill": [Part(0, 21), Part(21, 9)],
    "everything, of very different lengths": [Part(150), Part(0, 6), Part(33, 5, older=3, tree=True), Part(1)],
}
MIXED = [Part(40), Part(19, 4), Part(21, 5, older=3, tree=True), Part(0, 9)]
OPTIONS: dict[str, dict[str, Any]] = {
    "share 1": dict(heads=2, kv=2),
    "share 3": dict(heads=6, kv=2),
    "share 6": dict(heads=6, kv=1),
    "share 7": dict(heads=7, kv=1),
    "key and value size differ": dict(key_dim=24, value_dim=8),
    "window 1": dict(window=1),
    "window 3": dict(window=3),
    "window 18": dict(window=18),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "all at once": dict(heads=6, kv=2, key_dim=24, value_dim=40, window=11, softcap=2.0, sinks=True),
}


class Scene:
    """A pool, queries, and a batch that reads it."""

    def __init__(
        self,
        parts: list[Part],
        heads: int = 2,
        kv: int = 1,
        key_dim: int = 16,
        value_dim: int = 16,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        torch.manual_seed(1)
        self.batch, slots = make_batch(parts)
        self.query = torch.randn(len(self.batch.tokens), heads, key_dim)
        self.keys, self.values = torch.randn(slots, kv, key_dim), torch.randn(slots, kv, value_dim)
        self.sinks = torch.randn(heads) if sinks else None
        self.window, self.softcap, self.share = window, softcap, heads // kv
        self.room = Room(1024, 64, 64, CPU)
        for tensor in (self.room.partial, self.room.tops, self.room.weights):
            tensor.fill_(torch.nan)

    def wanted(self) -> torch.Tensor:
        """Row by row in float64: what a row sees, in the order of its positions."""
        out = []
        for segment in self.batch.segments:
            for row, seen in enumerate(seen_by(segment), segment.start):
                near = [i for p, i in enumerate(seen) if not self.window or len(seen) - 1 - p < self.window]
                slots = segment.slots[near]
                k, v = (x[slots].double().repeat_interleave(self.share, 1) for x in (self.keys, self.values))
                score = torch.einsum("hd,shd->hs", self.query[row].double(), k) * SCALE
                if self.softcap:
                    score = torch.tanh(score / self.softcap) * self.softcap
                if self.sinks is not None:
                    score = torch.cat([score, self.sinks.double()[:, None]], 1)
                weights = score.softmax(-1)[:, : len(slots)]
                out.append(torch.einsum("hs,shd->hd", weights, v))
        return torch.stack(out).float()

    def check(self, how: Cut | None = None, padded: bool = False, rowwise: bool = False, keys: int = 16) -> None:
        shape = Shape.of(self.batch)
        shape = shape.padded() if padded else shape
        _, layout = pack(self.batch, shape)
        count, heads = len(self.query), self.query.shape[1]
        query = torch.cat([self.query, torch.randn(shape.rows - count, *self.query.shape[1:])])
        how = how or cut(layout, shape.segments, heads, heads // self.share, 8)
        out = attention(
            query, self.keys, self.values, layout, self.room, replace(how, keys=keys), SCALE, self.window, self.softcap,
            self.sinks, rowwise,
        )  # fmt: skip
        assert_close(out[:count], self.wanted())
        assert not self.room.arrived.any()


@pytest.mark.parametrize("way", ["exact", "padded", "row by row", "row by row, padded"])
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_float64(name: str, way: str) -> None:
    rowwise = "row" in way
    Scene(CASES[name]).check(Cut(16, 4) if rowwise else None, "padded" in way, rowwise)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_float64(name: str, rowwise: bool) -> None:
    Scene(MIXED, **OPTIONS[name]).check(Cut(16, 4), rowwise=rowwise)


@pytest.mark.parametrize("name", OPTIONS)
def test_plain_rows_know_every_option(name: str) -> None:
    Scene([Part(45), Part(2)], **OPTIONS[name]).check()


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("rows", [16, 64])
def test_any_cut_says_the_same(rows: int, splits: int) -> None:
    Scene(MIXED, heads=3, window=25).check(Cut(rows, splits))


@pytest.mark.parametrize("keys", [64, 128])
def test_blocks_of_keys_as_large_as_on_a_device(keys: int) -> None:
    for parts in ([Part(150), Part(64), Part(63)], [Part(150, 5, older=2, tree=True), Part(0, 70)]):
        Scene(parts).check(keys=keys, padded=True)


@pytest.mark.parametrize("parts", [MIXED, [Part(40), Part(0)]])
def test_pages_that_hold_no_number_are_not_looked_at(parts: list[Part]) -> None:
    """What other requests or nobody left in the pool may be anything."""
    scene = Scene(parts)
    unread = torch.ones(len(scene.keys), dtype=torch.bool)
    for segment in scene.batch.segments:
        unread[segment.slots] = False
    scene.keys[unread], scene.values[unread] = torch.nan, torch.nan
    scene.check()


# ------------------------------------------------------------------ one token, the same bits
def path_alone(scene: Scene, segment: Segment, path: list[int], query: torch.Tensor, how: Cut) -> torch.Tensor:
    """The last token of a path as plain decoding meets it: everything before it lies in the context, in new pages."""
    slots = np.arange(len(path)) + PAGE * 3
    keys, values = (torch.randn(len(path) + PAGE * 4, *pool.shape[1:]) for pool in (scene.keys, scene.values))
    for new, old in ((keys, scene.keys), (values, scene.values)):
        new[slots] = old[segment.slots[path]]
    alone = Segment(0, 1, len(path) - 1, slots)
    batch = Batch(np.array([5]), np.array([len(path) - 1]), [alone], np.array([0]))
    _, layout = pack(batch, Shape.of(batch))
    return attention(
        query[None], keys, values, layout, scene.room, how, SCALE, scene.window, scene.softcap, scene.sinks, rowwise=True
    )[0]  # fmt: skip


@pytest.mark.parametrize("options", [{}, dict(heads=6, kv=2, window=14, sinks=True)])
@pytest.mark.parametrize(
    "parts",
    [
        [Part(37, 7, tree=True), Part(7)],
        [Part(14, 4, older=4, tree=True), Part(30, 5)],
        [Part(2), Part(29, 8)],
    ],
)
def test_a_token_gets_the_same_bits_from_a_draft_and_from_the_context(parts: list[Part], options: dict) -> None:
    scene, how = Scene(parts, **options), Cut(16, 4, keys=16)
    for shape in (Shape.of(scene.batch), Shape.of(scene.batch).padded()):
        _, layout = pack(scene.batch, shape)
        query = torch.zeros(shape.rows, *scene.query.shape[1:])
        query[: len(scene.query)] = scene.query
        together = attention(
            query, scene.keys, scene.values, layout, scene.room, how, SCALE, scene.window, None, scene.sinks, rowwise=True
        )  # fmt: skip
        for segment in scene.batch.segments:
            for row, path in enumerate(seen_by(segment), segment.start):
                alone = path_alone(scene, segment, path, scene.query[row], how)
                assert torch.equal(together[row], alone), f"row {row}, {len(path)} tokens"


def test_rows_that_attend_in_several_launches_get_the_same_bits(monkeypatch) -> None:
    scene = Scene(MIXED)
    _, layout = pack(scene.batch, Shape.of(scene.batch))
    room = Room(1024, 16, 16, CPU)
    nowhere = torch.full((len(scene.query),), -1)
    context = PagedContext(layout, [scene.keys], [scene.values], room, DEVICE, True, nowhere, ints([0]), ints([0]))
    whole = context.read(0, scene.query, SCALE)
    monkeypatch.setattr(paged, "CHUNK", 7)
    assert torch.equal(context.read(0, scene.query, SCALE), whole)
    assert_close(whole, scene.wanted())


# ------------------------------------------------------------------ the context around it
@pytest.mark.parametrize("deterministic", [False, True])
def test_new_keys_and_values_are_written_before_they_are_read(deterministic: bool) -> None:
    scene = Scene([Part(11, 3), Part(6, 4, tree=True)])
    _, layout = pack(scene.batch, Shape.of(scene.batch))
    write = torch.from_numpy(scene.batch.write_slots)
    key, value = scene.keys[write], scene.values[write]
    keys, values = scene.keys.clone(), scene.values.clone()
    keys[write], values[write] = torch.nan, torch.nan
    nowhere = torch.full((len(scene.query),), -1)
    room = Room(1024, 16, 16, CPU)
    context = PagedContext(layout, [keys], [values], room, DEVICE, deterministic, nowhere, ints([0]), ints([0]))
    assert_close(context.attend(0, scene.query, key, value, SCALE), scene.wanted())
    assert torch.equal(keys, scene.keys) and torch.equal(values, scene.values)


def test_tokens_that_only_the_device_knows_are_put_in() -> None:
    context = PagedContext.__new__(PagedContext)
    context.source, context.chosen, context.mail = ints([-1, 2, 0, -3, -2]), ints([31, 32, 33]), ints([51, 52])
    assert context.resolve(ints([7, 0, 0, 0, 0])).tolist() == [7, 33, 31, 52, 51]


@pytest.mark.parametrize("parts", [[Part(9)], [Part(9, 5)], MIXED, [Part(0, 100)]])
def test_a_cut_holds_whole_tokens_and_no_more_parts_than_fill_the_device(parts: list[Part]) -> None:
    batch = make_batch(parts)[0]
    _, layout = pack(batch, Shape.of(batch))
    for heads, kv in ((1, 1), (9, 3), (14, 2), (24, 1), (32, 8)):
        for processors in (1, 8, 132):
            for segments in (1, 3, 64):
                how = cut(layout, segments, heads, kv, processors)
                blocks = 1 if layout.single else -(-layout.max_new // (how.rows // (heads // kv)))
                assert how.rows >= max(16, heads // kv)
                assert all(n & (n - 1) == 0 for n in (how.rows, how.splits, how.keys))
                assert how.splits == 1 or how.splits * segments * blocks * kv <= 4 * processors


@pytest.mark.parametrize(
    ("itemsize", "dims", "limit"),
    [
        (2, (64, 64), 48),
        (2, (192, 128), 64),
        (2, (256, 256), 64),
        (4, (64, 64), 64),
        (4, (128, 128), 99),
        (4, (256, 256), 99),
        (2, (128, 128), 227),
    ],
)
def test_a_cut_fits_the_shared_memory(itemsize: int, dims: tuple[int, int], limit: int) -> None:
    key, value = (1 << (d - 1).bit_length() for d in dims)
    for how in (
        Cut(16, 16, 128),
        Cut(16, 1, 64, stages=3),
        Cut(64, 1),
        Cut(32, 8, 128, warps=8),
        Cut(64, 1, 128, stages=4),
    ):
        small = fit(how, 4, dims, itemsize, limit << 10)
        blocks = small.keys * (key + value) * max(1, small.stages - 1) + small.rows * (key + small.keys)
        assert blocks * itemsize <= limit << 10 and 16 <= small.keys <= how.keys
        assert replace(small, rows=how.rows, keys=how.keys, stages=how.stages) == how and small.rows >= 16
        assert fit(how, 4, dims, itemsize, 1 << 30) == how
