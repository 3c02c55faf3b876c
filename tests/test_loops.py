"""Compiled loops against plain torch, the forward built of them against the lean one, and what came with them: 8 bits as two
products of 4 bits, and work on a thread that ends."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from headstart import models, tree
from headstart.core import Batch, Segment
from headstart.models import looped, quantized
from headstart.models.lean import LeanModel
from headstart.models.looped import LoopedModel, Reading
from headstart.models.quantized import Int4Product, Int8Product, TwiceInt4Product
from headstart.models.runner import TorchRunner
from headstart.threads import apart
from tests import harness, tiny
from tests.test_quantized import small_model

ROWS = (1, 2, 3, 4, 5, 9)
SHARES = (1, 2, 3, 5)  # query heads to a key head
DIMS = (8, 20, 64)  # 20 fills no vector register


@pytest.fixture(scope="module")
def loops() -> Any:
    pytest.importorskip("numba")
    loaded = looped.load_loops()
    assert loaded is not None, "numba is here, so loops must be too"
    return loaded


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def assert_near(ours: np.ndarray, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ norms, gates, rotation
@pytest.mark.parametrize("width", [1, 7, 20, 64, 577])
@pytest.mark.parametrize("rows", ROWS)
def test_norms_are_those_of_torch(loops, rows: int, width: int) -> None:
    x, y, gain = numbers(rows, width), numbers(rows, width, seed=1), numbers(width)
    first, second, summed = np.empty_like(x), np.empty_like(x), x.copy()
    loops.norm(x, gain, 0.1, first)
    loops.add_norm(summed, y, gain, 0.1, second)
    assert_near(first, F.rms_norm(torch.from_numpy(x), (width,), torch.from_numpy(gain), 0.1))
    assert np.array_equal(summed, x + y)
    assert_near(second, F.rms_norm(torch.from_numpy(x + y), (width,), torch.from_numpy(gain), 0.1))


@pytest.mark.parametrize("width", [1, 7, 20, 64, 577])
@pytest.mark.parametrize("rows", ROWS)
def test_gates_are_those_of_torch(loops, rows: int, width: int) -> None:
    both, out = 20 * numbers(rows, 2 * width), np.empty((rows, width), np.float32)
    loops.gate(both, out)
    first, second = torch.from_numpy(both).chunk(2, -1)
    assert_near(out, F.silu(first) * second)


def test_gates_of_extreme_inputs_are_finite(loops) -> None:
    x = np.array([[-1e30, -500, -88.5, -87, -1e-30, 0, 1e-30, 87, 88.5, 500, 1e30]], np.float32)
    out = np.empty_like(x)
    loops.gate(np.concatenate([x, np.ones_like(x)], 1), out)
    assert np.isfinite(out).all()
    moderate = np.abs(x) < 1e3  # beyond, what should be nothing is -1e30 · e^-88
    assert_near(out[moderate], F.silu(torch.from_numpy(x[moderate])))


def test_the_exponential_is_good_to_the_last_bits_of_a_float(loops) -> None:
    numba = pytest.importorskip("numba")
    own = loops._exp

    @numba.njit(fastmath=loops.FAST, error_model="numpy")
    def run(x, out):
        for i in range(len(x)):
            out[i] = own(x[i])

    x = np.concatenate([np.linspace(-87, 88, 1_000_003), np.linspace(-1, 1, 100_003)]).astype(np.float32)
    out = np.empty_like(x)
    run(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out / exact - 1).max() < 3e-7


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers turns heads: (T, H, D) by (T, D)."""
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]


@pytest.mark.parametrize("gains", [None, (2,)], ids=["plain", "normed"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_that_of_transformers(loops, dim: int, share: int, gains: tuple[int] | None) -> None:
    for rows in ROWS:
        heads, queries = numbers(rows, 2 * share + 4, dim), 2 * share
        cos, sin = numbers(rows, dim, seed=1), numbers(rows, dim, seed=2)  # the two halves differ: stricter than angles
        gain = np.empty((0, 1), np.float32) if gains is None else numbers(2, dim, seed=3)
        keys, values = numbers(30, 2, dim, seed=4), numbers(30, 2, dim, seed=5)
        slots = np.random.default_rng(rows).permutation(30)[:rows]
        want = torch.from_numpy(heads.copy())
        q, k, v = want[:, :queries], want[:, queries:-2], want[:, -2:]
        if gains is not None:
            q, k = (F.rms_norm(x, (dim,), torch.from_numpy(g), 0.1) for x, g in ((q, gain[0]), (k, gain[1])))
        q, k = (turned(x, torch.from_numpy(cos), torch.from_numpy(sin)) for x in (q, k))
        wanted_keys, wanted_values = torch.from_numpy(keys.copy()), torch.from_numpy(values.copy())
        wanted_keys[slots], wanted_values[slots] = k, v
        loops.rotate(heads, queries, gain, 0.1, cos, sin, keys, values, slots.astype(np.uint64))
        assert_near(heads[:, :queries], q)
        assert_near(keys, wanted_keys)
        assert np.array_equal(values, wanted_values.numpy())


@pytest.mark.parametrize("width", [20, 64, 577])
def test_small_operations_give_a_row_the_same_bits_in_every_company(loops, width: int) -> None:
    x, gain = numbers(9, 2 * width), numbers(2 * width)
    normed, gated = np.empty_like(x), np.empty((9, width), np.float32)
    loops.norm(x, gain, 1e-6, normed)
    loops.gate(x, gated)
    for t in range(9):
        alone, half = np.empty_like(x[:1]), np.empty_like(gated[:1])
        loops.norm(x[t : t + 1], gain, 1e-6, alone)
        loops.gate(x[t : t + 1], half)
        assert np.array_equal(alone[0], normed[t]) and np.array_equal(half[0], gated[t])


# ------------------------------------------------------------------ attention
@dataclass
class Heads:
    """Query heads of some rows, and a pool of keys and values."""

    heads: np.ndarray  # (T, queries + 2 key heads + 2 value heads, D)
    queries: int
    keys: np.ndarray
    values: np.ndarray

    @staticmethod
    def of(rows: int, share: int, dim: int, seed: int = 0) -> Heads:
        pools = [numbers(200, 2, dim, seed=seed + i) for i in (1, 2)]
        return Heads(3 * numbers(rows, 2 * share + 4, dim, seed=seed), 2 * share, *pools)

    def only(self, segments: Sequence[Segment]) -> Heads:
        """A pool where slots of nobody hold NaN: they must not be read."""
        others = np.setdiff1d(np.arange(200), np.concatenate([s.slots for s in segments]))
        self.keys[others] = self.values[others] = np.nan
        return self

    def row(self, t: int) -> Heads:
        return Heads(self.heads[t : t + 1], self.queries, self.keys, self.values)

    def attend(self, loops: Any, segments: Sequence[Segment], window: int | None = None) -> np.ndarray:
        """Through the loop, in rooms that are full of what somebody else left."""
        reading, share = Reading.of(segments, window, loops.LANES), self.queries // 2
        rows = -(-reading.most_rows * share // loops.ROWS) * loops.ROWS
        dim = self.keys.shape[2]
        block, scores = (np.full((rows, n), 1e30, np.float32) for n in (dim, reading.most_slots))
        out = np.empty((len(self.heads), self.queries * dim), np.float32)
        loops.attend(
            self.heads, self.queries, self.keys, self.values, reading.pieces, reading.slots, reading.visible, dim**-0.5,
            block, scores, out,
        )  # fmt: skip
        return out

    def by_torch(self, segments: Sequence[Segment], window: int | None = None) -> torch.Tensor:
        out = torch.empty(len(self.heads), self.queries, self.keys.shape[2])
        for s in segments:
            q = torch.from_numpy(self.heads[s.start : s.stop, : self.queries]).transpose(0, 1)
            k, v = (torch.from_numpy(x[s.slots]).transpose(0, 1) for x in (self.keys, self.values))
            k, v = (x.repeat_interleave(self.queries // 2, 0) for x in (k, v))
            out[s.start : s.stop] = F.scaled_dot_product_attention(q, k, v, attn_mask=sees(s, window)).transpose(0, 1)
        return out.view(len(self.heads), -1)


def sees(s: Segment, window: int | None) -> torch.Tensor:
    """(new, slots) bool, entry by entry: the context, then the way down the tree."""
    entries = len(s.slots) - s.context
    parents = range(-1, entries - 1) if s.parents is None else s.parents.tolist()
    mask = torch.zeros(entries, len(s.slots), dtype=torch.bool)
    for e in range(entries):
        way = [*range(s.context), *(s.context + node for node in tree.path(parents, e))]
        mask[e, way if window is None else way[-window:]] = True
    return mask[entries - s.num_new :]


def random_segments(rng: np.random.Generator, count: int) -> list[Segment]:
    """Requests that share no slot: chains and trees, some with entries of an earlier forward, some without context."""
    free, out, start = rng.permutation(200), [], 0
    for i in range(count):
        new, older, context = (int(rng.integers(*r)) for r in ((1, 10), (0, 4), (0, 30)))
        is_chain = i % 3 == 0
        entries = new + (0 if is_chain else older)
        parents = None if is_chain else np.array([int(rng.integers(-1, e)) if e else -1 for e in range(entries)])
        slots, free = free[: context + entries], free[context + entries :]
        out.append(Segment(start, start + new, context, slots, parents))
        start += new
    return out


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dim", DIMS)
def test_attention_is_that_of_torch(loops, dim: int, share: int, window: int | None) -> None:
    rng = np.random.default_rng([dim, share])
    for count in (1, 1, 2, 3, 4):
        segments = random_segments(rng, count)
        case = Heads.of(segments[-1].stop, share, dim).only(segments)
        assert_near(case.attend(loops, segments, window), case.by_torch(segments, window))


@pytest.mark.parametrize("rows", range(1, 10))
def test_attention_of_chains_is_that_of_torch(loops, rows: int) -> None:
    for share in SHARES:
        for context in (0, 1, 14, 15, 16, 17, 47, 150):
            slots = np.random.default_rng(context).permutation(200)[: context + rows]
            segments = [Segment(0, rows, context, slots)]
            case = Heads.of(rows, share, 20).only(segments)
            assert_near(case.attend(loops, segments), case.by_torch(segments))


def test_large_scores_neither_overflow_nor_lose_the_largest(loops) -> None:
    case = Heads.of(3, 2, 20)
    case.heads *= 100
    segments = [Segment(0, 3, 40, np.arange(43))]
    assert_near(case.attend(loops, segments), case.by_torch(segments), 1e-4)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dim", DIMS)
def test_a_row_has_the_same_bits_alone_and_in_a_chain(loops, dim: int, share: int) -> None:
    """What plain decoding computes for a token is what a chain of drafts computes for it."""
    slots = np.random.default_rng(share).permutation(200)
    for context in range(1, 71):
        case = Heads.of(9, share, dim, seed=context)
        alone = [case.row(t).attend(loops, [Segment(0, 1, context + t, slots[: context + t + 1])])[0] for t in range(9)]
        for rows in (2, 3, 5, 9):
            few = Heads(case.heads[:rows], case.queries, case.keys, case.values)
            together = few.attend(loops, [Segment(0, rows, context, slots[: context + rows])])
            for t in range(rows):
                assert np.array_equal(together[t], alone[t]), f"row {t} of {rows} behind {context}"


def test_a_row_has_the_same_bits_alone_and_in_a_batch(loops) -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        segments = random_segments(rng, 5)
        case = Heads.of(segments[-1].stop, 3, 20)
        together = case.attend(loops, segments, 6)
        for s in segments:
            own = Heads(case.heads[s.start : s.stop], case.queries, case.keys, case.values)
            alone = own.attend(loops, [Segment(0, s.num_new, s.context, s.slots, s.parents)], 6)
            assert np.array_equal(alone, together[s.start : s.stop])


# ------------------------------------------------------------------ the forward
FAMILY = ("llama", "qwen2", "qwen3", "mistral", "mistral+window")


@dataclass
class Ask:
    """New rows of one request: a chain behind a context, or the last entries of a tree."""

    context: int
    new: int = 1
    parents: list[int] | None = None

    @property
    def older(self) -> int:
        """Entries of the tree that an earlier forward computed."""
        return 0 if self.parents is None else len(self.parents) - self.new


ASKS = {
    "one row": [Ask(12)],
    "a text's start": [Ask(0, 5)],
    "a chain": [Ask(14, 9)],
    "a tree": [Ask(9, 6, [-1, -1, 0, 0, 2, 1])],
    "the rest of a tree": [Ask(7, 3, [-1, 0, -1, 1, 1, 2])],
    "a batch": [Ask(3), Ask(20, 4), Ask(11, 5, [-1, 0, 0, -1, 3]), Ask(0, 3), Ask(17, 2, [-1, -1, 0])],
    "behind many rows": [Ask(60), Ask(30, 3)],  # more rows than loops take
}


def pack(parts: list[tuple[Ask, np.ndarray, int, int]], taps: tuple[int, ...], first: int, last: bool) -> Batch:
    """One forward of the entries [begin, end) behind each start; `last` asks for each segment's last row only."""
    segments, tokens, positions, start = [], [], [], 0
    for ask, slots, begin, end in parts:
        is_tree = ask.parents is not None and begin >= ask.context
        context = ask.context if is_tree else begin
        parents = np.array(ask.parents[: end - context]) if is_tree and ask.parents else None
        depth = tree.depths(ask.parents or []) if is_tree else range(1, end - begin + 1)
        own = range(begin - context, end - context)
        segments.append(Segment(start, start + end - begin, context, slots[:end], parents))
        tokens += [5 + int(s) % 200 for s in slots[begin:end]]
        positions += [first + context + depth[e] - 1 for e in own]
        start += end - begin
    rows = np.array([s.stop - 1 for s in segments]) if last else np.arange(start)
    return Batch(np.array(tokens), np.array(positions), segments, rows, taps)


def forwards(asks: list[Ask], taps: tuple[int, ...] = (), first: int = 0) -> list[Batch]:
    """Contexts, then what was there of trees, then what is asked. Slots lie scattered; texts begin at position `first`."""
    free, known = np.random.default_rng(7).permutation(200), []
    for ask in asks:
        size = ask.context + ask.older + ask.new
        known.append((ask, free[:size]))
        free = free[size:]
    stages = [
        [(a, s, 0, a.context) for a, s in known if a.context],
        [(a, s, a.context, a.context + a.older) for a, s in known if a.older],
        [(a, s, a.context + a.older, len(s)) for a, s in known],
    ]
    return [pack(stage, taps, first, last=i == 0) for i, stage in enumerate(stages) if stage]


def lively(model: Any) -> Any:
    """With biases that are not zero and gains that are not one."""
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
    return model.cpu()


def pair(model: Any) -> tuple[TorchRunner, TorchRunner]:
    """The same model with loops and without."""
    ours = TorchRunner(copy.deepcopy(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looped, "available", lambda: False)
        theirs = TorchRunner(copy.deepcopy(model))
    assert type(ours.lean) is LoopedModel and type(theirs.lean) is LeanModel
    for runner in (ours, theirs):
        runner.allocate(200)
    return ours, theirs


def family(name: str) -> tuple[TorchRunner, TorchRunner]:
    return pair(lively(tiny.model(name)))


def assert_alike(ours: TorchRunner, theirs: TorchRunner, batches: list[Batch]) -> None:
    for batch in batches:
        a, b = ours.forward(batch), theirs.forward(batch)
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)
        assert tuple(a.hidden) == batch.hidden_layers == tuple(b.hidden)
        for layer in batch.hidden_layers:
            torch.testing.assert_close(a.hidden[layer], b.hidden[layer], rtol=1e-4, atol=1e-4)
    for mine, other in zip([*ours.keys, *ours.values], [*theirs.keys, *theirs.values], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def count_attention(runner: TorchRunner) -> list[int]:
    """The rows of each call of the loop, from now on."""
    assert isinstance(runner.lean, LoopedModel)
    calls: list[int] = []
    plain = runner.lean.reads.loops

    def attend(heads, *rest):
        calls.append(len(heads))
        plain.attend(heads, *rest)

    runner.lean.reads.loops = SimpleNamespace(**vars(plain) | {"attend": attend})
    return calls


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("what", ASKS)
@pytest.mark.parametrize("name", FAMILY)
def test_the_forward_is_the_lean_one(name: str, what: str) -> None:
    ours, theirs = family(name)
    calls, batches = count_attention(ours), forwards(ASKS[what])
    assert_alike(ours, theirs, batches)
    assert calls[-3:] == [len(batches[-1].tokens)] * 3, "the loops did not run: this test would prove nothing"


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("taps", [(0,), (1,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tapped_states_are_those_of_the_lean_forward(name: str, taps: tuple[int, ...]) -> None:
    assert_alike(*family(name), forwards(ASKS["a batch"], taps))


@pytest.mark.usefixtures("loops")
def test_one_model_runs_forwards_of_all_sizes_in_turn() -> None:
    """Rooms grow and are used again."""
    ours, theirs = family("qwen3")
    for what in (*ASKS, *reversed(ASKS)):
        assert_alike(ours, theirs, forwards(ASKS[what]))


@pytest.mark.usefixtures("loops")
def test_a_forward_leaves_the_results_of_the_last_one_alone() -> None:
    ours, _ = family("llama")
    batch, other = (forwards([Ask(0, 5)], (0, 1, 2, 3), first=f)[0] for f in (0, 40))
    out = ours.forward(batch)
    kept = copy.deepcopy(out)
    assert not torch.equal(ours.forward(other).logits, kept.logits)
    assert torch.equal(out.logits, kept.logits)
    assert all(torch.equal(out.hidden[i], kept.hidden[i]) for i in range(4))


@pytest.mark.usefixtures("loops")
def test_a_new_pool_is_noticed() -> None:
    ours, theirs = family("llama")
    assert_alike(ours, theirs, forwards([Ask(12)]))
    for runner in (ours, theirs):
        runner.allocate(250)
    assert_alike(ours, theirs, forwards([Ask(6, 3)]))


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64},
}


def made(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **copy.deepcopy(tiny.CONFIGS[name]) | options)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("kind", ROPES)
def test_texts_may_be_longer_than_the_table_of_angles(kind: str) -> None:
    rope = ROPES[kind] | {"rope_type": kind, "rope_theta": 10_000.0}
    ours, theirs = pair(made("llama", rope_parameters=rope))
    for first in (0, 600, 1017, 1023, 1024, 5000, 3):
        assert_alike(ours, theirs, forwards([Ask(4, 4)], first=first))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_layers_may_have_windows_of_their_own(name: str) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    ours, theirs = pair(made(name, use_sliding_window=True, sliding_window=6, layer_types=layers))
    assert [b.window for b in ours.lean.blocks] == [6, None, 6]
    assert_alike(ours, theirs, forwards(ASKS["a batch"]))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(("asks", "most"), [([Ask(0, 60)], None), ([Ask(30, 5), Ask(2)], 100)])
@pytest.mark.parametrize("name", FAMILY)
def test_many_scores_take_torchs_attention(name: str, asks: list[Ask], most: int | None, monkeypatch) -> None:
    ours, theirs = family(name)
    if most is not None:
        monkeypatch.setattr(looped, "MOST_SCORES", most)
    batch, calls = forwards(asks)[-1], count_attention(ours)
    assert max(s.num_new * len(s.slots) for s in batch.segments) > looped.MOST_SCORES
    assert_alike(ours, theirs, [batch])
    assert not calls


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("rows", [looped.MOST_ROWS, looped.MOST_ROWS + 1])
def test_many_rows_take_the_lean_forward(rows: int) -> None:
    ours, theirs = family("llama")
    calls, batch = count_attention(ours), forwards([Ask(0, rows - 40), Ask(0, 20), Ask(0, 20)])[0]
    assert_alike(ours, theirs, [batch])
    assert calls == ([rows] * 3 if rows <= looped.MOST_ROWS else [])


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("kind", quantized.FORMATS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_chain_has_the_same_bits_as_plain_decoding_of_a_quantised_model(kind: str, architecture: str) -> None:
    runner = TorchRunner(lively(small_model(architecture)), quantize=kind)
    assert type(runner.lean) is LoopedModel
    runner.allocate(200)
    for context in (1, 12, 30, 44):
        before, chain = forwards([Ask(context, 5)])
        runner.forward(before)
        together = runner.forward(chain).logits
        slots = chain.segments[0].slots
        for t in range(5):
            one = [Segment(0, 1, context + t, slots[: context + t + 1])]
            alone = runner.forward(Batch(chain.tokens[t : t + 1], chain.positions[t : t + 1], one, np.zeros(1, int)))
            assert torch.equal(alone.logits[0], together[t]), f"row {t} behind {context}"


# ------------------------------------------------------------------ what a looped model holds
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gains_are_held_once(name: str) -> None:
    ours, _ = family(name)
    lean = ours.lean
    assert isinstance(lean, LoopedModel)
    for own, block in zip(lean._layers, lean.blocks, strict=True):
        assert own.norm_in.ctypes.data == block.norm_in.data_ptr()
        assert own.norm_mlp.ctypes.data == block.norm_mlp.data_ptr()
    assert lean._final.ctypes.data == lean.norm.data_ptr()


@pytest.mark.usefixtures("loops")
def test_a_released_pool_is_let_go() -> None:
    ours, theirs = family("llama")
    assert_alike(ours, theirs, forwards([Ask(3)]))
    seen = weakref.ref(ours.keys[0])
    ours.release()
    assert seen() is None


# ------------------------------------------------------------------ without numba
def assert_works(runner: TorchRunner) -> None:
    assert type(runner.lean) is LeanModel
    prompts, stock = tiny.prompts(3), tiny.model("llama").cpu()
    outs = harness.run(harness.engine(runner, {"method": "suffix"}), [harness.request(p) for p in prompts])
    for prompt, out in zip(prompts, outs, strict=True):
        harness.assert_same(stock, prompt, out, harness.generate(stock, prompt, 24))


def test_without_loops_the_lean_forward_runs(monkeypatch) -> None:
    monkeypatch.setattr(looped, "available", lambda: False)
    assert_works(TorchRunner(tiny.model("llama").cpu()))


@pytest.fixture
def _forgotten(monkeypatch):
    """As if nobody had asked for the loops yet."""
    looped.load_loops.cache_clear()
    monkeypatch.delitem(sys.modules, "headstart.models.loops", raising=False)
    monkeypatch.delattr(models, "loops", raising=False)
    yield
    looped.load_loops.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_without_numba_the_lean_forward_runs_and_one_line_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for _ in range(2):
        assert_works(TorchRunner(tiny.model("llama").cpu()))
    assert capsys.readouterr().err.count("headstart[cpu]") == 1


@pytest.mark.usefixtures("_forgotten")
def test_where_loops_cannot_be_compiled_the_lean_forward_runs_and_one_line_says_why(monkeypatch, capsys) -> None:
    pytest.importorskip("numba")
    monkeypatch.setitem(sys.modules, "headstart.models.loops", None)
    for _ in range(2):
        assert_works(TorchRunner(tiny.model("llama").cpu()))
    assert capsys.readouterr().err.count("numba cannot compile loops here") == 1


def test_other_models_and_other_numbers_take_no_loops() -> None:
    assert type(TorchRunner(tiny.model("llama").cpu().bfloat16()).lean) is LeanModel
    assert TorchRunner(tiny.model("gpt2").cpu()).lean is None


# ------------------------------------------------------------------ a thread that ends
def test_work_apart_returns_its_value_from_a_thread_that_has_ended() -> None:
    threads: list[threading.Thread] = []

    def work() -> str:
        threads.append(threading.current_thread())
        return "done"

    assert apart(work) == "done"
    assert apart(lambda: None) is None
    assert threads[0] is not threading.current_thread() and not threads[0].is_alive()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_work_apart_raises_is_raised_here(kind: type[BaseException]) -> None:
    error, threads = kind("on purpose"), []

    def work() -> None:
        threads.append(threading.current_thread())
        raise error

    with pytest.raises(kind) as caught:
        apart(work)
    assert caught.value is error
    assert not threads[0].is_alive()


# ------------------------------------------------------------------ 8 bits as 4 and 4
def loss(make: Any, bias: torch.Tensor | None = None) -> float:
    torch.manual_seed(1)
    weight, x = torch.randn(96, 256), torch.randn(5, 256)
    exact = F.linear(x, weight, bias)
    return float((make(weight, bias)(x) - exact).norm() / exact.norm())


def test_twice_four_bits_are_about_as_good_as_eight() -> None:
    assert loss(Int4Product) > 0.05
    assert 0 < loss(Int8Product) < 0.02
    assert 0 < loss(TwiceInt4Product) < 0.02


def test_the_bias_of_twice_four_bits_counts_once() -> None:
    torch.manual_seed(2)
    assert loss(TwiceInt4Product, 50 * torch.randn(96)) < 0.01


def test_twice_four_bits_give_a_row_the_same_bits_in_every_company() -> None:
    torch.manual_seed(3)
    product, x = TwiceInt4Product(torch.randn(160, 96), torch.randn(160)), torch.randn(17, 96)
    alone = torch.cat([product(x[i : i + 1]) for i in range(17)])
    for count in (2, 3, 4, 5, 8, 9, 16, 17):
        assert torch.equal(product(x[:count]), alone[:count])


def test_twice_four_bits_of_nothing_are_nothing() -> None:
    assert not TwiceInt4Product(torch.zeros(32, 32))(torch.randn(2, 32)).any()


@pytest.mark.parametrize(("times", "kind"), [([1.0, 2.0], Int8Product), ([2.0, 1.0], TwiceInt4Product)])
def test_eight_bits_are_the_faster_product(times: list[float], kind: type, monkeypatch) -> None:
    monkeypatch.setattr(quantized, "race", lambda products, x: times)
    lean = TorchRunner(small_model(), quantize="int8").lean
    assert lean is not None and all(type(p) is kind for p in lean.products)
    small = TorchRunner(small_model(), quantize="int4").lean
    assert small is not None and type(small.head) is kind and type(small.blocks[0].qkv) is Int4Product


def test_rows_that_four_bits_cannot_take_get_plain_eight(monkeypatch) -> None:
    monkeypatch.setattr(quantized, "race", lambda products, x: [2.0, 1.0])
    lean = TorchRunner(small_model(hidden=48), quantize="int8").lean
    assert lean is not None and all(type(p) is Int8Product for p in lean.products)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_model_of_twice_four_bits_says_nearly_the_same_in_less_memory(architecture: str, monkeypatch) -> None:
    monkeypatch.setattr(quantized, "race", lambda products, x: [2.0, 1.0])
    model = lively(small_model(architecture))
    plain, small = TorchRunner(copy.deepcopy(model)), TorchRunner(model, quantize="int8")
    batch = forwards([Ask(0, 50)])[0]
    for runner in (plain, small):
        runner.allocate(200)
    exact, rounded = plain.forward(batch).logits, small.forward(batch).logits
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.03
    if (
        Int4Product(torch.zeros(64, 64)).weight.nbytes < 0.3 * 4 * 64 * 64
    ):  # where torch keeps them so; nobody takes them elsewhere
        assert small.weight_bytes < 0.6 * plain.weight_bytes
