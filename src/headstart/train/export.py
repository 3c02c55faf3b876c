"""The card of a result: what it is, where it comes from and how well it drafts."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from headstart.train.stopping import Look, best_look
from headstart.train.student import Student


def provenance() -> dict[str, str]:
    import torch
    import transformers

    from headstart import __version__

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "headstart": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": where,
    }


def write_card(
    folder: Path,
    kind: str,
    student: Student,
    target: str,
    data: dict[str, Any],
    options: dict[str, Any],
    history: list[Any],
) -> None:
    """README.md: what it drafts for, what it was trained on, how well it foresees, and how it was made."""
    best = best_look(history)
    parts = [
        f"# {student.title} for {target}",
        f"Drafts for `{target}`. Trained with `headstart train {kind}`; the format is {student.format}.",
        f'`headstart generate "..." --model {target} --drafter {student.method} --draft-model THIS_FOLDER`',
        "## Data",
        _source("files of prompts" in data, "files of answers" in data),
        _table(("what", "value"), list(data.items())),
        "## Held-out text",
        "Prompts that were not trained on. A chain of greedy guesses; level 0 is the first drafted token.",
        _metrics(best) if best else "Not measured: no prompt was held out.",
        *(["## In the engine", _trial(best["engine"])] if best and "engine" in best else []),
        "## How it was made",
        _table(("option", "value"), list(options.items())),
        _table(("software", "version"), list(provenance().items())),
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def bare_name(name: str) -> str:
    """Of a file or folder its own name, without where it lies on this machine; other names stay as they are."""
    path = Path(name).expanduser()
    return Path(os.path.abspath(path)).name if path.is_absolute() or path.exists() else name


def _source(prompts: bool, answers: bool) -> str:
    """Who wrote what was learned from, as far as the run knows."""
    own = "The target's own answers to the prompts, written in this run; no answer of a data set was used."
    read = "were read from files as they are; this run did not write them."
    if not answers:
        return own
    return f"{own} Further answers {read}" if prompts else f"The answers {read}"


def _metrics(best: Look) -> str:
    rows = [
        (level, f"{100 * a:.1f} %", f"{100 * c:.1f} %", f"{loss:.3f}")
        for level, (a, c, loss) in enumerate(zip(best["agreement"], best["chained"], best["loss"], strict=True))
    ]
    text = (
        f"Block efficiency of a chain of {len(rows)}: **{best['block_efficiency']:.2f}** tokens per target forward, "
        f"at step {best['step']}, after {best['tokens']:,} tokens and {best['seconds'] / 60:.1f} minutes."
    )
    header = ("level", "agrees with the target", "where all before were right", "loss")
    return text + "\n\n" + _table(header, rows)


def _trial(trial: dict[str, Any]) -> str:
    text = (
        f"Headstart's engine, greedy, a chain of {trial['depth']}, on {trial['prompts']} of the held-out prompts "
        f"({trial['tokens']:,} tokens): **{trial['block_efficiency']:.2f}** tokens per target forward.\n\n"
        f"Predicted speed-up on the machine that trained: **{trial['speedup']:.2f}** for one request at a time "
        f"(a plain step takes {1000 * trial['plain_step']:.2f} ms, one with a draft {1000 * trial['drafted_step']:.2f} ms)."
    )
    rows = [(i + 1, f"{100 * a:.1f} %") for i, a in enumerate(trial["acceptance"])]
    return text + "\n\n" + _table(("position in the draft", "accepted"), rows)


def _table(header: tuple[str, ...], rows: list[Any]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
