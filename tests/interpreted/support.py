"""What these tests share: batches with trees, their blocks, and a measure of closeness."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headstart.core import Batch, Segment
from headstart.models import packing
from headstart.models.kernels.attention import Layout
from headstart.models.packing import Shape

PAGE = 4
CPU = torch.device("cpu")


class Part(NamedTuple):
    """One request's share of a batch: new rows behind a context; a tree may have older entries."""

    context: int
    new: int = 1
    older: int = 0
    tree: bool = False


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error, size = float((got - want).abs().max()), max(1.0, float(want.abs().max()))
    assert error <= 2e-4 * size, f"off by {error:.2g} at a magnitude of {size:.2g}"


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_parents(rng: np.random.Generator, size: int) -> list[int]:
    return [int(rng.integers(-1, i)) for i in range(size)]


def make_batch(parts: list[Part], page: int = PAGE, seed: int = 0) -> tuple[Batch, int]:
    """A batch over scattered pages that no two requests share, and how many slots the pool needs."""
    rng = np.random.default_rng(seed)
    sizes = [-(-(p.context + p.older + p.new) // page) for p in parts]
    order, taken, start = rng.permutation(sum(sizes) + 3), 0, 0
    segments, positions = [], []
    for part, pages in zip(parts, sizes, strict=True):
        entries = part.older + part.new
        mine = order[taken : taken + pages]
        slots = (mine[:, None] * page + np.arange(page)).reshape(-1)[: part.context + entries]
        parents = np.array(random_parents(rng, entries), np.int64) if part.tree else None
        segments.append(Segment(start, start + part.new, part.context, slots, parents))
        positions += [len(p) - 1 for p in seen_by(segments[-1])]
        taken, start = taken + pages, start + part.new
    tokens = rng.integers(0, 50, start)
    return Batch(tokens, np.array(positions, np.int64), segments, np.arange(start)), len(order) * page


def seen_by(segment: Segment) -> list[list[int]]:
    """For each new row, the indexes that it sees in the order of their positions, its own last."""
    entries = len(segment.slots) - segment.context
    parents = list(range(-1, entries - 1)) if segment.parents is None else segment.parents.tolist()
    out = []
    for entry in range(entries - segment.num_new, entries):
        path = []
        while entry >= 0:
            path.append(segment.context + entry)
            entry = parents[entry]
        out.append([*range(segment.context), *path[::-1]])
    return out


def pack(batch: Batch, shape: Shape, page: int = PAGE) -> tuple[torch.Tensor, Layout]:
    """The block of a batch in this shape, and the attention's view of it."""
    block = np.full(packing.size_of(shape, batch, page), 99, np.int32)  # what lay there before must not matter
    assert packing.fill(block, shape, batch, page) == len(block)
    data = torch.from_numpy(block)
    return data, packing.layout(data, shape, page)
