"""The engine's forwards on llama.cpp: rows become tokens in sequences, drafts become paths."""

from __future__ import annotations

import numpy as np
import torch

from headstart import tree
from headstart.core import Batch, Forward, Segment
from headstart.errors import ConfigError
from headstart.models.base import Runner
from headstart.models.llamacpp.native import MOST_SEQUENCES, LlamaContext, LlamaFile
from headstart.models.llamacpp.sequences import Sequences

KEPT_TEXTS = 32  # finished texts whose KV stays for others to find
PATHS = 64  # most leaves of the trees of one forward


class LlamaRunner(Runner):
    max_texts = KEPT_TEXTS
    most_paths = PATHS
    hidden_states = False
    runs_on = True
    reads_unwritten = False
    prefers_chains = True  # a row costs nearly as much as a token, and the cells of a tree stay out of order
    usual_slots = 32768  # llama.cpp writes to all of its KV at start

    def __init__(self, file: LlamaFile) -> None:
        self.file = file
        self.device, self.dtype = torch.device("cpu"), torch.float32  # of the logits
        self.vocab_size = file.vocab_size
        self.context: LlamaContext | None = None

    @property
    def slot_bytes(self) -> int:
        return self.file.slot_bytes

    @property
    def weight_bytes(self) -> int:
        return self.file.weight_bytes

    def allocate(self, num_slots: int, page_size: int = 16, max_rows: int = 512, max_segments: int = 64) -> None:
        """Make the context. Its cells are as many as the slots, since each holds one."""
        self.release()
        self.page_size = page_size
        if max_segments > MOST_SEQUENCES - KEPT_TEXTS - PATHS:
            most = MOST_SEQUENCES - KEPT_TEXTS - PATHS
            raise ConfigError(
                f"llama.cpp runs at most {most} requests at once here: lower max_num_seqs ({max_segments})."
            )
        seqs = max_segments + KEPT_TEXTS + PATHS
        self.context = LlamaContext(self.file, num_slots, max_rows, seqs, seqs)  # a prompt's row may be in all of them
        self.seqs = Sequences(self.context, seqs)

    def forward(self, batch: Batch) -> Forward:
        assert self.context is not None
        rows: list[list[int]] = []
        for segment in batch.segments:
            self.seqs.forget(segment.slots[len(segment.slots) - segment.num_new :].tolist())
        try:
            if batch.stops is not None:
                return self._run_on(self.context, batch, batch.stops)
            for segment in batch.segments:
                rows += self._chain(segment) if segment.parents is None else self._tree(segment)
            logits = self.context.decode(batch.tokens, batch.positions, rows, batch.rows)
        except Exception:
            for segment in batch.segments:  # nobody knows how much of it was written
                self.seqs.forget(segment.slots[segment.context :].tolist())
            raise
        finally:
            self.seqs.end()
        return Forward(torch.from_numpy(logits))

    def _run_on(self, context: LlamaContext, batch: Batch, stops: frozenset[int]) -> Forward:
        """The known token of one text, and the likeliest ones after it."""
        (segment,) = batch.segments
        seq = self.seqs.open(segment.slots[: segment.context])
        token, ran = int(batch.tokens[0]), []
        for position, slot in enumerate(segment.slots[segment.context :].tolist(), segment.context):
            self.seqs.write([seq], slot)
            logits = context.decode_one(token, position, seq)
            token = int(logits.argmax())
            ran.append(token)
            if token in stops:
                break
        return Forward(torch.from_numpy(logits)[None], ran=ran)

    def _chain(self, segment: Segment) -> list[list[int]]:
        """The sequences of each row."""
        seq = self.seqs.open(segment.slots[: segment.context])
        out: list[list[int]] = []
        for slot in segment.slots[segment.context :].tolist():
            out.append([seq])
            self.seqs.write(out[-1], slot)
        return out

    def _tree(self, segment: Segment) -> list[list[int]]:
        """A sequence for each path; a row is in those of all paths through it."""
        assert segment.parents is not None
        parents, slots = segment.parents.tolist(), segment.slots[segment.context :]
        first = len(parents) - segment.num_new
        inner = set(parents)
        out: list[list[int]] = [[] for _ in range(segment.num_new)]
        for leaf in (i for i in range(first, len(parents)) if i not in inner):
            path = tree.path(parents, leaf)
            old = [i for i in path if i < first]
            seq = self.seqs.open(np.concatenate([segment.slots[: segment.context], slots[old]]))
            for i in path[len(old) :]:
                out[i - first].append(seq)
        for row, slot in zip(out, slots[first:].tolist(), strict=True):
            self.seqs.write(row, slot)
        return out

    # -------------------------------------------------------------- slots
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Accepted nodes take the slots behind their context. Nothing is copied: a cell changes its name."""
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            self.seqs.rename(a, b)

    def keep(self, slots: np.ndarray, length: int) -> None:
        if length < len(slots):
            self.seqs.forget(slots[length:].tolist())

    def freed(self, page: int) -> None:
        if self.context is not None:
            self.seqs.forget(range(page * self.page_size, (page + 1) * self.page_size))

    def release(self) -> None:
        if self.context is not None:
            self.context.close()
            self.context = None
