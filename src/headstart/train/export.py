"""The result of a run: a folder in vLLM's speculators format, with a card that says what it is and where it comes from."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from headstart.train.stopping import Look, best_look


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


def write_card(folder: Path, target: str, data: dict[str, Any], options: dict[str, Any], history: list[Any]) -> None:
    """README.md: what it drafts for, what it was trained on, how well it foresees, and how it was made."""
    best = best_look(history)
    parts = [
        f"# EAGLE-3 head for {target}",
        f"Drafts for `{target}` and for nothing else. Trained with `headstart train eagle3`; the format is vLLM's speculators.",
        "## Data",
        "The target's own answers; no answer of a data set was used.",
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
