"""Slots, as the engine counts them, and sequences, as llama.cpp does.

The engine owns slots: a request's table lists them in the order of its text, drafts are trees over them, sealed pages are
shared. llama.cpp owns cells: each has a position and a set of sequences, and a token sees the cells of its own sequences.
Here every slot that holds something is one cell, and a sequence is a list of slots, the k-th at position k. For a forward,
each path through a request's slots needs a sequence of its own: one is found, or put together from others without computing
anything. Only slots matter; whose they are does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Memory(Protocol):
    """What llama.cpp's memory can do."""

    def remove(self, seq: int, start: int, stop: int) -> None:
        """Take this sequence off its cells at these positions; cells without a sequence are free."""
        ...

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Put `target` on the cells of `source` at these positions."""
        ...


class Lost(Exception):
    """A slot that is to be read holds nothing."""


GONE = -1  # in the place of a slot that holds nothing any more, while something behind it does


class Held:
    """The slots of one sequence, in order: an array with room to grow. The last one is never GONE."""

    def __init__(self) -> None:
        self._room, self.size = np.empty(256, np.int64), 0

    @property
    def slots(self) -> np.ndarray:
        return self._room[: self.size]

    def add(self, slots: np.ndarray) -> None:
        stop = self.size + len(slots)
        if stop > len(self._room):
            self._room = np.concatenate([self.slots, np.empty(2 * stop, np.int64)])
        self._room[self.size : stop] = slots
        self.size = stop


class Sequences:
    def __init__(self, memory: Memory, num_seqs: int) -> None:
        self.memory = memory
        self.held: dict[int, Held] = {}
        self._free = list(range(num_seqs - 1, -1, -1))
        self._of: dict[int, dict[int, int]] = {}  # slot -> its sequences, each with the slot's position there
        self._busy: set[int] = set()
        self._rows: dict[int, list[int]] = {}  # slots that this forward computes, with the sequences of their rows

    # -------------------------------------------------------------- for a forward
    def end(self) -> None:
        """The forward is over: no sequence is in use, and nothing is on its way."""
        self._busy.clear()
        self._rows.clear()

    def open(self, path: np.ndarray) -> int:
        """A sequence that holds exactly these slots, for this forward alone."""
        seq = self._found(path)
        if seq is None:
            seq = self._assembled(path)
        self._busy.add(seq)
        return seq

    def _found(self, path: np.ndarray) -> int | None:
        """One that ends here. Where another goes on, what follows belongs to somebody."""
        for seq in self._of.get(int(path[-1]), ()) if len(path) else ():
            held = self.held[seq]
            if seq not in self._busy and held.size == len(path) and np.array_equal(held.slots, path):
                return seq
        return None

    def _assembled(self, path: np.ndarray) -> int:
        """A new sequence, from pieces of those that hold these slots."""
        seq, at = self._new(), 0
        while at < len(path):
            source = next((s for s, p in self._of.get(int(path[at]), {}).items() if p == at), None)
            if source is None:
                self._end(seq)
                raise Lost(f"position {at} of {len(path)}")
            known = self.held[source].slots[at : len(path)]
            differ = np.flatnonzero(known != path[at : at + len(known)])
            stop = at + (int(differ[0]) if len(differ) else len(known))
            self._share(source, seq, at, path[at:stop])
            at = stop
        return seq

    def _share(self, source: int, seq: int, at: int, slots: np.ndarray) -> None:
        """Put a sequence on slots of another: on their cells, or, where this forward computes them, on their rows."""
        here = [int(s) for s in slots if int(s) in self._rows] if self._rows else []
        if len(here) < len(slots):
            self.memory.copy(source, seq, at, at + len(slots) - len(here))
        for slot in here:  # the last ones: what is on its way stands behind what is there
            self._rows[slot].append(seq)
        self._append(seq, slots)

    def write(self, row: list[int], slot: int) -> None:
        """This forward computes the next position of the sequences `row` into this slot."""
        self._rows[slot] = row
        for seq in row:
            self._append(seq, np.array([slot]))

    def forget(self, slots: Iterable[int]) -> None:
        """These slots hold nothing any more. What stands behind them may be read by others: it stays until it is named."""
        gone: dict[int, list[int]] = {}
        for slot in slots:
            for seq, at in self._of.pop(slot, {}).items():
                gone.setdefault(seq, []).append(at)
        for seq, places in gone.items():
            self._empty(seq, sorted(places))
            self._drop_if_spare(seq)

    def rename(self, source: int, target: int) -> None:
        """What is in one slot shall be in another; what was there is forgotten."""
        self.forget([target])
        seqs = self._of.pop(source, {})
        if seqs:
            self._of[target] = seqs
        for seq, at in seqs.items():
            self.held[seq].slots[at] = target

    def clear(self) -> None:
        for seq in list(self.held):
            self._end(seq)

    # -------------------------------------------------------------- sequences
    def _new(self) -> int:
        if not self._free:
            self._drop_spares()
        if not self._free:
            raise Lost("every sequence of llama.cpp's context is in use")
        seq = self._free.pop()
        self.held[seq] = Held()
        return seq

    def _append(self, seq: int, slots: np.ndarray) -> None:
        at = self.held[seq].size
        self.held[seq].add(slots)
        for i, slot in enumerate(slots.tolist(), at):
            if (owners := self._of.get(slot)) is None:
                self._of[slot] = {seq: i}
            else:
                owners[seq] = i

    def _empty(self, seq: int, places: list[int]) -> None:
        """Take these positions, ascending, from a sequence; run by run, and nearly always it is one run, at the end."""
        held = self.held[seq]
        breaks = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
        for a, b in itertools.pairwise([0, *breaks, len(places)]):
            self.memory.remove(seq, places[a], places[b - 1] + 1)
        held.slots[places] = GONE
        while held.size and held.slots[-1] == GONE:
            held.size -= 1

    def _end(self, seq: int) -> None:
        slots = self.held.pop(seq).slots
        if len(slots):
            self.memory.remove(seq, 0, len(slots))
        for slot in slots[slots != GONE].tolist():
            owners = self._of[slot]
            del owners[seq]
            if not owners:
                del self._of[slot]
        self._free.append(seq)

    def _drop_if_spare(self, seq: int) -> None:
        """A sequence whose slots another one has in the same places, or an empty one, is not needed."""
        slots = self.held[seq].slots
        if seq in self._busy:
            return
        there = np.flatnonzero(slots != GONE)
        others = self._of[int(slots[-1])] if len(slots) else {}
        if not len(slots) or any(o != seq and self._has(o, there, slots[there]) for o in others):
            self._end(seq)

    def _has(self, seq: int, places: np.ndarray, slots: np.ndarray) -> bool:
        held = self.held[seq].slots
        return len(held) > int(places[-1]) and np.array_equal(held[places], slots)

    def _drop_spares(self) -> None:
        for seq in list(self.held):
            self._drop_if_spare(seq)
