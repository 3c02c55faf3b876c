"""Who owns which slot of a KV pool: pages, prefix sharing, draft room, compaction. Numbers only; runners hold tensors.

A slot holds one token's keys and values in every layer. Slots come in pages of `page_size`; a table lists a request's pages,
so the token at index i lies in slot pages[i // P] * P + i % P. The last known token and the draft nodes behind it
take the slots after the context in the order of their rows; after the verdict the accepted ones move up (`moves`).

Full pages of known tokens are *sealed*: registered under (serial of the page before, tokens), where a serial is never
used twice, so that a hit means the same text from the start, without hashing whole prefixes. A sealed page is shared
by reference count, and stays, idle, when its last user leaves, until room is needed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headstart.core import NOTHING

Text = list[tuple[int, int]]  # sealed pages in order, each with its serial
ROOT = 0  # the serial before the first page; spaces, which do not share, count down from here


@dataclass
class Table:
    """One request's pages. The first len(serials) of them are sealed."""

    pages: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # the used part of `room`
    room: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    numbers: np.ndarray = field(
        default_factory=lambda: np.empty(0, dtype=np.int32)
    )  # the pages, for whoever copies them


class KVPool:
    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        share_prefixes: bool = True,
        freed: Callable[[int], None] | None = None,
        max_texts: int | None = None,
    ) -> None:
        """`freed` hears of each page that loses its content; at most `max_texts` finished texts are kept for others."""
        self.num_pages, self.page_size, self.share_prefixes = num_pages, page_size, share_prefixes
        self._freed, self._max_texts = freed, max_texts
        self._texts: deque[Text] = deque()  # finished ones, oldest first, where their number is bounded
        self.tables: dict[str, Table] = {}
        self._users = [0] * num_pages
        self._free = list(range(num_pages))  # a heap, with stale entries; `_is_free` decides
        self._is_free = [True] * num_pages
        self._num_free = num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # sealed pages without users, oldest first
        self._sealed: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (page, serial)
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> key
        self._unread: set[int] = set()  # sealed pages that a drafter with entries of its own in them has not read
        self._serial = itertools.count(ROOT + 1)
        self._offsets = np.arange(page_size)  # of the slots within a page

    # -------------------------------------------------------------- room
    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free, or idle and evictable."""
        return self._num_free + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def missing_pages(self, request_id: str, length: int) -> int:
        """How many more pages this request needs to hold `length` tokens."""
        table = self.tables.get(request_id)
        return max(0, self.pages_for(length) - (len(table.pages) if table else 0))

    def reserve(self, request_id: str, length: int) -> bool:
        """Make room for `length` tokens; False, and nothing changed, where there is none."""
        table = self.tables.get(request_id)
        if table is not None and length <= len(table.pages) * self.page_size:
            return True
        missing = self.missing_pages(request_id, length)
        if missing > self.num_available:
            return False
        table = self.tables.setdefault(request_id, Table())
        if missing:
            for _ in range(missing):
                table.pages.append(self._take(after=table.pages[-1] if table.pages else None))
            self._list_slots(table)
        return True

    def trim(self, request_id: str, length: int) -> None:
        """Give back the pages behind the first `length` tokens."""
        table = self.tables[request_id]
        keep = self.pages_for(length)
        if keep < len(table.pages):
            for page in reversed(table.pages[keep:]):
                self._drop(page)
            if self._max_texts is not None:  # what was spelled anew is no text that counts
                self._forget_idle(self._named(table.pages[keep:]))
            del table.pages[keep:]
            del table.serials[keep:]
            self._list_slots(table)

    def close(self, request_id: str) -> None:
        """Give everything back; sealed pages stay findable, the last ones first in line for eviction."""
        table = self.tables.pop(request_id, None)
        for page in reversed(table.pages if table else []):
            self._drop(page)
        if self._max_texts is not None and table is not None:
            self._remember(self._named(table.pages), self._max_texts)

    def slots(self, request_id: str, stop: int) -> np.ndarray:
        """(stop,) the slots of the first `stop` tokens."""
        return self.tables[request_id].slots[:stop]

    # -------------------------------------------------------------- sharing
    def attach(self, request_id: str, tokens: Sequence[int], computed: int, limit: int, space: int = 0) -> int:
        """Take over sealed pages of this space that continue this request's text, up to `limit` tokens. Returns how many now
        lie in KV."""
        table = self.tables.setdefault(request_id, Table())
        size = self.page_size
        while self.share_prefixes and computed == len(table.serials) * size and computed + size <= limit:
            key = (table.serials[-1] if table.serials else ROOT - space, tuple(tokens[computed : computed + size]))
            hit = self._sealed.get(key)
            if hit is None:
                break
            page, serial = hit
            self.trim(request_id, computed)
            self._share(page)
            table.pages.append(page)
            table.serials.append(serial)
            self._list_slots(table)
            computed += size
        return computed

    def seal(
        self, request_id: str, tokens: Sequence[int], known: int, space: int = 0, unread: int | None = None
    ) -> None:
        """Register the full pages among the first `known` tokens, which are in KV or will be after this forward. Those behind
        token `unread` are said to be so."""
        table, size = self.tables[request_id], self.page_size
        if not self.share_prefixes:
            return
        while (len(table.serials) + 1) * size <= known:
            i = len(table.serials)
            key = (table.serials[-1] if table.serials else ROOT - space, tuple(tokens[i * size : (i + 1) * size]))
            page = table.pages[i]
            if key in self._sealed:  # the same text was computed twice: this copy stays private, its twin is found
                table.serials.append(self._sealed[key][1])
                continue
            serial = next(self._serial)
            self._sealed[key] = (page, serial)
            self._key_of[page] = key
            table.serials.append(serial)
            if unread is not None and (i + 1) * size > unread:
                self._unread.add(page)

    def leave_unread(self, request_id: str, start: int) -> None:
        """From this token on, its sealed pages are not read either."""
        table = self.tables[request_id]
        pages = table.pages[start // self.page_size : len(table.serials)]
        self._unread.update(p for p in pages if p in self._key_of)

    def first_unread(self, request_id: str, computed: int) -> int | None:
        """Where the first of its pages begins that was not read, of those with the first `computed` tokens."""
        if not self._unread:
            return None
        pages = self.tables[request_id].pages[: computed // self.page_size]
        return next((i * self.page_size for i, page in enumerate(pages) if page in self._unread), None)

    def forget(self, request_id: str, computed: int) -> None:
        """A forward failed: unregister the pages behind the first `computed` tokens, whose content is in doubt."""
        table = self.tables.get(request_id, Table())
        for page in table.pages[computed // self.page_size :]:
            self._unseal(page)

    # -------------------------------------------------------------- drafts
    @staticmethod
    def moves(slots: np.ndarray, base: int, accepted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Slots to copy (from, to) so that the accepted nodes stand right behind the `base` tokens before the draft.

        Node i was written at index base + i; the k-th accepted one belongs at base + k. A chain needs no move.
        """
        out = [(i, k) for k, i in enumerate(accepted) if i != k]
        if not out:
            return NOTHING, NOTHING
        source = np.array([slots[base + i] for i, _ in out], dtype=np.int64)
        target = np.array([slots[base + k] for _, k in out], dtype=np.int64)
        return source, target

    # -------------------------------------------------------------- pages
    def _take(self, after: int | None) -> int:
        """A page for one owner, next to `after` where possible (contiguous slots are read without gathering)."""
        if after is not None and after + 1 < self.num_pages and self._is_free[after + 1]:
            page = after + 1
        elif self._num_free:
            page = heapq.heappop(self._free)
            while not self._is_free[page]:
                page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self._unseal(page)
            self._users[page] = 1
            self._tell(page)
            return page
        self._is_free[page] = False
        self._num_free -= 1
        self._users[page] = 1
        return page

    def _share(self, page: int) -> None:
        self._idle.pop(page, None)
        self._users[page] += 1

    def _drop(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page]:
            return
        if page in self._key_of:
            self._idle[page] = None
        else:
            self._release(page)

    def _named(self, pages: list[int]) -> Text:
        """Those that others can find, each with its serial: page numbers come again."""
        return [(p, self._sealed[self._key_of[p]][1]) for p in pages if p in self._key_of]

    def _remember(self, text: Text, most: int) -> None:
        """This text is the newest now. One that another begins with does not count."""
        if not text:
            return
        text = next((t for t in self._texts if t[: len(text)] == text), text)
        self._texts = deque(t for t in self._texts if t != text[: len(t)])
        self._texts.append(text)
        while len(self._texts) > most:
            self._forget_idle(self._texts.popleft())

    def _forget_idle(self, text: Text) -> None:
        """Let go of these pages, but for those in use and those of another text."""
        if not any(page in self._idle for page, _ in text):
            return
        others = {named for t in self._texts for named in t}
        for page, serial in reversed(text):
            if page in self._idle and (page, serial) not in others and self._named([page]) == [(page, serial)]:
                self._unseal(page)

    def forget_finished(self) -> None:
        """Nothing of texts that are over is found any more."""
        self._texts.clear()
        for page in reversed(list(self._idle)):
            self._unseal(page)

    def _tell(self, page: int) -> None:
        if self._freed is not None:
            self._freed(page)

    def _release(self, page: int) -> None:
        self._tell(page)
        self._is_free[page] = True
        self._num_free += 1
        heapq.heappush(self._free, page)
        if len(self._free) > 4 * self.num_pages:
            self._free = [p for p in range(self.num_pages) if self._is_free[p]]

    def _unseal(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._sealed[key]
            self._unread.discard(page)
            if page in self._idle:
                del self._idle[page]
                self._release(page)

    def _list_slots(self, table: Table) -> None:
        """Pages were added or taken away at the end of the table: list the slots of what it has now."""
        size, known, count = self.page_size, len(table.slots), len(table.pages) * self.page_size
        if count > len(table.room):
            table.room = np.concatenate([table.slots, np.empty(2 * count - known, dtype=np.int64)])
        for at in range(known, count, size):
            np.add(self._offsets, table.pages[at // size] * size, out=table.room[at : at + size])
        table.slots, table.numbers = table.room[:count], np.array(table.pages, np.int32)

    # -------------------------------------------------------------- proof
    def check_integrity(self) -> None:
        """Every page is free, idle or in as many tables as it has users; every seal points at a live page."""
        users = [0] * self.num_pages
        for table in self.tables.values():
            assert len(table.serials) <= len(table.pages)
            assert len(set(table.pages)) == len(table.pages), "a table lists a page twice"
            listed = (np.array(table.pages, np.int64)[:, None] * self.page_size + self._offsets).reshape(-1)
            assert np.array_equal(table.slots, listed), "slots and pages disagree"
            for page in table.pages:
                users[page] += 1
        assert users == self._users, "reference counts are off"
        for page in range(self.num_pages):
            states = (self._is_free[page], page in self._idle, users[page] > 0)
            assert sum(states) == 1, f"page {page} is free/idle/used: {states}"
            assert not (users[page] > 1 and page not in self._key_of), f"page {page} is shared but not sealed"
        assert self._num_free == sum(self._is_free)
        assert {p for p, f in enumerate(self._is_free) if f} <= set(self._free)
        assert set(self._key_of) == {page for page, _ in self._sealed.values()}
        for key, (page, _) in self._sealed.items():
            assert self._key_of[page] == key
        assert self._unread <= set(self._key_of)
        assert set(self._idle) <= set(self._key_of)
