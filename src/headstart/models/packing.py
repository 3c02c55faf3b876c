"""A batch as one block of int32 numbers: what a forward on the device needs, sent in one copy.

The block's sections have fixed places for a given `Shape`, so that a captured graph finds them again; the pages of all
segments come last, since their number changes from step to step. Rows and segments that pad a shape belong to nobody.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headstart.core import Batch, Choice, Segment

if TYPE_CHECKING:
    from headstart.models.kernels.attention import Layout


DRAFT, DRAFT_WIDTH = 8, 16  # rows of a request in the smallest step with drafts, and entries of its tree
PROMPT = 32  # rows of a request from which on it has a prompt, where nobody says
LEAST_PROMPTS = 16  # rows of the smallest step with prompts


@dataclass(frozen=True)
class Shape:
    """The size of a forward: rows, segments, rows of the largest segment, and entries of the largest tree (0: chains only)."""

    rows: int
    segments: int
    new: int
    width: int = 0
    truncates: bool = False  # some row leaves out unlikely tokens
    prompts: bool = False  # some request has more rows than its last token and its draft

    @staticmethod
    def of(batch: Batch) -> Shape:
        """The exact size of this batch."""
        trees = [len(s.parents) for s in batch.segments if s.parents is not None]
        sizes, choice = [s.stop - s.start for s in batch.segments], batch.choice
        new, truncates = max(sizes), choice is not None and choice.truncates
        if batch.behind is not None:
            prompts = True
        elif choice is None:
            prompts = new > PROMPT
        else:
            prompts = new > 1 and any(n > 1 + max(k, 0) for n, k in zip(sizes, choice.nodes, strict=True))
        return Shape(len(batch.tokens), len(sizes), new, max(trees) if trees else 0, truncates, prompts)

    @functools.lru_cache(1024)  # noqa: B019 - a shape holds nothing
    def padded(self) -> Shape:
        """The bucket that this size falls into: small ones for plain steps, large ones for drafts and larger ones for prompts,
        since each has a graph, and with drafts and prompts no two steps are alike."""
        if self.rows == self.segments and not self.width and not self.prompts:
            rows = step_up(self.rows)
            return Shape(rows, rows, 1, 0, self.truncates)
        rows, width = stride_up(self.rows), max(DRAFT_WIDTH, double_up(self.width)) if self.width else 0
        if self.prompts:
            rows = max(rows, LEAST_PROMPTS)
            return Shape(rows, min(rows, fourfold_up(self.segments)), max(rows, width), width, self.truncates, True)
        segments, new = double_up(self.segments), max(DRAFT, double_up(self.new))
        return Shape(max(rows, segments), segments, max(new, width), width, self.truncates)

    def covers(self, other: Shape) -> bool:
        """Could a batch of that size be sent as one of this size?"""
        alike = (self.truncates, self.prompts, self.width > 0) == (other.truncates, other.prompts, other.width > 0)
        fits = self.rows >= other.rows and self.segments >= other.segments
        return alike and fits and self.new >= other.new and self.width >= other.width

    @property
    def words(self) -> int:
        return -(-self.width // 32)


def step_up(n: int) -> int:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 32 up to 256, of 64 beyond: little is padded, few sizes are met."""
    if n <= 8:
        return 1 << (n - 1).bit_length()
    unit = 8 if n <= 64 else 32 if n <= 256 else 64
    return -(-n // unit) * unit


def double_up(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def fourfold_up(n: int) -> int:
    """The next power of four."""
    return 1 << (n - 1).bit_length() + (n - 1).bit_length() % 2


def stride_up(n: int) -> int:
    """2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, then multiples of 64: few sizes, and little padding where rows cost most."""
    if n > 256:
        return -(-n // 64) * 64
    most = double_up(n)
    return most * 3 // 4 if most > 32 and n <= most * 3 // 4 else most


def draft_shapes(segments: int, nodes: int, width: int = 0) -> Iterator[Shape]:
    """The buckets of all steps in which some of up to so many requests have drafts of up to so many nodes."""
    for most in (1 << i for i in range((segments - 1).bit_length() + 1)):
        least = most // 2 + 1
        sizes = {stride_up(n): n for n in range(least + 1, most * (1 + nodes) + 1)}
        yield from {Shape(n, least, 1 + nodes, width).padded() for n in sizes.values()}


def prompt_shapes(segments: int, rows: int, width: int = 0) -> Iterator[Shape]:
    """The buckets of all steps in which prompts of some length are read, beside trees of this width."""
    for most in (n for n in range(1, segments + 1) if n & (n - 1) == 0 or n == segments):
        for size in sorted({stride_up(n) for n in range(max(LEAST_PROMPTS, most + 1), rows + 1)}):
            yield Shape(size, most, 2, width, prompts=True).padded()


class Sections:
    """Where each part of the block stands. "where" tells those who do not know the shape: the place of "root", of "table" and
    of the pages, and how many numbers a verdict has."""

    def __init__(self, shape: Shape) -> None:
        t, b, w, s = shape.rows, shape.segments, shape.words, shape.width
        by_row = ["tokens", "source", "positions", "slots", "at", "shared", "lines", "parent"]
        by_row += ["temperature", "top_k", "top_p", "min_p"]
        by_row += ["behind", "kept"] if shape.prompts else []
        by_segment = ["start", "stop", "context", "entries", "table", "is_tree", "depth_at", "root", "nodes"]
        by_segment += ["seat", "moves", "sized", "grown"]
        dims: dict[str, tuple[int, ...]] = {"where": (4,)}  # first, so that it is found without knowing the shape
        dims |= {"seeds": (2, t), "words": (t, w), "above": (t, s), "depths": (b * s,)}
        dims |= dict.fromkeys(by_row, (t,)) | dict.fromkeys(by_segment, (b,))
        self.places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        at = 0
        for name, dim in dims.items():
            size = math.prod(dim)
            self.places[name] = (at, size, dim)
            at += -(-size // 4) * 4  # 16-byte steps
        self.pages = at
        self.blank = np.zeros(at, np.int32)  # rows and segments that belong to nobody
        for name in ("source", "slots", "at", "nodes", "seat", "sized", "grown", *(["kept"] if shape.prompts else [])):
            self.of(self.blank, name)[:] = -1
        self.of(self.blank, "where")[:] = self.places["root"][0], self.places["table"][0], at, 2 + shape.new

    def of(self, block: np.ndarray, name: str) -> np.ndarray:
        at, size, dim = self.places[name]
        return block[at : at + size].reshape(dim)

    def on_device(self, block: torch.Tensor, name: str) -> torch.Tensor:
        at, size, dim = self.places[name]
        return block[at : at + size].view(dim)


@functools.lru_cache(1024)  # forwards without a graph come in any size
def places(shape: Shape) -> Sections:
    return Sections(shape)


def layout(block: torch.Tensor, shape: Shape, page_size: int) -> Layout:
    """The attention's view of a block on the device."""
    from headstart.models.kernels.attention import Layout

    sections = places(shape)

    def get(name: str) -> torch.Tensor:
        return sections.on_device(block, name)

    return Layout(
        get("start"), get("stop"), get("context"), get("entries"), get("table"), block[sections.pages :], get("at"),
        get("positions"), get("shared"), get("slots"), get("is_tree"), get("words"), get("above"), get("depth_at"),
        get("depths"), page_size, shape.new, shape.width > 0,
    )  # fmt: skip


def size_of(shape: Shape, batch: Batch, page_size: int) -> int:
    """Numbers that this batch takes in this shape."""
    segments = batch.segments
    return places(shape).pages + sum(
        [-(-len(s.slots) // page_size) if s.pages is None else len(s.pages) for s in segments]
    )


def fill(block: np.ndarray, shape: Shape, batch: Batch, page_size: int) -> int:
    """Write a batch into a block; returns how many numbers count."""
    sections = places(shape)
    block[: sections.pages] = sections.blank
    segments = batch.segments

    def put(name: str, values: np.ndarray | list[int]) -> None:
        at = sections.places[name][0]
        block[at : at + len(values)] = values

    put("tokens", batch.tokens)
    put("positions", batch.positions)
    put("shared", batch.positions + 1)
    put("lines", batch.rows)
    if batch.source is not None:
        put("tokens", np.maximum(batch.tokens, 0))  # one that the device will put in may be anything here
        put("source", batch.source)
    start, stop = np.array([s.start for s in segments]), np.array([s.stop for s in segments])
    context, size = np.array([s.context for s in segments]), stop - start
    entries = np.array([len(s.slots) for s in segments]) - context if shape.width else size
    for name, values in (("start", start), ("stop", stop), ("context", context), ("entries", entries)):
        put(name, values)
    pages = [s.slots[::page_size] // page_size if s.pages is None else s.pages for s in segments]
    count = np.array([len(p) for p in pages])
    table = count.cumsum() - count
    end = int(table[-1] + count[-1])
    np.concatenate(pages, out=block[sections.pages : sections.pages + end], casting="unsafe")
    at = np.repeat(table, size)
    put("table", table)
    put("at", at)
    index = np.arange(len(at)) + np.repeat(context + entries - stop, size)  # of each row in its own segment
    slots = block[sections.pages :][at + index // page_size] * page_size + index % page_size
    put("slots", slots)
    if batch.behind is not None:  # rows without a token behind them are read by nobody
        put("behind", np.maximum(batch.behind, 0))
        put("kept", np.where(batch.behind < 0, -1, slots))
    if shape.width:
        _fill_trees(lambda name: sections.of(block, name), shape, segments)
    if any(s.seat >= 0 for s in segments):
        put("seat", [s.seat for s in segments])
        put("moves", [int(s.moves) for s in segments])
        put("sized", [s.sized for s in segments])
        put("grown", [s.grown for s in segments])
    if batch.choice is not None:
        _fill_choice(lambda name: sections.of(block, name), batch, batch.choice)
    return sections.pages + end


def step_on(block: np.ndarray, shape: Shape, batch: Batch, page_size: int) -> None:
    """This batch behind itself: every row one token further. What has a draft moves, so that the device puts it where it
    belongs, and so does what moved before: nobody has told how far. The others are one row each, and go on with what was
    chosen there."""
    sections, rows, count = places(shape), len(batch.tokens), len(batch.segments)

    def get(name: str) -> np.ndarray:
        return sections.of(block, name)

    start, table = get("start")[:count], get("table")[:count]
    moving = (get("nodes")[:count] > 0) | (get("moves")[:count] > 0)
    for name, size in (("positions", rows), ("shared", rows), ("context", count)):
        get(name)[:size] += 1
    at = get("positions")[start]
    get("slots")[start] = block[sections.pages :][table + at // page_size] * page_size + at % page_size
    get("source")[start] = np.where(moving, -1, start)
    get("moves")[:count] = moving


def _fill_choice(get: Callable[[str], np.ndarray], batch: Batch, choice: Choice) -> None:
    """Temperature and noise of the asked rows; where each draft hangs, and under which of its rows each node."""
    if choice.draws:
        rows: Any = batch.rows if len(batch.rows) < len(batch.tokens) else slice(0, len(batch.rows))
        for name in ("temperature", "top_p", "min_p"):
            get(name).view(np.float32)[rows] = getattr(choice, name)
        get("top_k")[rows] = choice.top_k
        get("seeds").view(np.uint32)[:, rows] = choice.seeds.T
    nodes = np.array(choice.nodes)
    get("nodes")[: len(nodes)] = nodes
    get("root")[: len(nodes)] = get("stop")[: len(nodes)] - 1 - np.maximum(nodes, 0)
    if max(choice.nodes, default=0) < 1:
        return
    parent = get("parent")
    known = [(s, n) for s, n in zip(batch.segments, choice.nodes, strict=True) if n > 0 and s.grown < 0]
    for segment, n in known:
        if segment.parents is not None:
            parent[segment.stop - n : segment.stop] = segment.parents[-n:] - (len(segment.parents) - n - 1)
    if chains := [(s.stop - n, n) for s, n in known if s.parents is None]:
        first, size = np.array(chains).T
        below = np.arange(size.sum()) - np.repeat(size.cumsum() - size, size)
        parent[np.repeat(first, size) + below] = below


def _fill_trees(get: Callable[[str], np.ndarray], shape: Shape, segments: list[Segment]) -> None:
    """Masks, paths and depths of the segments that are trees."""
    words, above, depths = get("words").view(np.uint32), get("above"), get("depths")
    for b, segment in enumerate(segments):
        get("depth_at")[b] = b * shape.width
        if segment.parents is None:
            continue
        get("is_tree")[b] = 1
        get("shared")[segment.start : segment.stop] = segment.context
        if segment.grown >= 0:  # all but its root is for the device to say
            words[segment.start, 0] = 1
            continue
        masks, paths = trace(segment.parents)
        depths[b * shape.width : b * shape.width + len(paths)] = [len(p) - 1 for p in paths]
        first = len(paths) - segment.num_new
        for row, (mask, path) in enumerate(zip(masks[first:], paths[first:], strict=True), segment.start):
            above[row, : len(path)] = path
            for i in range(shape.words):
                words[row, i] = (mask >> (32 * i)) & 0xFFFFFFFF


def trace(parents: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """For each entry of a tree: its path as bits, and as a list from the top down."""
    masks: list[int] = []
    paths: list[list[int]] = []
    for i, p in enumerate(parents.tolist()):
        masks.append((masks[p] if p >= 0 else 0) | 1 << i)
        paths.append([*(paths[p] if p >= 0 else ()), i])
    return masks, paths
