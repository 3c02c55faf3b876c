"""Text for people: which characters came out of an accepted draft, and how a terminal shows them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from headstart.core import Chunk
from headstart.text import Spans

ACCEPTED = "green"
Piece = tuple[str, bool]  # text, and whether it was drafted
# Control characters of a model's text must not steer the terminal.
_VISIBLE = (
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)
)


class Painter:
    """Splits one answer's text into drafted and own pieces."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._spans: Spans[bool] = Spans(decode)

    def pieces(self, chunk: Chunk) -> list[Piece]:
        marked = zip(chunk.token_ids, chunk.from_draft, strict=True)
        return [(text, bool(drafted)) for text, drafted in self._spans.cut(marked, chunk.text)]


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
