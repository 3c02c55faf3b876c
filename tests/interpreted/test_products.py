"""Products and what stands around them, against plain torch; and a row that does not notice its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headstart.models.kernels import block, tiles
from headstart.models.kernels.products import (
    MOST_SQUARES,
    Scratch,
    Stream,
    Tile,
    add_product,
    embed,
    gate_up,
    normed_product,
    qkv,
)
from tests.interpreted.support import CPU, assert_close, ints

EPS = 1e-5
K = 40  # neither 16 nor 32 divides it
PLAIN = Tile(16, 16, 32)
ROWS = [1, 5, 17, 70]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def stream_of(x: torch.Tensor, gain: torch.Tensor) -> Stream:
    """A stream as `embed` would leave it; squares that do not count are no numbers."""
    out = Stream.of(*x.shape, x.dtype, CPU, EPS)
    out.x.copy_(x)
    out.h.copy_(x * gain)
    out.squares.fill_(torch.nan)
    out.squares[:, 0] = x.pow(2).sum(1)
    return out


def made(rows: int, size: int = K) -> tuple[Stream, torch.Tensor]:
    """A stream of random rows, and those rows behind their norm."""
    x, gain = 3 * torch.randn(rows, size), torch.rand(size) + 0.5
    return stream_of(x, gain), F.rms_norm(x, (size,), gain, EPS)


def scratch() -> Scratch:
    out = Scratch(CPU, 1 << 16, 64)
    out.partial.fill_(torch.nan)
    return out


# ------------------------------------------------------------------ against torch
def test_embed_begins_a_stream_with_tokens_that_are_given_chosen_or_in_the_mail() -> None:
    table, gain = torch.randn(20, K), torch.rand(K)
    tokens, source, chosen, mail = (
        ints([3, 0, 19, 0, 0, 0]),
        ints([-1, 2, -1, 0, -2, -4]),
        ints([11, 5, 7]),
        ints([4, 9, 1]),
    )
    stream = Stream.of(6, K, torch.float32, CPU, EPS)
    embed(tokens, source, chosen, mail, table, gain, stream)
    assert tokens.tolist() == [3, 7, 19, 11, 4, 1] and stream.blocks == 1
    x = table[tokens.long()]
    assert torch.equal(stream.x, x) and torch.equal(stream.h, x * gain)
    assert_close(stream.squares[:, 0], x.pow(2).sum(1))


@pytest.mark.parametrize("rows", ROWS)
def test_a_normed_product_equals_torch(rows: int) -> None:
    stream, normed = made(rows)
    weight, bias = torch.randn(23, K), torch.randn(23) if rows % 2 else None
    out = normed_product(stream, weight, bias, PLAIN, scratch(), torch.float32)
    assert_close(out, F.linear(normed, weight, bias))


def test_a_normed_product_goes_where_it_is_told() -> None:
    stream, normed = made(3)
    weight, into = torch.randn(16, K), torch.zeros(3, 16)
    assert normed_product(stream, weight, None, PLAIN, scratch(), torch.float32, into) is into
    assert_close(into, F.linear(normed, weight))


@pytest.mark.parametrize("rows", ROWS)
def test_an_added_product_prepares_the_next_norm(rows: int) -> None:
    stream, _ = made(rows)
    x, inner = stream.x.clone(), torch.randn(rows, 24)
    weight, bias, gain = torch.randn(K, 24), torch.randn(K) if rows % 2 else None, torch.rand(K) + 0.5
    add_product(inner, weight, bias, stream, gain, PLAIN, scratch())
    want = x + F.linear(inner, weight, bias)
    assert stream.blocks == 3
    assert_close(stream.x, want)
    assert_close(stream.h, want * gain)
    assert_close(stream.squares[:, :3].sum(1), want.pow(2).sum(1))
    head = torch.randn(16, K)
    following = normed_product(stream, head, None, PLAIN, scratch(), torch.float32)
    assert_close(following, F.linear(F.rms_norm(want, (K,), gain, EPS), head))


@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up_equal_torch(rows: int) -> None:
    stream, normed = made(rows)
    weight = torch.randn(2 * 23, K)
    gate, up = F.linear(normed, weight).chunk(2, -1)
    assert_close(gate_up(stream, weight, PLAIN), F.silu(gate) * up)


@pytest.mark.parametrize("depth", [8, 16, 64])
def test_any_depth_of_a_tile_will_do(depth: int) -> None:
    stream, normed = made(5)
    weight, tile = torch.randn(32, K), replace(PLAIN, depth=depth)
    gate, up = F.linear(normed, weight).chunk(2, -1)
    assert_close(normed_product(stream, weight, None, tile, scratch(), torch.float32), F.linear(normed, weight))
    assert_close(gate_up(stream, weight, tile), F.silu(gate) * up)


@pytest.mark.parametrize("split", [2, 4])
def test_a_split_product_says_the_same_and_leaves_its_counters_at_zero(split: int) -> None:
    (stream, _), weight, gain = made(17), torch.randn(K, 56), torch.rand(K)
    whole, inner, room = stream_of(stream.x, gain), torch.randn(17, 56), scratch()
    add_product(inner, weight, None, whole, gain, PLAIN, scratch())
    tile = replace(PLAIN, split=split)  # with 4, there are more programs than pieces of the depth
    add_product(inner, weight, None, stream, gain, tile, room)
    for name in ("x", "h"):
        assert_close(getattr(stream, name), getattr(whole, name))
    head = torch.randn(20, K)
    once = normed_product(stream, head, None, PLAIN, room, torch.float32)
    assert_close(normed_product(stream, head, None, tile, room, torch.float32), once)
    assert not room.arrived.any()


# ------------------------------------------------------------------ queries, keys and values
def rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    """(T, heads, D)"""
    cos, sin = (torch.cat([a, a], -1)[positions.long()][:, None] for a in angles)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Heads:
    """Weights, angles and an empty pool for one attention."""

    def __init__(self, rows: int, heads: int = 3, kv: int = 2, dim: int = 32) -> None:
        self.heads, self.kv, self.dim = heads, kv, dim
        self.weight, self.bias = torch.randn((heads + 2 * kv) * dim, K), torch.randn((heads + 2 * kv) * dim)
        self.angles = torch.randn(50, dim // 2), torch.randn(50, dim // 2)
        self.positions = torch.randint(0, 50, (rows,)).int()
        self.slots = torch.randperm(rows + 9)[:rows].int()
        self.keys, self.values = (torch.full((rows + 9, kv, dim), 7.0) for _ in range(2))

    def check(self, query: torch.Tensor, flat: torch.Tensor, gains: tuple[torch.Tensor, ...] = ()) -> None:
        """`flat` (T, all heads): what the product gives, before norms over heads and rotation."""
        q, k, v = flat.view(len(flat), -1, self.dim).split([self.heads, self.kv, self.kv], 1)
        if gains:
            q, k = (F.rms_norm(x, (self.dim,), g, EPS) for x, g in zip((q, k), gains, strict=True))
        live = self.slots >= 0
        keys, values = torch.full_like(self.keys, 7.0), torch.full_like(self.values, 7.0)
        keys[self.slots[live].long()] = rotated(k, self.angles, self.positions)[live]
        values[self.slots[live].long()] = v[live]
        assert_close(query, rotated(q, self.angles, self.positions))
        assert_close(self.keys, keys)
        assert_close(self.values, values)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_queries_are_rotated_and_keys_and_values_go_to_their_slots(rows: int, biased: bool) -> None:
    stream, normed = made(rows)
    h = Heads(rows, *((3, 2) if rows < 70 else (1, 1)))
    bias = h.bias if biased else None
    query = qkv(stream, h.weight, bias, h.angles, h.positions, h.slots, h.keys, h.values, PLAIN)
    h.check(query, F.linear(normed, h.weight, bias))


def test_rows_without_a_slot_write_nothing() -> None:
    stream, normed = made(6)
    h = Heads(6)
    h.slots[[1, 4, 5]] = -1
    query = qkv(stream, h.weight, None, h.angles, h.positions, h.slots, h.keys, h.values, PLAIN)
    h.check(query, F.linear(normed, h.weight))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dim", [16, 24])
def test_rotation_alone_with_and_without_norms_over_heads(dim: int, normed: bool) -> None:
    h = Heads(5, dim=dim)
    h.slots[2] = -1
    gains = (torch.rand(dim), torch.rand(dim)) if normed else None
    flat = torch.randn(5, len(h.weight))
    query = block.rotate(flat, gains, EPS, h.angles, h.positions, h.slots, h.keys, h.values)
    h.check(query, flat, gains or ())


def test_swiglu_equals_torch() -> None:
    x = torch.randn(3, 2 * 1030)
    gate, up = x.chunk(2, -1)
    assert_close(block.swiglu(x), F.silu(gate) * up)


@pytest.mark.parametrize("strided", [True, False])
def test_rows_are_written_to_their_slots_and_the_others_left_out(strided: bool) -> None:
    whole, pool, slots = torch.randn(4, 5, 6), torch.full((9, 2, 6), 7.0), ints([8, -1, 0, 3])
    source = whole[:, 1:3] if strided else whole[:, 1:3].contiguous()
    want = pool.clone()
    want[[8, 0, 3]] = source[[0, 2, 3]]
    block.write(source, pool, slots)
    assert torch.equal(pool, want)


# ------------------------------------------------------------------ a row alone
@pytest.mark.parametrize("tile", [PLAIN, replace(PLAIN, split=2)])
def test_a_row_gets_the_same_bits_whoever_shares_the_launch(tile: Tile) -> None:
    """One row among 1, 9 and 35 rows, also in another band of rows, with other neighbours each time."""
    row, inner, gain = torch.randn(K), torch.randn(56), torch.rand(K)
    weight, pair, deep = torch.randn(20, K), torch.randn(40, K), torch.randn(K, 56)
    h, single = Heads(1, heads=2, kv=1), replace(tile, split=1)

    def results(rows: int, at: int) -> list[torch.Tensor]:
        x, more = torch.randn(rows, K), torch.randn(rows, 56)
        x[at], more[at] = row, inner
        stream, positions, slots = stream_of(x, gain), torch.randint(0, 50, (rows,)).int(), torch.arange(rows).int()
        positions[at] = 5
        keys, values = torch.zeros(rows, 1, 32), torch.zeros(rows, 1, 32)
        out = [normed_product(stream, weight, None, tile, scratch(), torch.float32), gate_up(stream, pair, single)]
        out.append(qkv(stream, h.weight, h.bias, h.angles, positions, slots, keys, values, single))
        add_product(more, deep, None, stream, gain, tile, scratch())
        out += [keys, values, stream.x, stream.h, stream.squares[:, : stream.blocks]]
        return [o[at].clone() for o in out]

    alone = results(1, 0)
    for rows, at in ((9, 0), (35, 0), (35, 16), (33, 32)):
        for i, (a, b) in enumerate(zip(alone, results(rows, at), strict=True)):
            assert torch.equal(a, b), f"result {i} differs at row {at} of {rows}"


# ------------------------------------------------------------------ tiles
SHAPES = {  # hidden, inner, query heads, key heads, head size
    "135M": (576, 1536, 9, 3, 64),
    "0.5B": (896, 4864, 14, 2, 64),
    "1.5B": (1536, 8960, 12, 2, 128),
    "8B": (4096, 14336, 32, 8, 128),
    "70B": (8192, 28672, 64, 8, 128),
    "wide": (40000, 80000, 64, 8, 128),
}
LIMITS = {"48 KB": 48, "T4": 64, "RTX": 99, "A100": 163, "H100": 227}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("model", SHAPES)
def test_tiles_fit_the_shared_memory(model: str, limit: str, itemsize: int) -> None:
    hidden, inner, heads, kv, dim = SHAPES[model]
    products = [
        ("qkv", (heads + 2 * kv) * dim, hidden),
        ("add", hidden, heads * dim),
        ("add", hidden, inner),
        ("gate_up", 2 * inner, hidden),
        ("head", 128256, hidden),
    ]
    for kind, cols, depth in products:
        for rows in (1, 16, 17, 32, 33, 64, tiles.FIXED_ROWS):
            tile = tiles.tile(kind, rows, cols, depth, itemsize, LIMITS[limit] << 10, 132)
            wide = tile.cols * (2 if kind in ("qkv", "gate_up") else 1)
            assert (tile.rows + wide) * tile.depth * itemsize * tile.stages <= LIMITS[limit] << 10
            assert tile.stages >= 1 and all(n >= 16 and n & (n - 1) == 0 for n in (tile.rows, tile.cols, tile.depth))
            if kind == "add":
                assert -(-cols // tile.cols) <= MOST_SQUARES and (tile.split > 1) == (rows <= 16 or depth > 2048)


def test_a_tile_that_fits_is_left_as_it_is() -> None:
    tile = Tile(16, 32, 128, stages=4)
    need = (16 + 32) * 128 * 2 * 4
    assert tiles.fit(tile, False, 2, need) is tile
    assert tiles.fit(tile, False, 2, need - 1) == replace(tile, stages=3)
    assert tiles.fit(tile, True, 2, (16 + 64) * 64 * 2 * 2) == replace(tile, stages=2, depth=64)
