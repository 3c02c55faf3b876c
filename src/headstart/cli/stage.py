"""How a race looks: two panels that fill while it runs, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headstart.cli import show
from headstart.cli.paint import ACCEPTED, visible
from headstart.cli.race import Lane, Race

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

SIDE_BY_SIDE = 100  # columns
REFRESH = 0.12  # seconds: drawing takes time from the cores that decode
FRAME = 4  # columns of a panel's border and padding
PROMPT_LINES = 3


class LiveStage:
    """Both lanes of one race in place. Draws only when asked, so decoding is disturbed as little as possible."""

    def __init__(self, console: Console, race: Race, max_tokens: int) -> None:
        from rich.live import Live

        self.console, self.race, self.max_tokens = console, race, max_tokens
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveStage:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self.draw(), refresh=True)
        self._live.stop()

    def changed(self) -> None:
        now = time.perf_counter()
        if now - self._drawn >= REFRESH:
            self._live.update(self.draw(), refresh=True)
            self._drawn = time.perf_counter()

    def draw(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        wide = self.console.width >= SIDE_BY_SIDE
        inside = (self.console.width // 2 if wide else self.console.width) - FRAME
        room = self.console.height - PROMPT_LINES - 2
        most = max(2, (room if wide else room // 2) - 5)
        lanes = (self.race.plain, self.race.speculative)
        texts = [painted(lane).wrap(self.console, inside)[-most:] for lane in lanes]
        least = max(len(text) for text in texts) if wide else 1
        panels = [self._panel(lane, text, least, inside) for lane, text in zip(lanes, texts, strict=True)]
        if not wide:
            return Group(self._prompt(), *panels)
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
        return Group(self._prompt(), grid)

    def _prompt(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        head = Text.assemble((self.race.title, "bold"), "  ", (" ".join(visible(self.race.prompt).split()), "dim"))
        lines = head.wrap(self.console, self.console.width)
        if len(lines) > PROMPT_LINES:
            lines[PROMPT_LINES - 1].append(" ...", "dim")
            lines[PROMPT_LINES - 1].truncate(self.console.width)
        return Group(*lines[:PROMPT_LINES])

    def _panel(self, lane: Lane, lines: Sequence[Text], least: int, inside: int) -> RenderableType:
        """The end of a lane's text, how far it is, and its numbers."""
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done = self.max_tokens if lane.stats else len(lane.token_ids)
        body = Table.grid()
        for line in lines:
            body.add_row(line)
        for _ in range(least - len(lines)):
            body.add_row("")
        body.add_row(ProgressBar(total=self.max_tokens, completed=done, width=inside))
        body.add_row(speed_line(lane))
        body.add_row(position_line(lane))
        border = "cyan" if lane is self._running() else "dim"
        return Panel(body, title=lane.name, title_align="left", border_style=border)

    def _running(self) -> Lane | None:
        return next((lane for lane in (self.race.plain, self.race.speculative) if lane.stats is None), None)


def painted(lane: Lane) -> Text:
    from rich.text import Text

    return Text.assemble(*((visible(text), ACCEPTED if drafted else "") for text, drafted in lane.pieces))


def speed_line(lane: Lane) -> str:
    return (
        f"{len(lane.token_ids)} tokens   {lane.tokens_per_second:.1f} tokens/s   "
        f"block efficiency {lane.block_efficiency:.2f}"
    )


def position_line(lane: Lane) -> Any:
    """Acceptance by position is known when the lane is over."""
    from rich.text import Text

    if lane.stats is None or not lane.stats.drafts:
        return Text("no drafts" if lane.stats else "", "dim")
    return Text(f"accepted by position {show.positions(lane.stats)}", "dim")


def print_plain(race: Race) -> None:
    """One race as lines."""
    print(f"\n{race.title}: {' '.join(visible(race.prompt).split())}")
    print("  " + visible(race.plain.text).strip().replace("\n", "\n  "))
    for lane in (race.plain, race.speculative):
        print(f"  {lane.name}: {speed_line(lane)}".rstrip(), position_line(lane).plain, sep="   ")
    print(f"  ratio {race.ratio:.2f}, {'identical' if race.identical else 'different'}", flush=True)


def table(races: list[Race], drafter: str) -> RenderableType:
    from rich.table import Table

    out = Table("prompt")
    for heading in ("plain tokens/s", f"{drafter} tokens/s", "ratio", "block efficiency", "identical"):
        out.add_column(heading, justify="right")
    for r in races:
        out.add_row(
            r.title,
            f"{r.plain.tokens_per_second:.1f}",
            f"{r.speculative.tokens_per_second:.1f}",
            f"{r.ratio:.2f}",
            f"{r.speculative.block_efficiency:.2f}",
            "yes" if r.identical else f"no, from token {r.first_difference}",
        )
    return out
