"""The scheduler under random arrivals, budgets, verdicts and aborts, in too little memory.

A stand-in for the engine writes into a model of KV (a slot holds the whole prefix of its token) and reads each next token from
there, never from the request. So a lost, repeated or misplaced token shows in the output.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core import Request, SamplingParams, Tree
from headstart.kv import KVPool
from headstart.scheduler import Plan, Scheduler
from headstart.tree import path
from headstart.verify import walk


def next_token(prefix: tuple[int, ...]) -> int:
    """The one continuation of each text."""
    return hash(prefix) % 3


def expected_output(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(tuple(text)))
    return text[len(prompt) :]


@dataclass
class Arrival:
    """One request of a scenario."""

    step: int
    prompt: list[int]
    max_tokens: int
    drafts: int = 0  # nodes wanted per step
    skill: float = 0.5  # chance that a drafted token is right
    abort: int | None = None  # steps after arrival
    prompt_logprobs: bool = False


@dataclass
class House:
    """Scheduler, pool and a stand-in for everything else."""

    pages: int
    page_size: int
    max_num_seqs: int
    max_batch_tokens: int
    seed: int = 0
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.pool = KVPool(self.pages, self.page_size)
        max_len = self.pool.num_slots - 1
        self.scheduler = Scheduler(self.pool, self.max_num_seqs, self.max_batch_tokens, max_len)
        self.rng = random.Random(self.seed)
        self.order: list[Request] = []  # of arrival
        self.done: list[Request] = []
        self.wants: dict[str, Arrival] = {}
        self.told: dict[str, set[int]] = {}  # prompt positions computed since the request last started

    def arrive(self, a: Arrival) -> Request | None:
        r = Request(
            list(a.prompt), SamplingParams(max_tokens=a.max_tokens, prompt_logprobs=0 if a.prompt_logprobs else None), 0
        )
        if not self.scheduler.fits(len(r.prompt)):
            return None
        self.order.append(r)
        self.wants[r.id] = a
        self.scheduler.add(r)
        return r

    # -------------------------------------------------------------- one step, watched
    def step(self) -> Plan:
        s = self.scheduler
        oldest = (s.running or list(s.waiting))[:1]
        started = {r.id for r in s.running}
        plan = s.plan()
        self.steps += 1
        self.check_plan(plan, oldest)
        for part in plan.parts:
            if part.request.id not in started or part.request.computed == 0:
                self.told[part.request.id] = set()
        trees = self.draft(plan)
        self.forward(plan, trees)
        self.commit(plan, trees)
        self.check_books()
        return plan

    def check_plan(self, plan: Plan, oldest: list[Request]) -> None:
        s = self.scheduler
        assert sum(p.piece for p in plan.parts) <= self.max_batch_tokens
        assert len(s.running) <= self.max_num_seqs
        assert all(p.piece >= 1 and p.request.computed + p.piece <= len(p.request.tokens) for p in plan.parts)
        assert len({p.request.id for p in plan.parts}) == len(plan.parts)
        assert all(p.request in s.running for p in plan.parts)
        if oldest:
            assert plan.parts and plan.parts[0].request is oldest[0], "the oldest request stands still"
        line = [*s.running, *s.waiting]
        assert line == [r for r in self.order if r in line], "someone was overtaken"
        assert all(r.computed == 0 and r.id not in self.pool.tables for r in s.waiting)
        for p in plan.parts:
            if p.request.params.prompt_logprobs is not None:  # nobody else can tell its prompt's logprobs
                assert (
                    p.request.computed in (0, *(t + 1 for t in self.told.get(p.request.id, ()))) or p.request.num_output
                )

    def draft(self, plan: Plan) -> list[Tree]:
        s, ready = self.scheduler, plan.ready
        before = [list(s.running), list(s.waiting), [r.stats.preemptions for r in self.order]]
        s.reserve_drafts(plan, [self.wants[p.request.id].drafts for p in ready])
        assert before == [list(s.running), list(s.waiting), [r.stats.preemptions for r in self.order]], (
            "a draft pushed someone out"
        )
        assert sum(p.piece + p.budget for p in plan.parts) <= self.max_batch_tokens
        assert all(0 <= p.budget <= self.wants[p.request.id].drafts for p in ready)
        assert all(p.budget == 0 for p in plan.parts if not p.ready)
        return [self.grow(p.request, p.budget) for p in ready]

    def grow(self, request: Request, budget: int) -> Tree:
        """A random tree in which a token is right with the request's skill."""
        out, skill = Tree(), self.wants[request.id].skill
        for i in range(self.rng.randint(0, budget)):
            parent = self.rng.randint(-1, i - 1)
            before = (*request.tokens, *(out.tokens[n] for n in path(out.parents, parent)))
            right = next_token(before)
            out.tokens.append(right if self.rng.random() < skill else self.rng.randint(0, 2))
            out.parents.append(parent)
        return out

    def forward(self, plan: Plan, trees: list[Tree]) -> None:
        """Write all rows, then let every row look at its context; that is the order inside each layer."""
        grown = iter(trees)
        for part in plan.parts:
            r, end = part.request, part.request.computed + part.piece
            tree = next(grown) if part.ready else Tree()
            slots = self.pool.slots(r.id, end + len(tree))
            assert len(slots) == end + len(tree), "no room for what the step computes"
            for i in range(r.computed, end):
                self.content[int(slots[i])] = tuple(r.tokens[: i + 1])
                self.told[r.id].add(i)
            for i in range(len(tree)):
                self.content[int(slots[end + i])] = (*r.tokens, *(tree.tokens[n] for n in path(tree.parents, i)))
        for part in plan.parts:
            r, end = part.request, part.request.computed + part.piece
            for i, slot in enumerate(self.pool.slots(r.id, end)):
                assert self.content[int(slot)] == tuple(r.tokens[: i + 1]), "a row reads what is not its context"

    def commit(self, plan: Plan, trees: list[Tree]) -> None:
        grown = iter(trees)
        for part in plan.parts:
            r = part.request
            if not part.ready:
                r.computed += part.piece
                continue
            tree, base = next(grown), len(r.tokens)
            slots = self.pool.slots(r.id, base + len(tree))
            choices = [next_token(self.content[int(s)]) for s in slots[base - 1 :]]
            verdict = walk(tree, choices)
            new = verdict.tokens(tree)[: r.params.max_tokens - r.num_output]
            new = new[: self.scheduler.max_len - base]
            kept = verdict.accepted[: len(new)]
            source, target = self.pool.moves(slots, base, kept)
            moved = [self.content[int(s)] for s in source]
            self.content.update(zip(map(int, target), moved, strict=True))
            r.tokens += new
            r.computed = base + len(kept) - (len(kept) == len(new))
            self.pool.trim(r.id, len(r.tokens))
            if r.num_output >= r.params.max_tokens or len(r.tokens) >= self.scheduler.max_len:
                self.leave(r, "length")

    def leave(self, r: Request, why: str) -> None:
        r.finish_reason = why
        self.scheduler.finish(r)
        self.order.remove(r)
        self.done.append(r)
        assert r.id not in self.pool.tables

    def check_books(self) -> None:
        self.pool.check_integrity()
        assert set(self.pool.tables) <= {r.id for r in self.scheduler.running}
        for table in self.pool.tables.values():
            assert len(table.serials) <= len(table.pages)
        for (_, tokens), (page, _) in self.pool._sealed.items():  # nothing is sealed that was not computed
            held = [self.content.get(page * self.page_size + j) for j in range(self.page_size)]
            assert all(h is not None for h in held)
            assert tuple(h[-1] for h in held if h) == tokens
            assert all(len(b) == len(a) + 1 for a, b in itertools.pairwise(held) if a and b)

    def run(self, arrivals: list[Arrival]) -> None:
        """Play a scenario to its end."""
        waiting = sorted(arrivals, key=lambda a: a.step)
        leaving: dict[int, list[Request]] = {}
        work = sum(len(a.prompt) + a.max_tokens + 2 for a in [*self.wants.values(), *arrivals])
        bound = self.steps + work + max((a.step for a in arrivals), default=0)
        while waiting or not self.scheduler.idle:
            while waiting and waiting[0].step <= self.steps:
                a = waiting.pop(0)
                r = self.arrive(a)
                if r is not None and a.abort is not None:
                    leaving.setdefault(self.steps + a.abort, []).append(r)
            for r in leaving.pop(self.steps, []):
                if r.finish_reason is None:
                    self.leave(r, "abort")
            self.step()
            assert self.steps <= bound, "no end in sight"
        for r in self.done:
            output = expected_output(r.prompt, r.num_output)
            assert r.output == output, "the text changed"
            if r.finish_reason == "length":
                assert r.num_output == min(r.params.max_tokens, self.scheduler.max_len - len(r.prompt))
        assert not self.order and not self.pool.tables
        assert self.pool.num_available == self.pool.num_pages


# ------------------------------------------------------------------ random histories
@st.composite
def arrival(draw: st.DrawFn) -> Arrival:
    stem = draw(st.sampled_from([[], [0] * 7, [0, 1, 2, 0, 1, 2, 0, 1, 2]]))
    tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    return Arrival(
        draw(st.integers(0, 12)),
        [*stem, *tail],
        draw(st.integers(1, 10)),
        draw(st.sampled_from([0, 0, 3, 6])),
        draw(st.sampled_from([0.0, 0.6, 1.0])),
        draw(st.one_of(st.none(), st.none(), st.integers(0, 6))),
        draw(st.sampled_from([False, False, False, True])),
    )


@settings(max_examples=300)
@given(
    pages=st.integers(3, 14),
    page_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 24),
    arrivals=st.lists(arrival(), min_size=1, max_size=9),
    seed=st.integers(0, 10**6),
)
def test_every_request_ends_with_its_own_text(
    pages: int, page_size: int, max_num_seqs: int, max_batch_tokens: int, arrivals: list[Arrival], seed: int
):
    House(pages, page_size, max_num_seqs, max_batch_tokens, seed).run(arrivals)


@settings(max_examples=80)
@given(arrivals=st.lists(arrival(), min_size=4, max_size=9), seed=st.integers(0, 10**6))
def test_memory_for_hardly_one_request(arrivals: list[Arrival], seed: int):
    House(10, 2, 8, 16, seed).run(arrivals)


# ------------------------------------------------------------------ by example
def test_pressure_preempts_the_youngest_and_it_comes_back_first():
    house = House(pages=6, page_size=2, max_num_seqs=4, max_batch_tokens=64)
    a, b = (house.arrive(Arrival(0, [i, i, 1, 2], 6)) for i in (0, 1))
    assert a and b
    while not b.stats.preemptions:
        house.step()
    late = house.arrive(Arrival(0, [2], 1))
    assert house.scheduler.running == [a]
    assert list(house.scheduler.waiting) == [b, late]
    house.run([])
    assert b.output == expected_output([1, 1, 1, 2], 6)


def test_a_preempted_request_starts_from_nothing_and_keeps_its_text():
    house = House(pages=12, page_size=2, max_num_seqs=4, max_batch_tokens=64)
    a, b, c = (house.arrive(Arrival(0, [i, i, i], 6)) for i in range(3))
    assert a and b and c
    house.step()
    known = list(c.tokens)
    house.scheduler._preempt(c)
    house.scheduler._preempt(b)
    assert list(house.scheduler.waiting) == [b, c] and house.scheduler.running == [a]
    assert [r.computed for r in (a, b, c)] == [3, 0, 0] and c.tokens == known
    assert set(house.pool.tables) == {a.id}
    house.run([])


def test_the_random_histories_do_preempt():
    """Otherwise they would show nothing."""
    house = House(10, 2, 8, 16)
    house.run([Arrival(0, [i % 3] * 5, 9, drafts=3) for i in range(6)])
    assert sum(r.stats.preemptions for r in house.done) > 3


def test_a_long_prompt_comes_in_pieces_beside_decoding():
    house = House(40, 2, 4, 5)
    short, long = house.arrive(Arrival(0, [1], 20)), house.arrive(Arrival(0, [2] * 17, 2))
    assert short and long
    pieces = [[(p.request is long, p.piece, p.ready) for p in house.step().parts] for _ in range(5)]
    assert pieces[0] == [(False, 1, True), (True, 4, False)]
    assert pieces[3] == [(False, 1, True), (True, 4, False)]
    assert pieces[4] == [(False, 1, True), (True, 1, True)]


def test_the_same_prompt_at_the_same_time_is_computed_once():
    house = House(40, 4, 4, 64)
    for _ in range(2):
        house.arrive(Arrival(0, [1, 2, 0, 1, 2, 0, 1, 2, 0], 2))
    plan = house.scheduler.plan()
    assert [p.piece for p in plan.parts] == [9, 1]
    assert plan.num_prefill_tokens == 8
    assert plan.parts[1].request.stats.cached_prompt_tokens == 8


def test_a_prompt_shared_inside_one_step_is_read_after_it_is_written():
    house = House(40, 4, 4, 64)
    for _ in range(3):
        house.arrive(Arrival(0, [1, 2, 0, 1, 2, 0, 1, 2, 0], 4, drafts=3))
    house.run([])


def test_a_prompt_that_is_behind_takes_over_what_another_computed():
    """Sharing is asked again at every step, also in the middle of a prefill."""
    house = House(40, 2, 4, 6)
    text = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    house.arrive(Arrival(0, text, 2))
    house.arrive(Arrival(0, text, 2))
    total = 0
    while not all(r.num_output for r in house.order):
        total += sum(p.piece for p in house.step().parts)
    assert total < 2 * len(text)
    house.run([])


def test_drafts_shrink_to_what_there_is():
    house = House(pages=4, page_size=2, max_num_seqs=2, max_batch_tokens=64)
    r = house.arrive(Arrival(0, [1, 2, 0, 1], 3, drafts=100))
    assert r is not None
    plan = house.scheduler.plan()
    house.scheduler.reserve_drafts(plan, [100])
    assert 0 < plan.parts[0].budget <= 4


def test_drafts_share_the_rows_of_the_forward():
    house = House(pages=40, page_size=2, max_num_seqs=4, max_batch_tokens=10)
    for i in range(3):
        house.arrive(Arrival(0, [i], 3, drafts=5))
    plan = house.scheduler.plan()
    house.scheduler.reserve_drafts(plan, [5, 5, 5])
    assert [p.budget for p in plan.parts] == [5, 2, 0]


@pytest.mark.parametrize(("prompt", "fits"), [(1, True), (14, True), (15, False), (40, False)])
def test_what_can_never_run_is_known_beforehand(prompt: int, fits: bool):
    assert House(8, 2, 4, 4).scheduler.fits(prompt) is fits


def test_leaving_frees_at_once_wherever_the_request_is():
    house = House(pages=6, page_size=2, max_num_seqs=1, max_batch_tokens=64)
    a, b = house.arrive(Arrival(0, [1, 2, 3], 5)), house.arrive(Arrival(0, [2, 2], 5))
    assert a and b
    house.step()
    assert house.scheduler.running == [a]
    house.leave(b, "abort")
    house.leave(a, "abort")
    assert house.scheduler.idle and house.pool.num_available == 6
    house.scheduler.finish(a)  # twice does no harm
    house.pool.check_integrity()
