"""How each product is cut, by its size, from what was measured on an H200."""

from __future__ import annotations

import functools
from dataclasses import replace

from headstart.models.kernels.products import MOST_SQUARES, Tile

FEW = 64  # rows up to which these products beat a library's with the small kernels around it
FIXED_ROWS = 64  # rows of a tile under `deterministic`, whatever the number of rows


@functools.cache
def tile(kind: str, rows: int, cols: int, depth: int, itemsize: int, shared_memory: int, processors: int) -> Tile:
    """A cut for `rows` x `cols` outputs over this depth. Kinds: qkv, add, gate_up, head."""
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    chosen = _TILES[kind](height, cols, depth)
    if kind == "add":
        columns = -(-cols // chosen.cols)
        most = processors // 2 if height == 64 else processors  # sums of many rows take longer to meet
        if chosen.split > 1:
            chosen = replace(chosen, split=4 if columns < most else 2)
        while -(-cols // chosen.cols) > MOST_SQUARES:
            chosen = replace(chosen, cols=2 * chosen.cols)
    return fit(chosen, kind in ("qkv", "gate_up"), itemsize, shared_memory)


def _qkv(height: int, cols: int, depth: int) -> Tile:
    if height < 64:  # 32 rows in two bands
        return Tile(16, 32, 256, stages=3)
    return Tile(height, 32 if depth >= 4096 else 16, 128, stages=4)


def _add(height: int, cols: int, depth: int) -> Tile:
    if height > 16 and depth <= 2048:  # too short to be cut
        return Tile(height, 16, 128, stages=5)
    return Tile(height, 32, 128, split=4, stages=4)


def _gate_up(height: int, cols: int, depth: int) -> Tile:
    if height == 64:
        return Tile(height, 64, 64, stages=4)
    if height == 32:
        return Tile(height, 64, 128, stages=3)
    if depth <= 1024:
        return Tile(16, 32, 64, stages=6)
    return Tile(16, 32, 128, stages=3) if depth < 4096 else Tile(16, 64, 128, stages=5)


def _head(height: int, cols: int, depth: int) -> Tile:
    if height < 64:
        return (
            Tile(32, 128, 128, warps=8, stages=3) if height == 32 and depth >= 4096 else Tile(height, 64, 128, stages=3)
        )
    return Tile(height, 128, 64, warps=8, stages=3) if depth >= 4096 else Tile(height, 64, 64, stages=6)


_TILES = {"qkv": _qkv, "add": _add, "gate_up": _gate_up, "head": _head}


def fit(chosen: Tile, pair: bool, itemsize: int, shared_memory: int) -> Tile:
    """The same cut with fewer stages, then less depth, until it fits the device's shared memory."""

    def needs(t: Tile) -> int:
        return (t.rows + t.cols * (2 if pair else 1)) * t.depth * itemsize * t.stages

    while needs(chosen) > shared_memory and chosen.stages > 2:
        chosen = replace(chosen, stages=chosen.stages - 1)
    while needs(chosen) > shared_memory and chosen.depth > 32:
        chosen = replace(chosen, depth=chosen.depth // 2)
    return chosen
