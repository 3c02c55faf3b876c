"""Tokens become text: unfinished UTF-8 is held back, stop strings may span tokens, and nothing behind a stop leaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class TextStream:
    """One request's text. Feed it tokens in order; it says what is safe to show and when a stop string is complete."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        """`before`: the last tokens of the prompt, so that a first token keeps its leading space."""
        self._decode, self._stop, self._include_stop = decode, tuple(stop), include_stop
        self._tokens: list[int] = list(before)
        self._start, self._read = 0, len(self._tokens)  # text of tokens[start:read] is known; what follows it is new
        self.text = ""  # all of it, up to a stop
        self._shown = 0
        self._finished = False
        self.stopped_by: str | None = None

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add one token; True when it completed a stop string (the text is then cut there)."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._read])
        grown = self._decode(self._tokens[self._start :])
        if grown.endswith("\ufffd"):  # a character is unfinished; a stop may stand before it all the same
            whole = grown[len(known) :].rstrip("\ufffd")
            done = any(s in self.text[max(0, len(self.text) - len(s) + 1) :] + whole for s in self._stop)
            return may_stop and done and self._append(whole)
        if len(grown) <= len(known):
            return False
        return self._append(grown[len(known) :], may_stop)

    def extend(self, tokens: Sequence[int]) -> None:
        """Many at once, for whoever looks at the text only when it is finished, and has no stop strings."""
        self._tokens += tokens

    def finish(self) -> None:
        """No more tokens come: unfinished characters become visible as they are."""
        if self.stopped_by is None:
            known = self._decode(self._tokens[self._start : self._read])
            self._append(self._decode(self._tokens[self._start :])[len(known) :])
        self._finished = True

    def take(self) -> str:
        """Text that may be shown now: not a part of what could become a stop string."""
        end = len(self.text)
        if not self._finished and self.stopped_by is None:
            end -= begun(self.text, self._stop)
        out = self.text[self._shown : end]
        self._shown = max(end, self._shown)
        return out

    def _append(self, new: str, may_stop: bool = True) -> bool:
        begin = len(self.text)
        self.text += new
        self._start, self._read = self._read, len(self._tokens)
        found = [(self.text.find(s, max(0, begin - len(s) + 1)), s) for s in self._stop]
        hits = [(at + len(s), at, s) for at, s in found if at >= 0]
        if not hits or not may_stop:
            return False
        end, at, self.stopped_by = min(hits)
        self.text = self.text[: end if self._include_stop else at]
        return True


class Spans(Generic[T]):
    """Which token each piece of an answer came from, by a mark that tokens are given. The text may trail its tokens: some of it
    is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._stream = TextStream(decode)
        self._due: deque[tuple[int, T]] = deque()  # characters that are still to come, and their token's mark

    def cut(self, tokens: Iterable[tuple[int, T]], text: str) -> list[tuple[str, T | None]]:
        """New tokens with their marks, and the text that became visible with them, in pieces."""
        for token, mark in tokens:
            before = len(self._stream.text)
            self._stream.push(token)
            self._due.append((len(self._stream.text) - before, mark))
        out: list[tuple[str, T | None]] = []
        while text:
            length, own = self._due.popleft() if self._due else (len(text), None)
            if length > len(text):
                self._due.appendleft((length - len(text), own))  # type: ignore[arg-type]
            if length:
                out.append((text[:length], own))
            text = text[length:]
        return out


def begun(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of the text that begins one of these words, and is not the whole of it."""
    longest = max((len(word) for word in words), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(word.startswith(text[-n:]) for word in words):
            return n
    return 0
