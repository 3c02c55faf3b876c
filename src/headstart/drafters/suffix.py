"""Suffix decoding: find where the end of this text stood before, here or in past outputs, and propose what followed.

A history is a ring of tokens with hash chains, as in a Lempel-Ziv match finder: each place links to the place before it
whose last two tokens fall into the same bucket. Adding a token touches one bucket, a look-up follows a bounded chain,
and memory is a fixed number of bytes per token. From the matching places grows a tree of continuations, by how often
each was seen.
"""

from __future__ import annotations

import heapq
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from headstart.config import SpeculativeConfig
from headstart.core import Draft, RequestView, Tree, View
from headstart.drafters import Drafter, Surroundings
from headstart.errors import ConfigError
from headstart.progress import note

GAP = -1  # stands between two texts
NOWHERE = -1
MAX_CANDIDATES = 48  # places compared per look-up
MAX_HOPS = 128  # links followed per look-up


class History:
    """Up to `limit` tokens in order of arrival; the oldest give way."""

    def __init__(self, limit: int, max_texts: int = 1 << 30) -> None:
        self.limit, self.max_texts = max(limit, 2), max_texts
        self._starts: deque[int] = deque()  # where each text begins
        self._size = 0
        self.end = 0  # tokens ever added; a place is a number below this
        self._floor = 0  # places below it are gone
        self._resize(1024)

    def _resize(self, size: int) -> None:
        old = [self[p] for p in range(self.start, self.end)] if self._size else []
        begin = self.start if self._size else 0
        self._size, self._mask = size, size - 1
        self._tokens = array("i", [GAP]) * size
        self._before = array("q", [NOWHERE]) * size  # place -> earlier place of the same bucket
        self._latest = array("q", [NOWHERE]) * size  # bucket -> latest place
        self._floor, self.end = begin, begin
        self.extend(old)

    @property
    def start(self) -> int:
        """The oldest place still held."""
        return max(self._floor, self.end - min(self.limit, self._size))

    def __getitem__(self, place: int) -> int:
        return self._tokens[place & self._mask]

    def __len__(self) -> int:
        return self.end - self.start

    def _bucket(self, a: int, b: int) -> int:
        return (a * 0x9E3779B1 ^ b * 0x85EBCA77) >> 7 & self._mask

    def extend(self, tokens: Iterable[int]) -> None:
        """More of the current text."""
        tokens = list(tokens)
        while self.end - self._floor + len(tokens) > self._size and self._size < self.limit:
            self._resize(2 * self._size)
        ring, before, latest, mask, bucket_of = self._tokens, self._before, self._latest, self._mask, self._bucket
        place, first = self.end, self._floor + 2
        a, b = ring[place - 2 & mask], ring[place - 1 & mask]
        for token in tokens:
            if place >= first:  # what stands before `place` can be looked up from now on
                bucket = bucket_of(a, b)
                before[place & mask] = latest[bucket]
                latest[bucket] = place
            ring[place & mask] = token
            a, b = b, token
            place += 1
        self.end = place

    def add_text(self, tokens: Iterable[int]) -> None:
        """A whole text, kept apart from its neighbours."""
        if self.max_texts < 1:
            return
        self._starts.append(self.end)
        while len(self._starts) > self.max_texts:
            self._starts.popleft()
            self._floor = max(self._floor, self._starts[0])
        self.extend(tokens)
        self.extend([GAP])

    def texts(self) -> list[list[int]]:
        """What is held, text by text."""
        out: list[list[int]] = [[]]
        for place in range(self.start, self.end):
            if self[place] == GAP:
                out.append([])
            else:
                out[-1].append(self[place])
        return [t for t in out if t]

    def matches(self, tail: Sequence[int], longest: int) -> list[tuple[int, int]]:
        """Places whose left side agrees with the end of `tail`: (length of the agreement, place), at least two tokens."""
        if len(tail) < 2:
            return []
        tail = array("i", tail[-longest:])
        out: list[tuple[int, int]] = []
        place, first = self._latest[self._bucket(tail[-2], tail[-1])], self.start
        for _ in range(MAX_HOPS):
            if place - 2 < first or len(out) >= MAX_CANDIDATES:
                break
            length = self._agreement(tail, place, place - first)
            if length >= 2:
                out.append((length, place))
            earlier = self._before[place & self._mask]
            if earlier >= place:
                break
            place = earlier
        return out

    def _agreement(self, tail: array[int], place: int, most: int) -> int:
        """How many tokens before `place`, of at most `most`, are those at the end of `tail`."""
        tokens, mask = self._tokens, self._mask
        most = min(len(tail), most)
        last = place & mask
        if last >= most and tokens[last - most : last] == tail[len(tail) - most :]:
            return most  # all of it, with one comparison, since it does not go round the ring
        for n in range(most):
            if tokens[(place - 1 - n) & mask] != tail[-1 - n]:
                return n
        return most

    def after(self, place: int, most: int) -> list[int]:
        """Up to `most` tokens from this place on, to the end of its text."""
        stop = min(self.end, place + most)
        at = place & self._mask
        found = self._tokens[at : at + stop - place].tolist()
        found += self._tokens[: stop - place - len(found)].tolist()
        return found[: found.index(GAP)] if GAP in found else found


@dataclass
class Proposal:
    tree: Tree
    score: float  # expected number of accepted tokens, if the past is a guide


def grow(
    history: History, places: list[int], budget: int, max_depth: int, min_prob: float, matched: int = 0
) -> Proposal:
    """The likeliest continuations of these places, best first, as one tree. `matched`: tokens that they follow."""
    kinds: list[int] = []
    tree, score, length = Tree(kinds=kinds), 0.0, min(matched.bit_length(), 5)
    seen = Counter(tuple(history.after(place, max_depth)) for place in places)
    texts, weights = list(seen), list(seen.values())
    heap: list[tuple[float, int, int, int, int, list[int]]] = []
    count = 0

    def offer(parent: int, depth: int, chance: float, here: list[int]) -> None:
        """Whatever comes at this depth in the texts `here`."""
        nonlocal count
        follow: dict[int, list[int]] = {}
        for i in here:
            if depth < len(texts[i]):
                follow.setdefault(texts[i][depth], []).append(i)
        whole = sum([weights[i] for i in here])
        for token, after in follow.items():
            p = chance * sum([weights[i] for i in after]) / whole
            if p >= min_prob:
                heapq.heappush(heap, (-p, count, parent, depth, token, after))
                count += 1

    offer(-1, 0, 1.0, list(range(len(texts))))
    while heap and len(tree) < budget:
        p, _, parent, depth, token, after = heapq.heappop(heap)
        rest: Sequence[int] = (token,)
        if not heap and len(after) == 1:  # one way is left
            rest = texts[after[0]][depth : depth + budget - len(tree)]
        for token in rest:
            tree.tokens.append(token)
            tree.parents.append(parent)
            kinds.append(4 * length + min(3, int(-4 * p)))
            parent = len(tree) - 1
            score -= p
        if len(rest) == 1:
            offer(parent, depth + 1, -p, after)
    return Proposal(tree, score)


class SuffixDrafter(Drafter):
    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        super().__init__(config, around)
        self._own: dict[str, History] = {}
        self._seen: dict[str, int] = {}
        self._file = Path(config.suffix_cache).expanduser() if config.suffix_cache else None
        if self._file is not None and not self._file.parent.is_dir():
            raise ConfigError(f"suffix_cache {self._file} cannot be written: there is no folder {self._file.parent}.")
        self.forget()

    def forget(self) -> None:
        """The past is what it was at the beginning."""
        self.past = History(self.config.suffix_max_tokens, self.config.suffix_max_requests)
        if self._file is not None and self._file.exists():
            self.load(self._file)
        elif self.config.suffix_corpus:  # a saved cache has it already
            self.prefill(Path(self.config.suffix_corpus).expanduser())

    def propose(self, view: View) -> Draft:
        return Draft.of([self._tree(r) for r in view.requests])

    def _tree(self, r: RequestView) -> Tree:
        own = self._own.get(r.id)
        if own is None:
            own = self._own[r.id] = History(1 << 30)
        own.extend(r.tokens[self._seen.get(r.id, 0) :])
        self._seen[r.id] = len(r.tokens)
        tail = r.tokens[-self.config.suffix_max_depth :]
        best = self._best(self.past, tail, r, self._best(own, tail, r, Proposal(Tree(), 0.0)))
        return best.tree if len(best.tree) >= max(1, self.config.min_draft_tokens) else Tree()

    def _best(self, history: History, tail: Sequence[int], r: RequestView, best: Proposal) -> Proposal:
        """Over how much of the match to insist on: long matches are few and sure, short ones many and vague."""
        deepest = min(r.max_depth, self.config.num_speculative_tokens)
        if best.score >= min(r.budget, deepest):  # every token of it is sure
            return best
        found = history.matches(tail, self.config.suffix_max_depth)
        lengths = sorted({n for n, _ in found}, reverse=True)
        for least in dict.fromkeys([*lengths[:2], *lengths[-1:]]):
            depth = min(deepest, int(self.config.suffix_factor * least + 1e-9))
            if best.score >= min(r.budget, depth):
                break
            places = [p for n, p in found if n >= least]
            grown = grow(history, places, r.budget, depth, self.config.suffix_min_prob, least)
            if grown.score > best.score:
                best = grown
        return best

    def release(self, request: RequestView) -> None:
        """A finished request's output joins the past."""
        self._own.pop(request.id, None)
        self._seen.pop(request.id, None)
        output = request.tokens[request.num_prompt :]
        if len(output) > 2 and self.config.suffix_max_requests:
            self.past.add_text(output)

    def describe(self) -> str:
        return f"suffix, {len(self.past)} tokens of past outputs, trees of up to {self.config.nodes} nodes"

    # -------------------------------------------------------------- the past on disk
    def save(self, path: Path) -> None:
        """Write the past outputs (token ids) to a file."""
        texts = self.past.texts()
        part = path.with_name(path.name + ".part")
        with part.open("wb") as sink:
            np.savez_compressed(
                sink,
                vocab_size=np.int64(self.around.vocab_size),
                lengths=np.array([len(t) for t in texts], dtype=np.int64),
                tokens=np.array([t for text in texts for t in text], dtype=np.int32),
            )
        part.replace(path)

    def load(self, path: Path) -> None:
        """Add the past outputs of a file."""
        try:
            with np.load(path, allow_pickle=False) as data:
                vocab, lengths, tokens = int(data["vocab_size"]), data["lengths"], data["tokens"]
            if len(tokens) != int(lengths.sum()):
                raise ValueError("its lengths do not add up")
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
            raise ConfigError(f"{path} is not a suffix cache that Headstart wrote ({error}).") from error
        if vocab != self.around.vocab_size:
            raise ConfigError(
                f"{path} was written for a vocabulary of {vocab}, this model has {self.around.vocab_size}: "
                "use another suffix_cache file for this model."
            )
        for text in np.split(tokens, np.cumsum(lengths)[:-1]):
            self.past.add_text(text.tolist())

    def prefill(self, path: Path) -> None:
        """Fill the past with a text file, paragraph by paragraph."""
        if self.around.tokenizer is None:
            raise ConfigError("suffix_corpus needs a tokenizer, and this model was given without one.")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"suffix_corpus {path} cannot be read as text: {error}.") from error
        for paragraph in text.split("\n\n"):
            if paragraph.strip():
                self.past.add_text(self.around.tokenizer.encode(paragraph, special=False))
        note(f"suffix: {len(self.past)} tokens from {path}")

    def close(self) -> None:
        if self._file is not None:
            self.save(self._file)
