"""llama.cpp as a runner, over a fake of its memory: the same text as on torch, and every cell accounted for."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from headstart import LLM, ConfigError, ModelError, RequestFailed, SamplingParams
from headstart import engine as engine_module
from headstart.core import Batch, Segment, Tree
from headstart.engine import Engine, StepFailed, _parents
from headstart.kv import KVPool
from headstart.models import gguf
from headstart.models import load as loading
from headstart.models.llamacpp import native
from headstart.models.llamacpp import runner as llama_runner
from headstart.models.llamacpp import tokenizer as llama_tokenizer
from headstart.models.llamacpp.native import LlamaOptions, available
from headstart.models.llamacpp.runner import LlamaRunner
from headstart.models.llamacpp.sequences import Lost, Sequences
from headstart.models.load import Loaded
from headstart.models.runners import make_runner
from headstart.models.tokenizer import Tokenizer
from headstart.tree import depths, is_chain, num_paths, path
from tests import llama_fake, tiny
from tests.harness import engine, request, run
from tests.llama_fake import Blank, FakeContext, FakeFile
from tests.test_architectures import SPECULATIVE

SAMPLED = dict(temperature=1.0, max_tokens=24)
COUNT = 9
WAYS = ("none", "ngram", "suffix", "chain", "tree")


@pytest.fixture(autouse=True)
def contexts(monkeypatch):
    """Every context is a fake; here they are listed."""
    monkeypatch.setattr(llama_runner, "LlamaContext", FakeContext)
    llama_fake.made.clear()
    return llama_fake.made


# ------------------------------------------------------------------ sequences
class SequencesMachine(RuleBasedStateMachine):
    """Requests over shared slots, moved as the engine moves them. A slot is right where it stands behind the same tokens."""

    opened = Bundle("opened")

    @initialize(slots=st.integers(12, 60))
    def start(self, slots: int) -> None:
        self.runner = LlamaRunner(Blank())
        self.memory = FakeContext(self.runner.file, slots, 64, 128, 128)
        self.runner.context, self.runner.page_size = self.memory, 1  # type: ignore[assignment]
        self.runner.seqs = Sequences(self.memory, 128)
        self.free, self.users = list(range(slots)), [0] * slots
        self.slots: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.count = 0

    # -------------------------------------------------------------- rules
    @rule(target=opened)
    def open(self) -> str:
        return self.made([], [])

    @rule(target=opened, a=opened, b=opened, cut=st.integers(0, 30), end=st.integers(0, 30))
    def open_alike(self, a: str, b: str, cut: int, end: int) -> Any:
        """Another reader of what two requests have alike: the beginning from one, the rest from the other."""
        if a not in self.texts or b not in self.texts:
            return multiple()
        same = 0
        while same < min(len(self.texts[a]), len(self.texts[b])) and self.texts[a][same] == self.texts[b][same]:
            same += 1
        end = min(end, same)
        cut = min(cut, end)
        return self.made(self.slots[a][:cut] + self.slots[b][cut:end], self.texts[a][:end])

    @rule(
        target=opened,
        names=st.lists(opened, min_size=1, max_size=3, unique=True),
        joins=st.booleans(),
        seed=st.integers(0, 10**6),
        fails=st.sampled_from(["", "", "", "", "", "before", "after"]),
    )
    def step(self, names: list[str], joins: bool, seed: int, fails: str) -> Any:
        """One forward: known tokens of several requests, trees behind them, and somebody who shares what is on its way."""
        rng, parts = random.Random(seed), []
        for name in names:
            if name in self.texts and (part := self.part(name, self.slots[name], self.texts[name], rng)):
                parts.append(part)
        late = None
        if joins and parts:
            first = parts[0]
            base = len(first.text)
            known = rng.randint(base, base + first.piece)
            late = self.made(first.slots[:known], [*first.text, *first.tokens[: known - base]])
            if part := self.part(late, self.slots[late], self.texts[late], rng):
                parts.append(part)
        if parts:
            self.memory.breaks = fails
            self.forward(parts, fails)
        if fails and late in self.texts:
            self.close(late, self.slots[late])
        return multiple() if late is None or late not in self.texts else late

    def part(self, name: str, slots: list[int], text: list[int], rng: random.Random) -> Any:
        piece, nodes = rng.randint(1, 4), rng.choice([0, 0, 1, 3, 6])
        if piece + nodes > len(self.free):
            return None
        draft = Tree([rng.randint(0, 1) for _ in range(nodes)], [rng.randint(-1, i - 1) for i in range(nodes)])
        fresh = [self.take(rng) for _ in range(piece + nodes)]
        tokens = [rng.randint(0, 1) for _ in range(piece)] + draft.tokens
        accepted = path(draft.parents, rng.randint(-1, nodes - 1))
        return SimpleNamespace(
            name=name, text=list(text), slots=slots + fresh, piece=piece, draft=draft, tokens=tokens, accepted=accepted
        )

    def forward(self, parts: list[Any], fails: str) -> None:
        tokens, positions, segments, wanted = [], [], [], []
        for p in parts:
            base, start = len(p.text), len(tokens)
            tokens += p.tokens
            positions += range(base, base + p.piece)
            positions += [base + p.piece + d - 1 for d in depths(p.draft.parents)]
            segments.append(Segment(start, len(tokens), base, np.array(p.slots, np.int64), _parents(p.piece, p.draft)))
            known = [*p.text, *p.tokens[: p.piece]]
            wanted += [known[: base + i + 1] for i in range(p.piece)]
            wanted += [[*known, *(p.draft.tokens[n] for n in path(p.draft.parents, i))] for i in range(len(p.draft))]
        batch = Batch(np.array(tokens), np.array(positions), segments, np.arange(len(tokens)))
        if fails:
            with pytest.raises(RuntimeError, match="on purpose"):
                self.runner.forward(batch)
            for name in {p.name for p in parts}:
                self.close(name, next(p.slots for p in parts if p.name == name))
            return
        self.runner.forward(batch)
        assert self.memory.read == wanted
        for p in parts:
            self.accept(p)

    def accept(self, p: Any) -> None:
        base = len(p.text) + p.piece
        slots = np.array(p.slots)
        self.runner.move(*KVPool.moves(slots, base, p.accepted))
        size = base + len(p.accepted)
        self.runner.keep(slots, size)
        for slot in p.slots[size:]:
            self.drop(slot)
        self.slots[p.name] = p.slots[:size]
        self.texts[p.name] = [*p.text, *p.tokens[: p.piece], *(p.draft.tokens[n] for n in p.accepted)]

    @rule(target=opened, name=opened, width=st.integers(1, 3), seed=st.integers(0, 10**6))
    def draft(self, name: str, width: int, seed: int) -> Any:
        """A tree that grows by a level in each forward, as a draft model's does; then a path of it stays."""
        rng = random.Random(seed)
        if not self.texts.get(name) or len(self.free) < 4 * width:
            return multiple()
        text, base, slots = self.texts[name], len(self.texts[name]), list(self.slots[name])
        grown = Tree()
        for level in range(rng.randint(1, 4)):
            above = [-1] if not level else [i for i, d in enumerate(depths(grown.parents)) if d == level]
            fresh = sorted(rng.choice(above) for _ in range(width))
            grown.tokens += (new := [rng.randint(0, 1) for _ in fresh])
            grown.parents += fresh
            slots += [self.take(rng) for _ in fresh]
            segment = Segment(0, width, base, np.array(slots, np.int64), np.array(grown.parents))
            rows = np.arange(width)
            self.runner.forward(Batch(np.array(new), np.full(width, base + level), [segment], rows))
            nodes = range(len(grown) - width, len(grown))
            assert self.memory.read == [[*text, *(grown.tokens[n] for n in path(grown.parents, i))] for i in nodes]
        accepted = path(grown.parents, rng.randint(-1, len(grown) - 1))
        self.accept(SimpleNamespace(
            name=name, text=text, slots=slots, piece=0, draft=grown, tokens=grown.tokens, accepted=accepted
        ))  # fmt: skip
        return multiple()

    @rule(name=consumes(opened))
    def leave(self, name: str) -> None:
        if name in self.texts:
            self.close(name, self.slots[name])

    # -------------------------------------------------------------- slots
    def made(self, slots: list[int], text: list[int]) -> str:
        self.count += 1
        name = f"r{self.count}"
        self.slots[name], self.texts[name] = list(slots), list(text)
        for slot in slots:
            self.users[slot] += 1
        return name

    def take(self, rng: random.Random) -> int:
        slot = self.free.pop(rng.randrange(len(self.free)))
        self.users[slot] = 1
        return slot

    def drop(self, slot: int) -> None:
        self.users[slot] -= 1
        if not self.users[slot]:
            self.runner.freed(slot)
            self.free.append(slot)

    def close(self, name: str, slots: list[int]) -> None:
        for slot in reversed(slots):
            self.drop(slot)
        del self.texts[name], self.slots[name]

    # -------------------------------------------------------------- what holds at any time
    @invariant()
    def slots_in_use_and_cells_are_the_same(self) -> None:
        if hasattr(self, "runner"):
            llama_fake.check(self.runner)
            used = {slot for slot, users in enumerate(self.users) if users}
            assert set(self.runner.seqs._of) == used and len(self.memory.cells) == len(used)

    def teardown(self) -> None:
        for name in list(getattr(self, "texts", {})):
            self.close(name, self.slots[name])
        if hasattr(self, "runner"):
            assert not self.memory.cells
            assert all(held.size == 0 for held in self.runner.seqs.held.values())


SequencesMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
TestSequences = SequencesMachine.TestCase


def held(memory: FakeContext, seqs: Sequences, slots: list[int], tokens: list[int]) -> None:
    """Compute these tokens into these slots, behind nothing."""
    seq, rows = seqs.open(np.array([], np.int64)), []
    for slot in slots:
        rows.append([seq])
        seqs.write(rows[-1], slot)
    memory.decode(np.array(tokens), np.arange(len(slots)), rows, np.array([], np.int64))
    seqs.end()


def test_a_slot_that_goes_takes_nothing_with_it_that_others_read() -> None:
    """Slot 1 was a copy of somebody else's token: slots 2 and 3 behind it can still be read, behind slot 8."""
    memory = FakeContext(Blank(9), 20, 8, 8, 8)
    seqs = Sequences(memory, 8)
    held(memory, seqs, [0, 1, 2, 3], [5, 6, 7, 8])
    held(memory, seqs, [7, 8], [5, 6])
    seqs.forget([0, 1])
    assert [c.token for c in memory.held(seqs.open(np.array([7, 8, 2, 3])))] == [5, 6, 7, 8]
    with pytest.raises(Lost, match="position 1"):
        seqs.open(np.array([7, 1]))
    seqs.end()
    seqs.forget([2, 3, 7, 8])
    assert not memory.cells and not seqs.held


def test_a_sequence_that_another_begins_with_is_not_kept() -> None:
    memory = FakeContext(Blank(9), 20, 8, 3, 3)
    seqs = Sequences(memory, 3)
    held(memory, seqs, [0, 1, 2, 3], [5, 6, 7, 8])
    for _ in range(5):  # three sequences are enough for any number of readers, one after the other
        for size in (1, 2, 3):
            seqs.open(np.arange(size))
            seqs.end()
    assert len(memory.cells) == 4
    seqs.open(np.arange(2))
    seqs.open(np.arange(2))
    with pytest.raises(Lost, match="every sequence"):
        seqs.open(np.arange(2))


# ------------------------------------------------------------------ the engine
def llama(speculative: Any = None, draft: FakeFile | None = None, **config: Any) -> Engine:
    """An engine on the fake; after each step the cells are counted too."""
    e = engine(file(), speculative, draft, **config)
    books = e.check_integrity

    def check_integrity() -> None:
        books()
        for runner, pool in runners(e):
            llama_fake.check(runner)
            assert len(runner.seqs.held) <= len(pool.tables) + llama_runner.KEPT_TEXTS + llama_runner.PATHS
            slots = {s // pool.page_size for s in runner.seqs._of}
            assert not {page for page in slots if pool._is_free[page]}, "cells of a free page"
        for r in e.scheduler.running:
            behind = e.pool.tables[r.id].slots[r.computed :].tolist()
            assert e.runner.seqs._of.keys().isdisjoint(behind), "cells of rejected drafts"

    e.check_integrity = check_integrity  # type: ignore[method-assign]
    return e


def runners(e: Engine) -> list[tuple[LlamaRunner, KVPool]]:
    """Of the target, and of a draft model, with their pools."""
    owners = [e, *(d for d in e.drafting.drafters.values() if hasattr(d, "runner"))]
    return [(o.runner, o.pool) for o in owners if isinstance(o.runner, LlamaRunner)]


def small(made: Any) -> Any:
    """Its first layer: the numbers matter little here, and there are many."""
    made.model.layers = made.model.layers[:1]
    made.config.num_hidden_layers = 1
    return made


@functools.cache
def file() -> FakeFile:
    """One for all tests: it knows the logits of many texts already."""
    return FakeFile(small(tiny.model()))


@functools.cache
def drafter() -> FakeFile:
    return FakeFile(small(tiny.noisy()))


def torch_engine(**config: Any) -> Engine:
    return engine(small(tiny.model()), **config)


@functools.cache
def wanted(temperature: float = 1.0) -> list[list[int]]:
    """What torch says, one request at a time."""
    e = torch_engine()
    return [run(e, [r])[0] for r in requests(temperature=temperature)]


def requests(count: int = COUNT, temperature: float = 1.0, **params: Any) -> list[Any]:
    options = SAMPLED | {"temperature": temperature} | params
    return [request(p, seed=i, **options) for i, p in enumerate(tiny.prompts(count))]


def speculating(how: str, **config: Any) -> Engine:
    prompts = tiny.prompts(COUNT)
    tiny.Oracle.known = {tuple(p): w for p, w in zip(prompts, wanted(), strict=True)}
    own = SPECULATIVE[how]
    return llama(own, drafter() if own and own["method"] == "draft_model" else None, **config)


@pytest.fixture
def trees(monkeypatch):
    """Drafts of every drafter stay trees."""
    monkeypatch.setattr(LlamaRunner, "prefers_chains", False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", WAYS)
def test_the_text_is_the_same_as_on_torch(how: str, temperature: float) -> None:
    e = speculating(how)
    alone = run(e, requests(2, temperature)[1:])
    assert alone == wanted(temperature=temperature)[1:2]
    batch = requests(temperature=temperature)
    assert run(e, batch) == wanted(temperature=temperature)
    assert run(e, late := requests(temperature=temperature), arrivals=2) == wanted(temperature=temperature)
    assert (sum(r.stats.drafted for r in batch) > 0) == (how != "none")
    assert how not in ("chain", "tree") or sum(r.stats.accepted for r in [*batch, *late]) > 50


@pytest.mark.parametrize("how", ["suffix", "oracle", "random", "tree"])
def test_trees_give_the_same_text(how: str, trees) -> None:
    e = speculating(how)
    batch, late = requests(), requests()
    assert run(e, batch) == wanted()
    assert run(e, late, arrivals=3) == wanted()
    drafted, accepted = (sum(getattr(r.stats, n) for r in [*batch, *late]) for n in ("drafted", "accepted"))
    assert drafted > accepted and (how == "random" or accepted > 50)


@pytest.mark.parametrize("how", WAYS)
def test_nothing_is_left_where_prefixes_are_not_shared(how: str, contexts) -> None:
    e = speculating(how, share_prefixes=False)
    assert run(e, requests(), arrivals=2) == wanted()
    assert not e.runner.context.cells and not e.runner.seqs.held and not e.runner.seqs._of
    e.close()
    assert e.runner.context is None and all(c.closed for c in contexts)


@pytest.mark.parametrize("how", ["none", "ngram", "tree", "oracle"])
def test_little_room_preempts_and_resumes(how: str, trees) -> None:
    e = speculating(how, pages=30)  # 120 slots, and as many cells
    batch = requests()
    assert run(e, batch) == wanted()
    assert sum(r.stats.preemptions for r in batch) > 0 and e.runner.context.num_cells == 120


@pytest.mark.parametrize("how", WAYS)
def test_who_goes_on_alone_keeps_the_sequence(how: str, contexts) -> None:
    """Nothing is put together anew from step to step, but the paths of trees."""
    e = speculating(how)
    assert run(e, requests(2)[1:]) == wanted()[1:2]
    assert how == "tree" or [c.copies for c in contexts] == [0] * len(contexts)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_prompts_in_pieces(size: int) -> None:
    assert run(llama(max_batch_tokens=size), requests()) == wanted()


@pytest.mark.parametrize("how", ["none", "tree"])
def test_leaving_in_the_middle(how: str) -> None:
    e = speculating(how)
    batch = requests(8)
    for r in batch:
        e.add(r)
    for _ in range(4):
        e.step()
    cells = len(e.runner.context.cells)
    for r in batch[::2]:
        e.abort(r)
        e.check_integrity()
    assert len(e.runner.context.cells) < cells and all(r.finish_reason == "abort" for r in batch[::2])
    run(e, [])
    assert [r.output for r in batch[1::2]] == wanted()[1:8:2]
    assert run(e, requests()) == wanted()


def test_logprobs_are_torchs() -> None:
    """Rows of known tokens are asked too, and read before the next forward."""
    e, plain = speculating("tree", max_batch_tokens=16), torch_engine()
    ours = requests(4, logprobs=2, prompt_logprobs=1)
    theirs = [request(r.prompt, seed=r.seed, logprobs=2, prompt_logprobs=1, **SAMPLED) for r in ours]
    assert run(e, ours) == run(plain, theirs)
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip([*a.prompt_logprobs[1:], *a.logprobs], [*b.prompt_logprobs[1:], *b.logprobs], strict=True):
            assert x.token == y.token and x.logprob == pytest.approx(y.logprob, abs=1e-4) and list(x.top) == list(y.top)


# ------------------------------------------------------------------ shared prefixes
def test_a_shared_prefix_is_computed_once_within_one_forward(contexts) -> None:
    system = tiny.prompts(2)[1][:24]
    e, plain = llama(max_batch_tokens=200), torch_engine()
    same = [request([*system, 30 + i], max_tokens=3) for i in range(8)]
    assert run(e, same) == run(plain, [request(r.prompt, max_tokens=3) for r in same])
    assert contexts[0].sizes[0] == 24 + 8 and len(contexts[0].sizes) == 3
    late = request([*system, 99], max_tokens=1)
    run(e, [late])
    assert contexts[0].sizes[-1] == 1 and late.stats.cached_prompt_tokens == 24


@pytest.mark.parametrize("how", WAYS)
def test_twins_in_one_step(how: str) -> None:
    """Two with the same prompt, which goes on differently; and the same again, later."""
    e, plain = speculating(how), torch_engine()
    prompt = tiny.prompts(2)[1]
    for _ in range(2):
        twins = [request(prompt, seed=s, **SAMPLED) for s in (1, 2, 1)]
        outs = run(e, twins)
        assert outs == [run(plain, [request(prompt, seed=s, **SAMPLED)])[0] for s in (1, 2, 1)]
        assert outs[0] == outs[2] != outs[1]
    assert all(r.stats.cached_prompt_tokens >= len(prompt) - 4 for r in twins)


@pytest.mark.parametrize("how", WAYS)
def test_a_second_turn_finds_the_first(how: str) -> None:
    e, plain = speculating(how), torch_engine()
    text = tiny.prompts(2)[1]
    for turn in range(3):
        first, check = (request(text, seed=turn, eos=None, **SAMPLED) for _ in range(2))
        assert run(e, [first]) == run(plain, [check])
        assert (
            check.stats.cached_prompt_tokens - 8 <= first.stats.cached_prompt_tokens
        )  # the last tokens are not sealed
        assert first.stats.cached_prompt_tokens >= turn * 24
        text = [*first.tokens, 7, 8, 9]


@pytest.mark.parametrize("kind", ["in step", "prompt_logprobs"])
def test_what_was_computed_behind_a_copy_is_found(kind: str) -> None:
    """The same text is computed twice; the second time it goes further. A third request reads both."""
    e, plain = llama(), torch_engine()
    prompt = tiny.prompts(1)[0]
    first = request(prompt, max_tokens=6, eos=None)
    second = request(prompt, max_tokens=20, eos=None, prompt_logprobs=None if kind == "in step" else 0)
    if kind == "in step":
        run(e, [first, second])
    else:
        run(e, [first])
        run(e, [second])
    third, check = (request([*second.tokens, 7], max_tokens=5) for _ in range(2))
    assert run(e, [third]) == run(plain, [check])
    assert third.stats.cached_prompt_tokens >= len(second.tokens) - 4


def test_more_requests_with_one_prompt_than_a_tree_has_paths() -> None:
    """Each row of the prompt is in the sequences of all of them."""
    prompt, count = tiny.prompts(2)[1], llama_runner.PATHS + 8
    e = llama(max_num_seqs=count, max_batch_tokens=256)
    outs = run(e, [request(prompt, seed=i, temperature=1.0, max_tokens=2) for i in range(count)])
    plain = torch_engine()
    assert outs[-4:] == [
        run(plain, [request(prompt, seed=i, temperature=1.0, max_tokens=2)])[0] for i in range(count - 4, count)
    ]


def test_a_prefix_stays_however_many_finish_behind_it() -> None:
    e, system = llama(), tiny.prompts(2)[1][:12]
    most = 0
    for i in range(llama_runner.KEPT_TEXTS + 8):
        r = request([*system, 30 + i, 5, 6, 7, 8], max_tokens=1)
        run(e, [r])
        assert r.stats.cached_prompt_tokens == (12 if i else 0)
        most = max(most, len(e.runner.seqs.held))
    assert most <= llama_runner.KEPT_TEXTS + 1


@pytest.mark.parametrize("how", ["none", "tree", "oracle"])
def test_few_sequences_are_enough(how: str, monkeypatch, trees, capsys) -> None:
    """One for each request that runs, for each text that is kept, and for each path of a step's trees."""
    monkeypatch.setattr(llama_runner, "KEPT_TEXTS", 2)
    monkeypatch.setattr(llama_runner, "PATHS", 12)
    monkeypatch.setattr(LlamaRunner, "max_texts", 2)
    monkeypatch.setattr(LlamaRunner, "most_paths", 12)
    e = speculating(how, max_num_seqs=3)
    assert e.runner.context.num_seqs == 17
    for arrivals in (0, 2):
        batch = requests()
        assert run(e, batch, arrivals) == wanted()
    assert how == "none" or sum(r.stats.accepted for r in batch) > 20
    assert "without drafts" not in capsys.readouterr().err


def test_a_draft_model_grows_chains_where_so_many_trees_have_too_many_paths(capsys) -> None:
    count = 24
    e = llama(SPECULATIVE["tree"], drafter(), max_num_seqs=count, max_batch_tokens=512, pages=800)
    shapes = []
    thin = e._thin
    e._thin = lambda trees: (shapes.append([is_chain(t.parents) for t in trees]), thin(trees))[1]
    limits = [4 + i // 2 for i in range(count)]
    batch, check = (
        [request(p, max_tokens=n, eos=None) for p, n in zip(tiny.prompts(count), limits, strict=True)] for _ in range(2)
    )
    assert run(e, batch) == run(torch_engine(max_num_seqs=count), check)
    assert "without drafts" not in capsys.readouterr().err
    assert all(shapes[0]) and len(shapes[0]) > 16  # many at once: chains
    assert not all(chain for step in shapes[-5:] for chain in step)  # few are left: trees


# ------------------------------------------------------------------ what goes wrong
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("how", ["none", "tree"])
def test_a_forward_that_breaks_leaves_nothing_behind(how: str, step: int, when: str) -> None:
    e = speculating(how)
    run(e, requests(2))  # others have been here
    for r in (batch := requests(6)):
        e.add(r)
    for _ in range(step):
        e.step()
    e.runner.context.breaks = when
    e.step()
    assert e.setbacks["step"] == 1, "and each of them goes on by itself first"
    llama_fake.check(e.runner)
    e.check_integrity()
    run(e, [])
    assert [r.output for r in batch] == wanted()[:6]
    assert run(e, requests()) == wanted()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_breaks_with_one_request_alone_fails_it(when: str) -> None:
    e = speculating("none")
    [r] = requests(1)
    e.add(r)
    e.step()
    e.runner.context.breaks = when
    with pytest.raises(StepFailed) as caught:
        e.step()
    assert "on purpose" in str(caught.value.__cause__) and caught.value.requests == [r]
    e.abort(r)
    llama_fake.check(e.runner)
    e.check_integrity()
    assert run(e, requests()) == wanted()


def test_no_sequence_left_is_a_failed_step_like_any_other(monkeypatch) -> None:
    e = llama()
    run(e, requests(2))
    open, count = Sequences.open, iter(range(3))

    def lost(self, path):
        if next(count) == 2:
            raise Lost("on purpose")
        return open(self, path)

    monkeypatch.setattr(Sequences, "open", lost)
    for r in (batch := requests(4)):
        e.add(r)
    e.step()
    assert e.setbacks["step"] == 1
    e.check_integrity()
    monkeypatch.setattr(Sequences, "open", open)
    run(e, [])
    assert [r.output for r in batch] == wanted()[:4]
    assert run(e, requests()) == wanted()


def test_a_draft_model_that_breaks_costs_drafts_and_nothing_else(capsys) -> None:
    e = speculating("tree")
    (_, _), (small, _) = runners(e)
    for r in (batch := requests(4)):
        e.add(r)
    for _ in range(3):
        e.step()
    small.context.breaks = "after"
    run(e, [])
    assert [r.output for r in batch] == wanted()[:4] and "go on without drafts" in capsys.readouterr().err
    again = requests()
    assert run(e, again) == wanted() and sum(r.stats.accepted for r in again) > 30


def loaded(size: int = 400, style: str = "bytes", **more: Any) -> Loaded:
    """A tiny model with a tokenizer, as if it came from a GGUF file."""
    made = tiny.loaded(size, style, **more)
    fake = FakeFile(made.model)
    return Loaded(made.name, fake, made.tokenizer, made.eos_ids, made.max_len, made.vocab_size)


def test_a_failed_request_is_told_and_the_next_one_is_right(contexts) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(tiny.loaded(), speculative=None, kv_memory=1 << 22) as plain:
        want = plain.generate("the quick brown fox", params)[0].text
    with LLM(loaded(), speculative="ngram", kv_memory=1 << 16) as llm:
        contexts[-1].breaks = "after"
        with pytest.raises(RequestFailed, match="on purpose"):
            llm.generate("the quick brown fox", params)
        assert llm.generate("the quick brown fox", params)[0].text == want
        assert "".join(c.text for c in llm.stream("the quick brown fox", params)) == want
    assert contexts[-1].closed and llm.engine.runner.context is None


@pytest.mark.parametrize("kind", ["token", "string"])
def test_a_draft_with_another_vocabulary(kind: str, capsys) -> None:
    """A draft that passes through text is spelled anew now and then: old spellings leave no cells behind."""
    params = SamplingParams(temperature=1.0, max_tokens=32, seed=3, ignore_eos=True)
    texts = ["the quick brown fox", "naïve café, déjà", "a stone bridge over the river"]
    with LLM(tiny.loaded(), speculative=None, kv_memory=1 << 22) as plain:
        want = [o.token_ids for o in plain.generate(texts, params)]
    spec = {"method": "draft_model", "num_speculative_tokens": 3, "vocab_mapping": kind}
    options = dict(speculative=spec, kv_memory=1 << 18, page_size=4, max_num_seqs=4)
    with LLM(loaded(), draft=loaded(330, layers=2), **options) as llm:
        for _ in range(2):
            outs = llm.generate(texts, params)
            assert [o.token_ids for o in outs] == want and sum(o.stats.drafted for o in outs) > 0
        for runner, pool in runners(llm.engine):
            pool.check_integrity()
            llama_fake.check(runner)
            assert len(runner.seqs.held) <= 10  # three texts, each with its beginnings
    assert "without drafts" not in capsys.readouterr().err


def test_limits_of_the_runner() -> None:
    runner = LlamaRunner(file())
    with pytest.raises(ConfigError, match="at most 160 requests at once here: lower max_num_seqs"):
        runner.allocate(100, max_segments=161)
    runner.allocate(100, max_segments=160)
    first = runner.context
    runner.allocate(100)
    assert first.closed and not runner.context.closed  # a new one replaces the old
    runner.release()
    runner.freed(0)  # a pool may be closed later than its runner
    with pytest.raises(ConfigError, match="deterministic"):
        make_runner(file(), deterministic=True)
    assert make_runner(file()).slot_bytes == 64 and make_runner(file()).weight_bytes == 1000


# ------------------------------------------------------------------ trees and chains
WIDE = Tree([5, 6, 7, 8, 9], [-1, -1, 0, 0, 3])


def thinned(e: Engine, trees: list[Tree]) -> list[Tree]:
    return e._thin(list(trees))


def test_trees_become_chains_where_the_runner_prefers_them() -> None:
    chain = Tree.chain([1, 2, 3])
    assert thinned(llama("suffix"), [WIDE, chain, Tree()]) == [Tree([5, 7], [-1, 0]), chain, Tree()]
    assert thinned(llama(SPECULATIVE["tree"], drafter()), [WIDE, chain]) == [WIDE, chain]  # asked for
    assert thinned(torch_engine(speculative="suffix"), [WIDE]) == [WIDE]  # torch takes any


def test_too_many_paths_become_chains_even_where_trees_are_asked_for(monkeypatch) -> None:
    e = llama(SPECULATIVE["tree"], drafter())
    most = LlamaRunner.most_paths // num_paths(WIDE)
    assert thinned(e, [WIDE] * most) == [WIDE] * most
    assert all(is_chain(t.parents) for t in thinned(e, [WIDE] * (most + 1)))
    fill = [Tree()] * (LlamaRunner.most_paths - num_paths(WIDE))  # a request without a draft is one path too
    assert thinned(e, [WIDE, *fill])[0] == WIDE and thinned(e, [WIDE, *fill, Tree()])[0] == Tree([5, 7], [-1, 0])


def test_suffix_drafts_are_chains_on_llama_cpp_and_trees_on_torch() -> None:
    def shapes(e: Engine) -> list[bool]:
        seen: list[bool] = []
        pack = e._pack
        e._pack = lambda plan, trees: (seen.extend(is_chain(t.parents) for t in trees), pack(plan, trees))[1]  # type: ignore[method-assign]
        text = tiny.prompts(2)[1]
        forks = [t for i in range(5) for t in [*text[:6], 20 + i, 30 + i]]
        run(e, [request([*forks, *text[:6]], max_tokens=4, eos=None)])
        return seen

    spec = {"method": "suffix", "num_draft_nodes": 12, "suffix_min_prob": 0.0}
    assert all(shapes(llama(spec))) and not all(shapes(torch_engine(speculative=spec)))


# ------------------------------------------------------------------ loading
@pytest.fixture
def installed(monkeypatch):
    """llama.cpp is here, and loads a tiny model whatever the file."""

    def loads(path: Path, options: LlamaOptions) -> FakeFile:
        made = FakeFile(tiny.loaded().model)
        made.path, made.options = path, options
        made.describe = lambda: "tiny Q4_0"  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(native, "available", lambda: None)
    monkeypatch.setattr(native, "LlamaFile", loads)
    monkeypatch.setattr(gguf, "check", lambda path: None)
    monkeypatch.setattr(gguf, "converted", lambda path: pytest.fail("torch would run it"))
    words = Tokenizer(tiny.tokenizer())
    monkeypatch.setattr(llama_tokenizer, "LlamaTokenizer", lambda file: words)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    out = tmp_path / "tiny.gguf"
    out.write_bytes(b"GGUF" + bytes(60))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("models") / "tiny")


def test_without_llama_cpp_python_one_sentence_says_so(monkeypatch, weights) -> None:
    monkeypatch.setattr(native, "available", available)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError) as caught:
        loading.load(weights, runner="llamacpp")
    said = str(caught.value)
    assert (
        said.startswith("runner='llamacpp' cannot be used: llama-cpp-python is not installed")
        and "make llamacpp" in said
    )
    assert said.endswith(".") and "\n" not in said


def test_a_library_that_does_not_start_is_told_from_one_that_is_missing(monkeypatch) -> None:
    for error in (OSError("libllama.so: no such file"), RuntimeError("no backend"), AttributeError("no such function")):

        def broken(error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(native, "_library", broken)
        assert available() == f"llama-cpp-python does not start ({error})"
    monkeypatch.setattr(native, "_library", lambda: None)
    assert available() is None


def test_an_unknown_runner(weights) -> None:
    with pytest.raises(ConfigError, match=r"runner='lamacpp' is not known\. Did you mean 'llamacpp'\?"):
        loading.load(weights, runner="lamacpp")
    with pytest.raises(ConfigError, match="runner='vllm' is not known"):
        LLM(str(weights), runner="vllm")


def test_llama_cpp_takes_gguf_files_and_nothing_else(installed, folder, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"runs GGUF files, and .*tiny is none: use runner='torch'"):
        loading.load(folder, runner="llamacpp")
    with pytest.raises(ConfigError, match="runs GGUF files, and someone/model is none"):
        loading.load("someone/model", runner="llamacpp")
    with pytest.raises(ModelError, match="does not exist"):
        loading.load(tmp_path / "nothing.gguf", runner="llamacpp")


@pytest.mark.parametrize("options", [dict(kv_type="q8_0"), dict(gpu_layers=0), dict(flash_attention=False)])
def test_options_of_llama_cpp_are_refused_on_torch(folder, options: dict[str, Any]) -> None:
    for runner in ("torch", "auto"):
        with pytest.raises(ConfigError, match=r"are for runner='llamacpp'; this model runs on torch"):
            LLM(folder, runner=runner, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(kv_type="q8"), "kv_type='q8' is not known. Did you mean 'q8_0'?"),
        (dict(threads=0), "threads=0 is not usable: give 1 or more."),
        (dict(gpu_layers=-2), "gpu_layers=-2 is not usable: give 0 or more, or -1 for all."),
    ],
)
def test_bad_values_of_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LlamaOptions(**options)
    assert str(caught.value) == words
    with pytest.raises(ConfigError):
        LLM("no such model", **options)


def test_every_kv_type_has_a_number_and_a_size() -> None:
    assert set(native.KV_TYPES) == set(native.KV_BYTES) and len(set(native.KV_TYPES.values())) == len(native.KV_TYPES)
    for name in native.KV_TYPES:
        assert LlamaOptions(kv_type=name).kv_type == name


def test_who_runs_a_gguf_file(installed, weights, folder, monkeypatch, capsys) -> None:
    made = loading.load(weights)
    assert isinstance(made.model, FakeFile) and made.max_len == 512 and made.vocab_size == made.model.vocab_size
    assert "runs on llama.cpp, in the file's own format (tiny Q4_0)" in capsys.readouterr().err
    chosen = loading.load(weights.parent, runner="llamacpp", max_len=100, llama=LlamaOptions(0, 3, True, "q8_0"))
    assert chosen.max_len == 100 and chosen.model.options == LlamaOptions(0, 3, True, "q8_0")
    assert chosen.model.path == weights and "own format" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match="from 2 to at most 512 positions"):
        loading.load(weights, max_len=1000)
    assert not isinstance(loading.load(folder).model, FakeFile)  # no GGUF file: torch, as ever
    for asked in (dict(runner="torch"), dict(dtype="float32")):
        with pytest.raises(pytest.fail.Exception, match="torch would run it"):
            loading.load(weights, **asked)
    with pytest.raises(pytest.fail.Exception, match="torch would run it"):
        LLM(weights, fuse=False)
    monkeypatch.setattr(native, "available", lambda: "it is not installed")
    with pytest.raises(pytest.fail.Exception, match="torch would run it"):
        loading.load(weights)


def test_an_llm_on_a_gguf_file(installed, weights, contexts) -> None:
    """The options arrive, target and draft have a context each, and closing closes both."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LLM(tiny.loaded(), speculative=None, kv_memory=1 << 22) as plain:
        want = plain.generate("the birds sing", params)[0].text
    spec = {"method": "draft_model", "model": str(weights), "num_speculative_tokens": 3}
    with LLM(weights, speculative=spec, kv_type="q8_0", threads=2, kv_memory=1 << 18) as llm:
        target, draft = (c.file.options for c in contexts)
        assert (target.kv_type, target.threads, draft.kv_type, draft.threads) == ("q8_0", 2, "f16", 2)
        out = llm.generate("the birds sing", params)[0]
        assert out.text == want and out.stats.accepted > 3
    assert len(contexts) == 2 and all(c.closed for c in contexts)


def test_kv_has_a_usual_size_where_nobody_says_otherwise(installed, weights, contexts) -> None:
    with LLM(weights, max_num_seqs=100):
        assert contexts[-1].num_cells == LlamaRunner.usual_slots  # 100 times 512 would be more
    with LLM(weights, max_num_seqs=100, kv_memory=64 * 51200):
        assert contexts[-1].num_cells == 51200


def test_what_torch_is_asked_for_does_not_hurt_a_model_that_is_loaded(contexts) -> None:
    with LLM(tiny.loaded(), fuse=False, kv_memory=1 << 22) as llm:
        assert llm.engine.runner.lean is None
    with pytest.raises(ConfigError, match="this model is loaded"):
        LLM(tiny.loaded(), runner="llamacpp")


# ------------------------------------------------------------------ the build
@pytest.fixture(scope="module")
def build() -> Any:
    path = Path(__file__).parents[1] / "scripts" / "build_llamacpp.py"
    spec = importlib.util.spec_from_file_location("build_llamacpp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BEFORE, AFTER = "bool use_ref = x;\n    const bool parts = a && ", "\n    nek1 >= 512; // elsewhere\n"


def source(tmp_path: Path, build: Any, text: str) -> Path:
    out = tmp_path / build.ATTENTION[0]
    out.parent.mkdir(parents=True)
    out.write_text(text)
    return out


def test_the_build_changes_one_condition(build, tmp_path) -> None:
    path = source(tmp_path, build, BEFORE + build.ATTENTION[1] + AFTER)
    build.change(tmp_path)
    assert path.read_text() == BEFORE + "q->type == GGML_TYPE_F32 && false;" + AFTER


@pytest.mark.parametrize("count", [0, 2])
def test_the_build_refuses_what_it_does_not_know(build, tmp_path, count: int) -> None:
    text = BEFORE + build.ATTENTION[1] * count + AFTER
    path = source(tmp_path, build, text)
    with pytest.raises(SystemExit, match="is not as expected"):
        build.change(tmp_path)
    assert path.read_text() == text


# ------------------------------------------------------------------ several tokens in one step
def lone(e: Engine, **params: Any) -> Any:
    r = request(PROMPT, eos=None, **({"max_tokens": 14} | params))
    steps = []
    step = e.step
    e.step = lambda: steps.append(r.num_output) or step()  # type: ignore[method-assign]
    out = run(e, [r])[0]
    return r, out, steps


PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """Whether a runner runs on must not hang on how fast this machine is just now."""
    monkeypatch.setattr(engine_module, "RUN_ON_SECONDS", 1e9)


def plain_text(**params: Any) -> list[int]:
    return run(torch_engine(), [request(PROMPT, eos=None, **({"max_tokens": 14} | params))])[0]


def test_a_request_that_is_alone_runs_on_and_says_the_same(contexts) -> None:
    e = llama()
    r, out, steps = lone(e)
    assert out == plain_text() and steps == [0, 1, 2, 6, 10]  # how long a token takes is known from the second step
    assert contexts[-1].sizes == [len(PROMPT)] + [1] * 13
    assert (r.stats.steps, r.stats.tokens, r.stats.drafted, r.stats.first_tokens) == (14, 14, 0, 1)


@pytest.mark.parametrize("at", range(1, 9))
def test_it_ends_with_the_token_that_ends_it(at: int, contexts) -> None:
    stop = plain_text()[at]
    r, out, _ = lone(llama(), stop_token_ids=[stop])
    end = plain_text().index(stop) + 1
    assert out == plain_text()[:end] and r.finish_reason == "stop"
    assert sum(contexts[-1].sizes) == len(PROMPT) + end - 1, "nothing was computed behind the end"


@pytest.mark.parametrize(
    "params",
    [dict(temperature=1.0), dict(logprobs=0), dict(logit_bias={3: 2.0}), dict(repetition_penalty=1.2)],
    ids=str,
)
def test_whoever_needs_a_look_at_each_token_gets_it(params: dict) -> None:
    _, out, steps = lone(llama(), **params)
    assert out == plain_text(**params) and len(steps) == 14


def test_nobody_waits_while_another_runs_on(contexts) -> None:
    e = llama()
    rs = [request(PROMPT, eos=None, max_tokens=9), request([9, 8, 7], eos=None, max_tokens=9)]
    assert run(e, rs) == run(torch_engine(), [request(r.prompt, eos=None, max_tokens=9) for r in rs])
    assert contexts[-1].sizes == [len(PROMPT) + 3] + [2] * 8


def test_a_slow_model_tells_each_token(monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "RUN_ON_SECONDS", 0.0)
    assert len(lone(llama())[2]) == 14


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_drafters_are_still_asked(policy: str) -> None:
    """Under `fixed` before each token; under `adaptive` every so often, once drafts do not pay."""
    e = llama({"method": "ngram", "prompt_lookup_min": 1, "policy": policy})
    r, out, steps = lone(e, max_tokens=40)
    assert out == plain_text(max_tokens=40)
    assert policy == "adaptive" or (r.stats.drafted > 0 and len(steps) == r.stats.steps)


def test_a_run_that_breaks_fails_its_request_and_leaves_nothing_behind(contexts) -> None:
    e = llama()
    r = request(PROMPT, eos=None, max_tokens=14)
    e.add(r)
    e.step()
    contexts[-1].breaks = "after"
    with pytest.raises(StepFailed):
        e.step()
    e.abort(r)
    assert e.pool.num_used == 0
    assert run(e, [request(PROMPT, eos=None, max_tokens=14)]) == [plain_text()]


def test_little_memory_for_a_run(contexts) -> None:
    e = llama(pages=4, max_len=15)
    assert lone(e)[1] == plain_text()[:10]
