"""A result on disk while it grows: what was stopped goes on, and what was measured otherwise is not mixed with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.bench.records import Result, written_beside
from headstart.errors import BadInput
from headstart.progress import note

FILE, PAGE, SHORT = "result.json", "report.html", "summary.md"


def begin(folder: Path, setting: dict[str, Any], provenance: dict[str, Any], fresh: bool = False) -> Result:
    """A new result, or the one in this folder, where it is of the same setting."""
    path = folder / FILE
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder} is a file: give a folder.")
    with written_beside(path) as beside:  # said before anything is measured; what is there stays
        beside.touch()
        beside.unlink()
    if fresh or not path.exists():
        return Result(provenance, setting, {})
    kept = Result.load(path)
    other = [name for name in setting if kept.setting.get(name) != setting[name]]
    if other:
        raise BadInput(
            f"{path} was measured with {other[0]}={kept.setting.get(other[0])!r}, not {setting[other[0]]!r}: give another "
            "--out, or --fresh to begin anew."
        )
    if kept.provenance.get("commit") != provenance.get("commit"):
        note(f"{path} was begun at commit {kept.provenance.get('commit')}; this is {provenance.get('commit')}.")
    return kept


def write(folder: Path, result: Result) -> None:
    """The result, and what people look at."""
    from headstart.bench import markdown, report

    result.save(folder / FILE)
    (folder / PAGE).write_text(report.html(result), encoding="utf-8")
    (folder / SHORT).write_text(markdown.short(result), encoding="utf-8")
