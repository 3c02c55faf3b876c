"""Answers packed into sequences of one length. Documents in a sequence do not see each other, and positions restart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.train.data import Answer

OPEN = 24  # sequences that are filled at the same time; more waste less


@dataclass(frozen=True)
class Document:
    """A prompt and its answer, cut to the length of a sequence."""

    tokens: list[int]
    answer: int  # where the answer begins
    greedy: bool


@dataclass(frozen=True)
class Place:
    """Where a document stands in a batch: rows of the flattened (B·S,) batch."""

    start: int
    length: int
    answer: int  # the first token of the answer, counted from `start`
    greedy: bool


@dataclass(frozen=True)
class Batch:
    """B sequences of S tokens. `asked` are the rows whose next token the target wrote: P places where it can be foreseen."""

    tokens: torch.Tensor  # (B, S) int64
    positions: torch.Tensor  # (B, S) int64
    docs: torch.Tensor  # (B, S) int64; 0 is padding
    asked: torch.Tensor  # (P,) rows of the flattened batch
    levels: list[
        tuple[torch.Tensor, torch.Tensor]
    ]  # (rows, places): row t drafts, at level k, what follows row t + 1 + k
    where: list[Place]

    def to(self, device: torch.device) -> Batch:
        """A copy on the device, which nobody waits for."""
        levels = [(_move(rows, device), _move(places, device)) for rows, places in self.levels]
        tokens, positions, docs, asked = (
            _move(x, device) for x in (self.tokens, self.positions, self.docs, self.asked)
        )
        return Batch(tokens, positions, docs, asked, levels, self.where)

    def tokens_after(self, n: int) -> torch.Tensor:
        """(B·S,) the token n places further on; at the end of a sequence something that does not count."""
        return self.tokens.roll(-n, 1).flatten()


def _move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def documents(answers: Sequence[Answer], length: int) -> list[Document]:
    """Answers that have something to learn from within `length` tokens."""
    out = []
    for a in answers:
        tokens = (a.prompt_ids + a.answer_ids)[:length]
        if len(a.prompt_ids) >= 1 and len(tokens) > len(a.prompt_ids) + 1:
            out.append(Document(tokens, len(a.prompt_ids), a.temperature == 0))
    return out


def split(answers: Sequence[Answer], share: float) -> tuple[list[Answer], list[Answer]]:
    """Training and held-out answers, by a hash of the prompt: all answers to a prompt are on one side, in every run."""
    train: list[Answer] = []
    held: list[Answer] = []
    for a in answers:
        digest = hashlib.sha256(a.id.rsplit("-", 1)[0].encode()).digest()
        (held if int.from_bytes(digest[:4], "big") < share * 2**32 else train).append(a)
    return train, held


def pack(docs: Sequence[Document], length: int) -> list[list[Document]]:
    """Sequences of at most `length` tokens: each document goes into the first open sequence with room for it."""
    full: list[list[Document]] = []
    bins: list[tuple[int, list[Document]]] = []  # (room, documents)
    for doc in docs:
        size = len(doc.tokens)
        i = next((i for i, (room, _) in enumerate(bins) if room >= size), None)
        if i is None:
            bins.append((length - size, [doc]))
            if len(bins) > OPEN:
                full.append(bins.pop(min(range(OPEN), key=lambda i: bins[i][0]))[1])
        else:
            bins[i] = (bins[i][0] - size, [*bins[i][1], doc])
    return full + [docs for _, docs in bins]


def collate(sequences: Sequence[Sequence[Document]], length: int, levels: int) -> Batch:
    """One batch of packed sequences, with the rows that count at each level."""
    tokens, positions, docs = (np.zeros((len(sequences), length), dtype=np.int64) for _ in range(3))
    where = []
    for b, sequence in enumerate(sequences):
        at = 0
        for number, doc in enumerate(sequence, start=1):
            here = slice(at, at + len(doc.tokens))
            tokens[b, here], positions[b, here], docs[b, here] = doc.tokens, np.arange(len(doc.tokens)), number
            where.append(Place(b * length + at, len(doc.tokens), doc.answer, doc.greedy))
            at = here.stop
    asked = np.concatenate([np.arange(p.start + p.answer - 1, p.start + p.length - 1) for p in where])
    starts = np.concatenate([np.full(p.length - p.answer, p.start) for p in where])
    rows = [_level(asked, starts, k) for k in range(levels)]
    made = [torch.from_numpy(x) for x in (tokens, positions, docs, asked)]
    return Batch(made[0], made[1], made[2], made[3], rows, where)


def _level(asked: np.ndarray, starts: np.ndarray, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of level k are k + 1 before the asked ones, as far as these lie in the same document."""
    rows = asked - 1 - k
    places = np.flatnonzero(rows >= starts)
    return torch.from_numpy(rows[places]), torch.from_numpy(places)


def batches(docs: Sequence[Document], length: int, size: int) -> list[list[list[Document]]]:
    """Batches of up to `size` sequences, in the order of `docs`."""
    sequences = pack(docs, length)
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def epochs(docs: Sequence[Document], length: int, size: int, levels: int, seed: int, step: int = 0) -> Iterator[Batch]:
    """Batches without end from the given step on; each epoch has its own order, which the seed decides."""
    epoch = 0
    while True:
        order = list(docs)
        random.Random(f"{seed} {epoch}").shuffle(order)
        groups = batches(order, length, size)
        for group in groups[step:]:
            yield collate(group, length, levels)
        step, epoch = max(0, step - len(groups)), epoch + 1
