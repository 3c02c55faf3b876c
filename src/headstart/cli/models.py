"""`headstart models`: what is built in, what lies in Headstart's cache, what lies in the hub's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.cli.options import Json


def models(
    as_json: Json = False,
) -> None:
    """List the models at hand: built in, fetched or converted, and in the Hugging Face cache.

    Example: `headstart models`, then `headstart generate "Hello" --model NAME`
    """
    from headstart.cli import show
    from headstart.models.builtin import cache_dir

    found = {"cache": str(cache_dir()), "builtin": _built_in(), "converted": _converted(), "hub": _hub()}
    if as_json:
        show.print_json(found)
    else:
        _print(found)


def _built_in() -> list[dict[str, Any]]:
    from headstart.models.builtin import BUILTIN, path_of

    return [
        {"name": m.name, "title": m.title, "fetched": path_of(m).is_file(), "size": m.size, "path": str(path_of(m))}
        for m in BUILTIN.values()
    ]


def _converted() -> list[dict[str, Any]]:
    """Copies of GGUF files that load in seconds."""
    from headstart.models.builtin import cache_dir

    folders = sorted(config.parent for config in (cache_dir() / "converted").glob("*/config.json"))
    return [{"name": f.name, "size": _size(f), "path": str(f)} for f in folders if f.suffix != ".part"]


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _hub() -> list[dict[str, Any]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [r for r in scan_cache_dir().repos if r.repo_type == "model"]
    except (CacheNotFound, OSError, ValueError):
        return []
    return [
        {"name": r.repo_id, "size": r.size_on_disk, "path": str(r.repo_path)}
        for r in sorted(repos, key=lambda r: r.repo_id)
    ]


def _print(found: dict[str, Any]) -> None:
    from headstart.cli import show

    rows = [
        (m["name"], show.amount(m["size"]), m["path"] if m["fetched"] else f"{m['title']}, fetched on first use")
        for m in found["builtin"]
    ]
    _section("Built in", rows)
    for title, key, none in (
        ("Converted from GGUF, kept in the cache", "converted", f"nothing in {found['cache']} yet"),
        ("In the Hugging Face cache", "hub", "nothing yet"),
    ):
        _section(title, [(m["name"], show.amount(m["size"]), m["path"]) for m in found[key]], none)


def _section(title: str, rows: Sequence[tuple[str, str, str]], none: str = "") -> None:
    from rich.table import Table

    from headstart.cli import show

    table = Table.grid(padding=(0, 2), pad_edge=True)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = show.out()
    console.print(title, style="bold")
    console.print(table if rows else f"  {none}", markup=False)
