"""Text for people: which characters came out of an accepted draft, and how a terminal shows them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence

from headstart.core import Chunk
from headstart.text import TextStream

ACCEPTED = "green"
Piece = tuple[str, bool]  # text, and whether it was drafted
# Control characters of a model's text must not steer the terminal.
_VISIBLE = (
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)
)


class Painter:
    """Splits one answer's text into drafted and own pieces. The text may trail its tokens: some of it is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._stream = TextStream(decode)
        self._spans: deque[tuple[int, bool]] = deque()  # characters that are due, and whether they were drafted

    def pieces(self, chunk: Chunk) -> list[Piece]:
        for token, drafted in zip(chunk.token_ids, chunk.from_draft, strict=True):
            before = len(self._stream.text)
            self._stream.push(token)
            self._spans.append((len(self._stream.text) - before, drafted))
        return self._cut(chunk.text)

    def _cut(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        while text:
            length, drafted = self._spans.popleft() if self._spans else (len(text), False)
            if length > len(text):
                self._spans.appendleft((length - len(text), drafted))
            if length:
                out.append((text[:length], drafted))
            text = text[length:]
        return out


class Printer:
    """Writes an answer to standard output as it comes: coloured in a terminal, plain in a pipe."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._painter = Painter(decode) if self._console.is_terminal else None

    def add(self, chunk: Chunk) -> None:
        if self._painter is None:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            return
        from rich.text import Text

        for text, drafted in self._painter.pieces(chunk):
            self._console.print(Text(visible(text), ACCEPTED if drafted else ""), end="", soft_wrap=True)


def visible(text: str) -> str:
    return text.translate(_VISIBLE)
