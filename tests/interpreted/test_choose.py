"""The end of a step: each row's token, the walk down the draft, and what moves up, as the host would do it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstart import sampling, verify
from headstart.core import Batch, Choice, Request, SamplingParams, Segment, Tree
from headstart.kv import KVPool
from headstart.models import packing
from headstart.models.kernels import choose as kernels
from headstart.models.kernels.choose import Asks, Desk, choose, move, walk
from headstart.models.packing import Shape
from tests.interpreted.support import CPU, PAGE, ints, pack, random_parents


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ------------------------------------------------------------------ tokens
def requests(temperatures: list[float]) -> list[Request]:
    """With seeds large and small, and texts of different lengths."""
    seeds = [2**63 + 7 * i if i % 2 else i for i in range(len(temperatures))]
    return [
        Request([5] * (3 + i), SamplingParams(temperature=t), seed)
        for i, (t, seed) in enumerate(zip(temperatures, seeds, strict=True))
    ]


def asks_of(rows: list[Request]) -> Asks:
    choice = Choice.of(len(rows), 0)
    for i, r in enumerate(rows):
        sampling.ask(choice, [(r, i, 1)])
    seeds = choice.seeds.T.astype(np.uint32).view(np.int32).copy()
    positions = np.array([len(r.tokens) - 1 for r in rows], np.int32)
    numbers = (choice.temperature, seeds, positions, choice.top_k.astype(np.int32), choice.top_p, choice.min_p)
    return Asks(*(torch.from_numpy(n) for n in numbers))


def told(logits: torch.Tensor, rows: list[Request]) -> list[int]:
    return sampling.choose(logits, [sampling.Row(r) for r in rows])


@pytest.mark.parametrize("vocab", [1, 50, 64, 211, 257])
def test_tokens_are_those_of_the_host(vocab: int, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64)
    rows = requests([0.0, 1.0, 0.0, 0.7, 5.0, 1.0])
    logits, chosen, desk = 2 * torch.randn(6, vocab), ints([-1] * 6), Desk(6, vocab, CPU)
    choose(logits, asks_of(rows), chosen, desk)
    assert chosen.tolist() == told(logits, rows) and not desk.arrived.any()


def test_a_real_block_of_tokens() -> None:
    rows = requests([0.0, 1.0])
    logits, chosen = torch.randn(2, 5000), ints([-1, -1])
    choose(logits, asks_of(rows), chosen, Desk(2, 5000, CPU))
    assert chosen.tolist() == told(logits, rows)


def test_of_equal_logits_the_lowest_token_wins(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 32)
    logits = torch.full((4, 100), -1.0)
    for row, tokens in enumerate(([7, 40, 99], [63, 64], [96, 99], [])):
        logits[row, tokens] = 3.0
    for dtype in (torch.float32, torch.bfloat16):
        chosen = ints([-1] * 4)
        choose(logits.to(dtype), asks_of(requests([0.0] * 4)), chosen, Desk(4, 100, CPU))
        assert chosen.tolist() == [7, 63, 96, 0]


def test_a_line_chooses_for_the_row_that_it_belongs_to(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64)
    rows = requests([0.0, 1.0, 2.0, 0.0, 0.5])
    logits, chosen = torch.randn(3, 130), ints([-1] * 5)
    choose(logits, asks_of(rows), chosen, Desk(5, 130, CPU), ints([4, 1, 3]))
    four, one, three = told(logits, [rows[4], rows[1], rows[3]])
    assert chosen.tolist() == [-1, one, -1, three, four]


# ------------------------------------------------------------------ walk and move
class Drafts:
    """A batch of drafts behind pieces of known tokens, one for each tree; None stands for one that chooses nothing."""

    def __init__(self, trees: list[Tree | None], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.trees = trees
        segments, tokens, positions = [], [], []
        pages = rng.permutation(len(trees) * 12)
        for i, tree in enumerate(trees):
            context, piece, size = int(rng.integers(0, 9)), int(rng.integers(1, 4)), len(tree or ())
            entries, start = piece + size, len(tokens)
            slots = (pages[12 * i : 12 * i + 12, None] * PAGE + np.arange(PAGE)).reshape(-1)[: context + entries]
            hanging = [p + piece for p in (tree.parents if tree else [])]
            parents = np.array([*range(-1, piece - 1), *hanging], np.int64)
            tokens += [1] * piece + (tree.tokens if tree else [])  # a known token may look like a draft's
            positions += [0] * entries
            segments.append(Segment(start, start + entries, context, slots, parents))
        choice = Choice.of(len(tokens), len(trees))
        choice.nodes[:] = [-1 if t is None else len(t) for t in trees]
        self.batch = Batch(np.array(tokens), np.array(positions), segments, np.arange(len(tokens)), choice=choice)
        self.shape = Shape.of(self.batch).padded()
        self.block, self.layout = pack(self.batch, self.shape)
        self.chosen = ints(rng.integers(0, 3, self.shape.rows).tolist())
        self.verdict = torch.full((self.shape.segments, 2 + self.shape.new), -7, dtype=torch.int32)

    def get(self, name: str) -> torch.Tensor:
        return packing.places(self.shape).on_device(self.block, name)

    def walk(self) -> None:
        nodes = self.get("nodes")
        walk(self.chosen, self.get("tokens"), self.get("parent"), self.get("root"), nodes, self.verdict, self.shape.new)

    def wanted(self) -> list[verify.Verdict | None]:
        out = []
        for tree, segment in zip(self.trees, self.batch.segments, strict=True):
            root = segment.stop - 1 - len(tree or ())
            out.append(None if tree is None else verify.walk(tree, self.chosen[root : segment.stop].tolist()))
        return out


def random_drafts(count: int, seed: int) -> list[Tree | None]:
    """Few different tokens, so that siblings are often duplicates and paths are often right; some drafts are empty."""
    rng = np.random.default_rng(seed)
    out: list[Tree | None] = [None, Tree(), Tree.chain([1, 2, 1]), Tree([2, 2, 2], [-1, -1, -1])]
    for _ in range(count):
        size = int(rng.integers(0, 12))
        out.append(Tree(rng.integers(0, 3, size).tolist(), random_parents(rng, size)))
    return [out[i] for i in rng.permutation(len(out))]


@pytest.mark.parametrize("seed", range(3))
def test_the_walk_is_that_of_the_host_and_leaves_the_others_alone(seed: int) -> None:
    drafts = Drafts(random_drafts(40, seed), seed)
    drafts.walk()
    deepest = 0
    for row, want in zip(drafts.verdict.tolist(), drafts.wanted(), strict=False):
        if want is None:
            assert set(row) == {-7}
        else:
            n = len(want.accepted)
            assert row[:2] == [n, want.bonus] and row[2 : 2 + n] == want.accepted and set(row[2 + n :]) <= {-7}
            deepest = max(deepest, n)
    assert deepest >= 3
    assert (drafts.verdict[len(drafts.trees) :] == -7).all()  # segments that pad the shape


@pytest.mark.parametrize("seed", range(2))
def test_accepted_keys_and_values_move_up_as_the_host_would_move_them(seed: int) -> None:
    drafts = Drafts(random_drafts(16, seed), seed)
    drafts.walk()
    pool = torch.randn(2, len(drafts.trees) * 12 * PAGE, 2, 3)
    want, moved = pool.clone(), 0
    for segment, tree, verdict in zip(drafts.batch.segments, drafts.trees, drafts.wanted(), strict=True):
        if verdict is not None:
            source, target = KVPool.moves(segment.slots, len(segment.slots) - len(tree), verdict.accepted)
            want[:, target] = pool[:, source]
            moved += len(source)
    move(pool, drafts.verdict, drafts.layout, drafts.get("nodes"))
    assert torch.equal(pool, want) and moved > 5
