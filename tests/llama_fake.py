"""llama.cpp without llama.cpp: its cells and its refusals, with a tiny transformers model for the numbers.

A cell has a position, a token and the sequences that it belongs to. A token sees the cells of its sequences up to its own
position, so what it sees is a list of tokens, and its logits are the tiny model's on that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headstart.models.llamacpp.native import LlamaFile, LlamaOptions
from headstart.models.llamacpp.runner import LlamaRunner
from headstart.models.llamacpp.sequences import GONE

made: list[FakeContext] = []  # every context of a test, oldest first


class FakeFile(LlamaFile):
    """A tiny transformers model in the place of a GGUF file."""

    def __init__(self, model: Any) -> None:
        self.model, self.options, self.device = model, LlamaOptions(), "cpu"
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.weight_bytes, self.max_len = 1000, 512
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    @property
    def slot_bytes(self) -> int:
        return 64

    def close(self) -> None: ...

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """(V,) behind each of these texts. All that are new are computed together; a text is computed once."""
        keys = [tuple(text) for text in texts]
        if new := sorted({key for key in keys if key not in self._known}):
            size = max(map(len, new))
            ids = torch.tensor([[*key, *[0] * (size - len(key))] for key in new], device=self.model.device)
            rows = self.model(ids, use_cache=False).logits[range(len(new)), [len(key) - 1 for key in new]]
            self._known.update(zip(new, rows.float().cpu().numpy(), strict=True))
        return [self._known[key] for key in keys]


class Blank(FakeFile):
    """A vocabulary and nothing else, where only the cells matter."""

    def __init__(self, vocab_size: int = 2) -> None:
        self.vocab_size = vocab_size

    def logits(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.zeros(self.vocab_size, np.float32) for _ in texts]


@dataclass(eq=False)
class Cell:
    position: int
    token: int
    seqs: set[int]


class FakeContext:
    """The same methods as LlamaContext. What llama.cpp refuses, or would compute wrongly, raises."""

    def __init__(self, file: FakeFile, cells: int, rows: int, seqs: int, most_paths: int) -> None:
        self.file, self.num_cells, self.rows, self.num_seqs, self.most_paths = file, cells, rows, seqs, most_paths
        self.of: dict[int, dict[int, Cell]] = {}  # sequence -> position -> cell
        self.read: list[list[int]] = []  # what each token of the last batch saw
        self.sizes: list[int] = []  # tokens of each batch
        self.copies = 0
        self.breaks: str = ""  # "before" or "after" its cells are written, the next batch fails
        self.closed = False
        self._room = np.empty((rows, file.vocab_size), np.float32)
        made.append(self)

    @property
    def cells(self) -> set[Cell]:
        return {cell for held in self.of.values() for cell in held.values()}

    def held(self, seq: int) -> list[Cell]:
        """The cells of a sequence, in the order of their positions."""
        found = self.of.get(seq, {})
        return [found[p] for p in sorted(found)]

    # -------------------------------------------------------------- memory
    def remove(self, seq: int, start: int, stop: int) -> None:
        self._open(seq)
        held = self.of.get(seq, {})
        for position in [p for p in held if start <= p < stop]:
            held.pop(position).seqs.remove(seq)
        if not held:
            self.of.pop(seq, None)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        self._open(source, target)
        self.copies += 1
        held = self.of.get(source, {})
        missing = [p for p in range(start, stop) if p not in held]
        assert not missing and start < stop, f"sequence {source} has nothing at {missing or start}"
        for position in range(start, stop):
            self._put(target, held[position])

    def _put(self, seq: int, cell: Cell) -> None:
        there = self.of.setdefault(seq, {}).setdefault(cell.position, cell)
        assert there is cell, f"sequence {seq} has two cells at position {cell.position}"
        cell.seqs.add(seq)

    def _open(self, *seqs: int) -> None:
        assert not self.closed, "the context was closed"
        assert all(0 <= s < self.num_seqs for s in seqs), f"there are {self.num_seqs} sequences, not {seqs}"

    # -------------------------------------------------------------- computing
    def decode_one(self, token: int, position: int, seq: int) -> np.ndarray:
        return self.decode(np.array([token]), np.array([position]), [[seq]], np.array([0]))[0]

    def decode(
        self, tokens: np.ndarray, positions: np.ndarray, seqs: Sequence[Sequence[int]], rows: np.ndarray
    ) -> np.ndarray:
        own = [list(s) for s in seqs]
        assert len(tokens) == len(positions) == len(own) <= self.rows and len(tokens)
        assert list(rows) == sorted(set(rows.tolist())), "llama.cpp gives logits in the order of the batch"
        self._check(tokens.tolist(), positions.tolist(), own)
        self._fail("before")
        for token, position, mine in zip(tokens.tolist(), positions.tolist(), own, strict=True):
            cell = Cell(position, token, set())
            for seq in mine:
                self._put(seq, cell)
        self._fail("after")
        self.sizes.append(len(tokens))
        self.read = [self._seen(mine, p) for mine, p in zip(own, positions.tolist(), strict=True)]
        return self._logits(rows.tolist())

    def _fail(self, when: str) -> None:
        if self.breaks == when:
            self.breaks = ""
            raise RuntimeError("llama.cpp could not compute the batch (code -3: on purpose)")

    def _check(self, tokens: list[int], positions: list[int], own: list[list[int]]) -> None:
        """What llama_decode looks at before it computes anything."""
        if not all(0 <= t < self.file.vocab_size for t in tokens):
            raise RuntimeError("invalid token")
        here: dict[int, list[int]] = {}
        for position, mine in zip(positions, own, strict=True):
            self._open(*mine)
            assert 0 < len(mine) == len(set(mine)) <= self.most_paths, f"{len(mine)} sequences for a token"
            for seq in mine:
                here.setdefault(seq, []).append(position)
                if self._span(seq) != self._span(mine[0]):
                    raise RuntimeError(f"sequence {seq} is coupled to {mine[0]}, but they have diverged")
        for seq, found in here.items():
            first = self._span(seq)[1] + 1
            if found != list(range(first, first + len(found))):
                raise RuntimeError(f"sequence {seq} ends at {first - 1}, and the batch goes on at {found}")
        if len(tokens) > self.num_cells - len(self.cells):
            raise RuntimeError("failed to find a memory slot (code 1)")

    def _span(self, seq: int) -> tuple[int, int]:
        held = self.of.get(seq)
        return (min(held), max(held)) if held else (-1, -1)

    def _seen(self, mine: list[int], position: int) -> list[int]:
        """The mask follows a token's first sequence; with the others it must have the same past."""
        pasts = []
        for seq in mine:
            held = self.of[seq]
            assert all(p in held for p in range(position + 1)), f"sequence {seq} has a hole before {position}"
            pasts.append([held[p].token for p in range(position + 1)])
        assert all(past == pasts[0] for past in pasts), "one token, two pasts"
        return pasts[0]

    def _logits(self, rows: list[int]) -> np.ndarray:
        """In one buffer, which the next call overwrites."""
        self._room[:] = np.nan
        for i, line in enumerate(self.file.logits([self.read[row] for row in rows])):
            self._room[i] = line
        return self._room[: len(rows)]

    def close(self) -> None:
        self.closed = True


def check(runner: LlamaRunner) -> None:
    """Slots that sequences hold and cells are one to one; nothing is left of the last forward; the numbers are bounded."""
    memory, seqs = runner.context, runner.seqs
    assert isinstance(memory, FakeContext)
    cell_of: dict[int, Cell] = {}
    for seq, held in seqs.held.items():
        cells, there = memory.held(seq), [(p, s) for p, s in enumerate(held.slots.tolist()) if s != GONE]
        assert [c.position for c in cells] == [p for p, _ in there], f"sequence {seq}: slots and cells differ"
        for (_, slot), cell in zip(there, cells, strict=True):
            assert cell_of.setdefault(slot, cell) is cell, f"slot {slot} is two cells"
            assert seqs._of[slot][seq] == cell.position
    assert len(set(cell_of.values())) == len(cell_of), "two slots share a cell"
    assert set(cell_of.values()) == memory.cells, "cells that no slot knows"
    assert {slot for slot, owners in seqs._of.items() if owners} == set(cell_of)
    assert len(memory.cells) <= memory.num_cells
    assert set(memory.of) <= set(seqs.held) and not seqs._busy and not seqs._rows
    assert sorted([*seqs.held, *seqs._free]) == list(range(memory.num_seqs)), "a sequence is lost or counted twice"
