"""Statistics as people read them: one line, a table of times, JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from headstart.bench.provenance import versions
from headstart.config import SpeculativeConfig
from headstart.core import Stats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_POSITIONS = 8
PARTS = ("policy", "draft", "target", "verify", "host")


def say(text: Any, style: str = "dim") -> None:
    """To a person, on standard error."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, style=style, soft_wrap=isinstance(text, str), markup=False)


def out() -> Console:
    """Standard output; a pipe has no width, so nothing is cut there."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=1000)


def per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def positions(stats: Stats) -> str:
    """Acceptance by position, first ones first."""
    shares = [f"{share:.0%}" for share in stats.acceptance_by_position]
    more = " ..." if len(shares) > SHOWN_POSITIONS else ""
    return " ".join(shares[:SHOWN_POSITIONS]) + more if shares else "none"


def summary(stats: Stats, seconds: float, drafter: str) -> str:
    """Tokens, speed and what speculation did, in one line."""
    speed = f"{stats.tokens} tokens in {seconds:.2f} s, {per_second(stats.tokens, seconds):.1f} tokens/s"
    if not stats.drafts:
        return f"{speed}, no drafts" if drafter != "none" else f"{speed}, plain decoding"
    return (
        f"{speed}, block efficiency {stats.block_efficiency:.2f}, "
        f"{drafter}: {stats.accepted} of {stats.drafted} drafted tokens accepted, by position {positions(stats)}"
    )


def time_table(stats: Stats) -> Table:
    """Where the time of one answer went. The first step's target time includes the prompt."""
    from rich.table import Table

    times = {part: getattr(stats, f"time_{part}") for part in PARTS}
    times["between steps"] = max(0.0, stats.time_total - sum(times.values()))
    everything = sum(times.values()) or 1.0
    table = Table("part", title=f"{stats.steps} steps, {stats.tokens} tokens; prompt included", title_justify="left")
    for heading in ("seconds", "ms per step", "share"):
        table.add_column(heading, justify="right")
    for part, seconds in [*times.items(), ("total", everything)]:
        per_step = 1e3 * seconds / max(stats.steps, 1)
        table.add_row(
            part,
            f"{seconds:.3f}",
            f"{per_step:.2f}",
            f"{seconds / everything:.1%}",
            end_section=part == "between steps",
        )
    return table


# ------------------------------------------------------------------ JSON
def print_json(value: Any) -> None:
    print(json.dumps(plain(value), ensure_ascii=False, indent=2))


def plain(value: Any) -> Any:
    """Dataclasses become objects; numbers that JSON does not have become null."""
    if isinstance(value, Stats):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def provenance(model: str, config: SpeculativeConfig) -> dict[str, Any]:
    """What produced a result."""
    found = versions(("headstart", "torch", "transformers"))
    return {"model": model, "drafter": config.method, "speculative": config, "versions": found}


def amount(size: float) -> str:
    """Bytes, as people say them."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
