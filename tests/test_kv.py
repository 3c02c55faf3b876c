"""The KV pool against a model of what each slot holds: random histories, shared prefixes, drafts, failures, little room.

What a transformer stores for a token depends on every token before it, so a slot's content is modelled as the whole prefix
up to and including its token. A slot is right for index i of a text when it holds exactly text[: i + 1].
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from headstart.kv import KVPool
from headstart.tree import path

TOKENS = st.integers(0, 1)  # few tokens, so that texts share their beginnings


class PoolMachine(RuleBasedStateMachine):
    """Requests come, compute in steps together, draft, grow, and leave."""

    opened = Bundle("opened")

    @initialize(
        pages=st.integers(3, 12),
        size=st.integers(1, 4),
        share=st.sampled_from([True, True, True, False]),
        most=st.sampled_from([None, None, 0, 1, 2, 4]),
    )
    def start(self, pages: int, size: int, share: bool, most: int | None) -> None:
        self.pool, self.most = KVPool(pages, size, share, self.freed, most), most
        self.content: dict[int, tuple[int, ...]] = {}
        self.texts: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}  # serial -> the text that it stands for
        self.count = 0

    def freed(self, page: int) -> None:
        """The page's content is gone: whoever reads it from now on finds nothing."""
        assert not self.pool._is_free[page], f"page {page} is told twice"
        for slot in range(page * self.pool.page_size, (page + 1) * self.pool.page_size):
            self.content.pop(slot, None)

    # -------------------------------------------------------------- rules
    @rule(target=opened, text=st.lists(TOKENS, min_size=1, max_size=20))
    def open(self, text: list[int]) -> str:
        self.count += 1
        name = f"r{self.count}"
        self.texts[name], self.computed[name] = list(text), 0
        return name

    @rule(target=opened, like=opened, more=st.lists(TOKENS, min_size=1, max_size=8), cut=st.integers(0, 20))
    def open_alike(self, like: str, more: list[int], cut: int) -> str:
        return self.open([*self.texts.get(like, [])[:cut], *more])

    @rule(
        names=st.lists(opened, min_size=1, max_size=4, unique=True),
        pieces=st.lists(st.integers(1, 9), min_size=4, max_size=4),
        nodes=st.integers(0, 5),
        seed=st.integers(0, 10**6),
        fails=st.sampled_from([False] * 9 + [True]),
    )
    def step(self, names: list[str], pieces: list[int], nodes: int, seed: int, fails: bool) -> None:
        """Several requests in one forward: all are planned before anything is written."""
        planned = []
        for name, piece in zip(names, pieces, strict=False):
            if name in self.texts:
                piece = self.plan(name, piece)
                if piece:
                    planned.append((name, piece))
        if fails:
            for name, _ in planned:
                self.pool.forget(name, self.computed[name])
            for name in list(self.texts):  # the engine tells everyone and starts afresh
                self.close(name)
            return
        for name, piece in planned:
            self.write(name, self.computed[name], self.computed[name] + piece)
        for name, piece in planned:
            self.computed[name] += piece
            if self.computed[name] == len(self.texts[name]):
                self.draft(name, nodes, random.Random(seed))

    def plan(self, name: str, piece: int) -> int:
        text = self.texts[name]
        if self.computed[name] + 1 < len(text):
            before = self.computed[name]
            self.computed[name] = self.pool.attach(name, text, before, len(text) - 1)
            assert before <= self.computed[name] < len(text)
            assert (self.computed[name] - before) % self.pool.page_size == 0
        piece = min(piece, len(text) - self.computed[name])
        room = self.pool.num_available
        missing = self.pool.missing_pages(name, self.computed[name] + piece)
        assert self.pool.reserve(name, self.computed[name] + piece) == (missing <= room)
        if missing > room:
            return 0
        self.pool.seal(name, text, self.computed[name] + piece)
        for i, serial in enumerate(self.pool.tables[name].serials):
            known = self.prefix_of.setdefault(serial, tuple(text[: (i + 1) * self.pool.page_size]))
            assert known == tuple(text[: (i + 1) * self.pool.page_size]), "one serial stands for two texts"
        return piece

    def write(self, name: str, begin: int, end: int) -> None:
        slots = self.pool.slots(name, end)
        for i in range(begin, end):
            self.content[int(slots[i])] = tuple(self.texts[name][: i + 1])

    def draft(self, name: str, nodes: int, rng: random.Random) -> None:
        """A random tree behind the text, of which a random path is accepted."""
        text, base = self.texts[name], len(self.texts[name])
        if not nodes or not self.pool.reserve(name, base + nodes):
            text.append(rng.randint(0, 1))
            return
        parents = [rng.randint(-1, i - 1) for i in range(nodes)]
        tokens = [rng.randint(0, 1) for _ in range(nodes)]
        slots = self.pool.slots(name, base + nodes)
        for i in range(nodes):
            grown = [*text, *(tokens[n] for n in path(parents, i))]
            self.content[int(slots[base + i])] = tuple(grown)
        accepted = path(parents, rng.randint(-1, nodes - 1))
        source, target = self.pool.moves(slots, base, accepted)
        moved = [self.content[int(s)] for s in source]
        self.content.update(zip(map(int, target), moved, strict=True))
        text += [tokens[n] for n in accepted]
        self.computed[name] = len(text)
        text.append(rng.randint(0, 1))
        self.pool.trim(name, len(text))

    @rule(name=opened, more=st.lists(TOKENS, min_size=1, max_size=6))
    def grow(self, name: str, more: list[int]) -> None:
        if name in self.texts:
            self.texts[name] += more

    @rule(name=opened, like=opened, count=st.integers(1, 9))
    def follow(self, name: str, like: str, count: int) -> None:
        """A text goes on as another one did, so that pages are found in the middle of it."""
        text, other = self.texts.get(name), self.texts.get(like)
        if text and other and other[: len(text)] == text:
            text += other[len(text) : len(text) + count]

    @rule(name=consumes(opened))
    def leave(self, name: str) -> None:
        self.close(name)

    @rule(name=opened)
    def preempt(self, name: str) -> None:
        """KV goes, the text stays."""
        self.pool.close(name)
        if name in self.texts:
            self.computed[name] = 0

    @rule(name=opened, keep=st.integers(0, 20))
    @precondition(lambda self: self.texts)
    def trim(self, name: str, keep: int) -> None:
        if name in self.pool.tables:
            self.pool.trim(name, keep)
            self.computed[name] = min(self.computed[name], keep)

    @rule(target=opened, name=opened)
    def look_up(self, name: str):
        """A second reader of the same text finds what is sealed, and only that."""
        if name not in self.texts:
            return multiple()
        again = self.open(self.texts[name])
        text = self.texts[again]
        found = self.pool.attach(again, text, 0, len(text))
        self.computed[again] = min(found, len(text) - 1)
        slots = self.pool.slots(again, found)
        assert [self.content[int(s)] for s in slots] == [tuple(text[: i + 1]) for i in range(found)]
        return again

    def close(self, name: str) -> None:
        self.pool.close(name)
        self.texts.pop(name, None)
        self.computed.pop(name, None)

    # -------------------------------------------------------------- what holds at any time
    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.num_used + self.pool.num_available == self.pool.num_pages

    @invariant()
    def a_page_is_told_when_it_becomes_free(self) -> None:
        if hasattr(self, "pool"):
            told = {slot // self.pool.page_size for slot in self.content}
            assert not {page for page in told if self.pool._is_free[page]}, "a free page that nobody was told of"

    @invariant()
    def what_stays_for_others_belongs_to_few_texts(self) -> None:
        if getattr(self, "most", None) is not None:
            assert len(self.pool._texts) <= self.most
            assert set(self.pool._idle) <= {page for text in self.pool._texts for page, _ in text}

    @invariant()
    def every_reader_finds_its_own_text(self) -> None:
        for name, computed in getattr(self, "computed", {}).items():
            if computed:
                slots = self.pool.slots(name, computed)
                text = self.texts[name]
                assert len(slots) == computed
                for i, slot in enumerate(slots):
                    assert self.content[int(slot)] == tuple(text[: i + 1]), f"{name} reads a wrong slot at {i}"

    @invariant()
    def every_sealed_page_holds_what_its_key_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        size = self.pool.page_size
        for (_, tokens), (page, serial) in self.pool._sealed.items():
            prefix = self.prefix_of[serial]
            assert prefix[-size:] == tokens
            for j in range(size):
                assert self.content[page * size + j] == prefix[: len(prefix) - size + j + 1]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for name in list(self.pool.tables):
            self.pool.close(name)
        self.pool.check_integrity()
        assert self.pool.num_available == self.pool.num_pages
        assert self.pool.reserve("all", self.pool.num_slots), "capacity was lost"
        assert sorted(self.pool.slots("all", self.pool.num_slots).tolist()) == list(range(self.pool.num_slots))


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


# ------------------------------------------------------------------ by example
def filled(pool: KVPool, name: str, tokens: list[int]) -> int:
    """A request that has computed all of its tokens. Returns how many it found."""
    found = pool.attach(name, tokens, 0, len(tokens) - 1)
    assert pool.reserve(name, len(tokens))
    pool.seal(name, tokens, len(tokens))
    return found


def test_a_shared_beginning_is_computed_once():
    pool = KVPool(10, 4)
    assert filled(pool, "a", list(range(10))) == 0
    assert filled(pool, "b", [*range(8), 99, 98]) == 8
    assert pool.slots("a", 8).tolist() == pool.slots("b", 8).tolist()
    assert pool.num_used == 4  # two shared, one each
    assert filled(pool, "c", [5, *range(9)]) == 0
    pool.check_integrity()


def test_the_last_token_is_never_taken_over():
    pool = KVPool(10, 4)
    filled(pool, "a", list(range(8)))
    assert filled(pool, "b", list(range(8))) == 4


def test_equal_pages_at_different_places_are_not_the_same():
    pool = KVPool(10, 2)
    filled(pool, "a", [1, 1, 1, 1, 1, 1])
    assert filled(pool, "b", [1, 1, 2, 2, 1, 1, 1]) == 2


def test_a_closed_request_leaves_its_pages_findable_until_room_is_needed():
    pool = KVPool(4, 2)
    filled(pool, "a", [1, 2, 3, 4, 5])
    pool.close("a")
    assert pool.num_available == 4
    assert filled(pool, "b", [1, 2, 3, 4, 9]) == 4
    pool.close("b")
    assert pool.reserve("big", 8)
    pool.check_integrity()
    pool.close("big")
    assert filled(pool, "c", [1, 2, 3, 4, 9]) == 0


def test_the_end_of_a_text_is_forgotten_before_its_beginning():
    pool = KVPool(4, 2)
    filled(pool, "a", [1, 2, 3, 4, 5, 6])
    pool.close("a")
    assert pool.reserve("b", 4)  # one free page, then one idle page
    assert pool.attach("c", [1, 2, 3, 4, 5, 6, 7], 0, 6) == 4


def test_pages_that_are_found_replace_those_that_were_reserved():
    pool = KVPool(10, 2)
    filled(pool, "a", [1, 2, 3, 4, 5, 6, 7])
    filled(pool, "b", [1, 2])
    assert pool.reserve("b", 8)  # room for a draft
    assert pool.attach("b", [1, 2, 3, 4, 5, 6, 7], 2, 6) == 6
    assert pool.slots("b", 6).tolist()[2:] == pool.slots("a", 6).tolist()[2:]
    assert len(pool.slots("b", 100)) == 6
    pool.check_integrity()


def test_no_room_changes_nothing():
    pool = KVPool(3, 4)
    assert pool.reserve("a", 8)
    before = pool.slots("a", 8).tolist()
    assert not pool.reserve("a", 13)
    assert not pool.reserve("b", 5)
    assert "b" not in pool.tables
    assert (pool.slots("a", 8).tolist(), pool.num_available) == (before, 1)
    assert pool.missing_pages("a", 13) == 2 and pool.missing_pages("b", 5) == 2 and pool.missing_pages("a", 3) == 0


def test_without_sharing_nothing_is_found():
    pool = KVPool(10, 2, share_prefixes=False)
    filled(pool, "a", [1, 2, 3, 4, 5])
    assert filled(pool, "b", [1, 2, 3, 4, 5]) == 0
    pool.close("a")
    assert pool.num_available == 7


def test_slots_lie_side_by_side_where_they_can():
    pool = KVPool(8, 4)
    pool.reserve("a", 5)
    pool.reserve("a", 20)
    assert pool.slots("a", 20).tolist() == list(range(20))


def test_pages_of_a_failed_forward_are_not_found():
    pool = KVPool(8, 2)
    filled(pool, "a", [1, 2, 3, 4, 5])
    pool.forget("a", 0)
    pool.close("a")
    assert filled(pool, "b", [1, 2, 3, 4, 5]) == 0
    assert pool.num_available == 5
    pool.forget("nobody", 0)


def test_a_failed_request_does_not_unsettle_those_that_share_its_pages():
    """The page was computed long ago; only the failed request leaves."""
    pool = KVPool(12, 2)
    for name in "abc":
        filled(pool, name, [1, 2, 3, 4, 5])
    pool.forget("a", 4)
    pool.close("a")
    pool.check_integrity()
    for name in "bc":
        pool.close(name)
    pool.check_integrity()
    assert pool.num_available == 12


# ------------------------------------------------------------------ who is told, and how much is kept
def test_a_page_is_told_when_its_content_goes_and_not_before():
    told: list[int] = []
    pool = KVPool(4, 2, freed=told.append)
    filled(pool, "a", [1, 2, 3, 4, 5])
    pool.close("a")
    assert told == [2]  # the half page; the sealed ones can be found
    assert filled(pool, "b", [1, 2, 3, 4, 9]) == 4 and told == [2]
    pool.close("b")
    assert told == [2, 2]
    assert pool.reserve("big", 6)  # two free pages, then the end of the text
    assert told == [2, 2, 1]
    pool.trim("big", 4)
    assert told == [2, 2, 1, 1]
    pool.close("big")
    assert told[4:] == [3, 2]
    assert filled(pool, "c", [1, 2, 3]) == 2


def test_pages_of_a_failed_forward_are_told_when_their_request_leaves():
    told: list[int] = []
    pool = KVPool(8, 2, freed=told.append)
    filled(pool, "a", [1, 2, 3, 4, 5])
    pool.forget("a", 2)
    assert told == []
    pool.close("a")
    assert told == [2, 1]


@pytest.mark.parametrize("most", [0, 1, 3, 8])
def test_the_latest_texts_are_kept_for_others(most: int):
    pool = KVPool(40, 2, max_texts=most)
    texts = [[i, i, i + 1, i + 1, 0] for i in range(10, 20)]
    for i, text in enumerate(texts):
        filled(pool, f"r{i}", text)
        pool.close(f"r{i}")
    found = [pool.attach(f"again {i}", text, 0, 4) for i, text in enumerate(texts)]
    assert found == [0] * (10 - most) + [4] * most
    pool.check_integrity()


def test_a_beginning_that_texts_share_stays_while_one_of_them_does():
    """A system prompt under many requests, one after the other."""
    pool = KVPool(40, 2, max_texts=3)
    for i in range(12):
        assert filled(pool, f"r{i}", [1, 2, 3, 4, 50 + i, 60 + i, 7]) == (4 if i else 0)
        pool.close(f"r{i}")
    assert [pool.attach(f"again {i}", [1, 2, 3, 4, 50 + i, 60 + i, 7], 0, 6) for i in (0, 8, 9, 11)] == [4, 4, 6, 6]


def test_the_turns_of_a_conversation_are_one_text():
    pool = KVPool(60, 2, max_texts=2)
    filled(pool, "other", [9, 9, 9, 9, 9])
    pool.close("other")
    text = [1, 2, 3]
    for turn in range(10):
        assert filled(pool, f"turn {turn}", text) == 2 * turn
        pool.close(f"turn {turn}")
        text = [*text, turn, turn]
    assert pool.attach("again", [9, 9, 9, 9, 9], 0, 4) == 4


def test_a_request_that_has_to_wait_pushes_no_text_out():
    """At every step it takes over what it can share, and gives it back."""
    pool = KVPool(20, 2, max_texts=2)
    for name, text in (("a", [1, 2, 3, 4, 5]), ("b", [9, 9, 8, 8, 7])):
        filled(pool, name, text)
        pool.close(name)
    for _ in range(5):
        assert pool.attach("waiting", [9, 9, 8, 8, 6, 6], 0, 5) == 4
        pool.close("waiting")
    assert pool.attach("again", [1, 2, 3, 4, 5], 0, 4) == 4


def test_a_text_that_is_spelled_anew_is_not_kept_under_its_old_spelling():
    told: list[int] = []
    pool = KVPool(20, 2, freed=told.append, max_texts=4)
    filled(pool, "a", [1, 2, 3, 4, 5])
    pool.trim("a", 2)
    assert sorted(told) == [1, 2] and pool.num_used == 1
    pool.check_integrity()


@pytest.mark.parametrize("count", [1, 3])
def test_memory_of_the_pool_does_not_grow_with_its_history(count: int):
    """Thousands of requests: heap, seals and keys stay within the number of pages."""
    pool, rng = KVPool(6, 2), random.Random(count)
    for i in range(3000):
        names = [f"{i}-{j}" for j in range(count)]
        for name in names:
            filled(pool, name, [rng.randint(0, 9) for _ in range(3)])
        for name in names:
            pool.close(name)
    pool.check_integrity()
    assert len(pool._sealed) <= 6 and len(pool._key_of) <= 6 and len(pool._free) <= 24 + 1
    assert not pool.tables


# ------------------------------------------------------------------ moves
@given(st.integers(0, 12), st.integers(1, 10), st.integers(0, 10**6))
def test_accepted_nodes_come_to_stand_in_line(base: int, nodes: int, seed: int):
    rng = random.Random(seed)
    parents = [rng.randint(-1, i - 1) for i in range(nodes)]
    accepted = path(parents, rng.randint(-1, nodes - 1))
    slots = np.array(rng.sample(range(100), base + nodes))
    memory = np.full(100, -1)
    memory[slots] = np.arange(base + nodes)  # each slot holds its index
    source, target = KVPool.moves(slots, base, accepted)
    memory[target] = memory[source]
    assert memory[slots[: base + len(accepted)]].tolist() == [*range(base), *(base + n for n in accepted)]
    assert len(source) == len(target) == sum(n != k for k, n in enumerate(accepted))


@given(st.integers(0, 12), st.integers(0, 10), st.integers(0, 10))
def test_a_chain_needs_no_move(base: int, nodes: int, kept: int):
    source, target = KVPool.moves(np.arange(base + nodes), base, list(range(min(kept, nodes))))
    assert len(source) == len(target) == 0
