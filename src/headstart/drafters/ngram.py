"""Prompt lookup: the last few tokens stood somewhere before; propose what followed them there.

An index per n-gram length maps each n-gram to the place right behind its latest occurrence. It grows by one entry per
length and token, so a proposal costs the same at any context length. Where the target's device keeps the texts, it looks
for itself, and nobody waits for what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstart.config import SpeculativeConfig
from headstart.core import PENDING, DeviceTexts, Draft, Mail, RequestView, Tree, View
from headstart.drafters import Drafter, Surroundings


class NgramIndex:
    """Latest occurrence of every n-gram of a growing list."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.places: dict[tuple[int, ...], int] = {}
        self.length = 0  # tokens indexed; the n-gram that ends the list is not, or it would find itself

    def update(self, tokens: Sequence[int]) -> None:
        for end in range(max(self.length, 1), len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.places[tuple(tokens[end - n : end])] = end
        self.length = len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Where the continuation of the longest matching n-gram begins, and how long that is."""
        for n in self.sizes:
            if n <= len(tokens):
                place = self.places.get(tuple(tokens[len(tokens) - n :]))
                if place is not None:
                    return place, n
        return None


def copy_from(tokens: Sequence[int], place: int, length: int) -> list[int]:
    """`length` tokens from `place` on; behind the end, what was copied so far goes on (a repetition goes round)."""
    out = list(tokens[place : place + length])
    period = len(tokens) - place
    while len(out) < length:
        out.append(out[len(out) - period])
    return out


class NgramDrafter(Drafter):
    ahead = repeats = True

    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        super().__init__(config, around)
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, view: View) -> Draft:
        if view.texts is not None:
            return self._on_device(view, view.texts)
        return Draft.of([self._chain(r) for r in view.requests])

    def _on_device(self, view: View, texts: DeviceTexts) -> Draft:
        """The same drafts, found by the device that keeps the texts: by mail."""
        from headstart.models.kernels.ahead import lookup

        sizes = [self._length(r) for r in view.requests]
        most = max(sizes)
        draft = Draft.of([Tree.chain([PENDING] * size) for size in sizes])
        if not most:
            return draft
        seats = texts.on_device([r.seat for r in view.requests])
        found = lookup(texts, seats, self.config.prompt_lookup_min, self.config.prompt_lookup_max, most)
        told = texts.read(found)
        starts = np.arange(len(sizes)) * (1 + most)
        index = [start + 1 + i for start, size in zip(starts.tolist(), sizes, strict=True) for i in range(size)]

        def wait() -> list[Tree]:
            return [Tree.chain(row[1:][: min(row[0], n)]) for row, n in zip(told().tolist(), sizes, strict=True)]

        draft.mail = Mail(found.view(-1), np.array(index, np.int64), wait, starts)
        return draft

    def _length(self, r: RequestView) -> int:
        """Tokens to draft where something is found."""
        length = min(r.budget, r.max_depth, self.config.num_speculative_tokens)
        return length if length >= max(1, self.config.min_draft_tokens) else 0

    def _chain(self, r: RequestView) -> Tree:
        index = self._indexes.get(r.id)
        if index is None:
            index = NgramIndex(self.config.prompt_lookup_min, self.config.prompt_lookup_max)
            self._indexes[r.id] = index
        index.update(r.tokens)
        found = index.find(r.tokens)
        length = self._length(r)
        if found is None or not length:
            return Tree()
        place, matched = found
        chain = Tree.chain(copy_from(r.tokens, place, length))
        chain.kinds = [matched] * length
        return chain

    def release(self, request: RequestView) -> None:
        self._indexes.pop(request.id, None)

    def describe(self) -> str:
        c = self.config
        return f"ngram, {c.prompt_lookup_min} to {c.prompt_lookup_max} tokens matched, up to {c.num_speculative_tokens} drafted"
