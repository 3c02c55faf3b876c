#!/usr/bin/env python3
"""What data, steps, loss, vocabulary and shape bring to an EAGLE-3 head: short runs that differ from one in one thing.

    python benchmarks/training.py --target smollm2 --answers answers.jsonl
    python benchmarks/training.py ... --only loss --out benchmarks/results/training.json    keeps it with provenance
    python benchmarks/training.py --show benchmarks/results/training.json                   prints a kept result, as Markdown

Answers are what `headstart train` left in work/answers.jsonl. All runs take the same number of steps, unless it is the steps
that differ, and are scored on the same held-out prompts: tokens per target forward that a greedy chain of five would bring.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
import report

import headstart
from headstart.models.load import Loaded, load
from headstart.train.data import Answer, read_answers
from headstart.train.eagle3 import Eagle3Options
from headstart.train.packing import documents, epochs, split
from headstart.train.run import make_loop

console = Console(width=150)
VARIATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "the run that all differ from": {"": {}},
    "data": {
        "a quarter of the prompts": {"prompts": 1 / 4},
        "a sixteenth": {"prompts": 1 / 16},
        "greedy answers only": {"temperature": 0.0},
        "sampled answers only": {"temperature": 1.0},
    },
    "steps": {"a half": {"steps": 1 / 2}, "twice": {"steps": 2}},
    "loss": {name: {"loss": name} for name in ("rkl", "tv", "kl+tv", "ce")},
    "vocabulary": {"4,096 tokens": {"draft_vocab": 4096}, "all tokens": {"draft_vocab": 10**9}},
    "levels": {"1": {"levels": 1}, "3": {"levels": 3}},
    "shape": {
        "output matrix as it is": {"learn_output": False},
        "two layers": {"layers": 2},
    },
}


def chosen(answers: list[Answer], prompts: float = 1.0, temperature: float | None = None) -> list[Answer]:
    """A share of the prompts, always the same ones, or what was written at one temperature."""
    found = split(answers, prompts)[1] if prompts < 1 else answers
    return [a for a in found if temperature is None or a.temperature == temperature]


def run(args: argparse.Namespace, target: Loaded, answers: list[Answer], how: dict[str, Any]) -> dict[str, Any]:
    """One run; what its last look at held-out text says."""
    data = {name: how[name] for name in ("prompts", "temperature") if name in how}
    more = {name: value for name, value in how.items() if name not in ("prompts", "temperature", "steps")}
    steps = round(args.steps * how.get("steps", 1))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        options = Eagle3Options(
            args.target, folder, answers=("-",), steps=steps, minutes=None, batch=args.batch, eval_every=steps,
            trial_every=0, patience=0, tensorboard=False, **more,
        )  # fmt: skip
        kept, held = split(answers, options.held_out)
        docs = documents(chosen(kept, **data), options.length)
        student = options.begin(target, docs)
        loop = make_loop(options, target, student, documents(held, options.length), Path(folder))
        loop.run(
            lambda step: epochs(docs, options.length, options.batch, student.levels, options.seed, step),
            target.model.device,
        )
    p = loop.progress
    return p.history[-1] | {"answers": len(docs), "epochs": p.tokens / sum(len(d.tokens) for d in docs)}


def tables(kept: dict[str, Any]) -> Iterator[tuple[str, report.Rows]]:
    head = ["", "block efficiency", "agreement, % by level", "answers", "epochs", "tokens", "seconds"]
    for name, runs in kept["results"].items():
        yield name, [head, *([label or "-", *_cells(look)] for label, look in runs.items())]


def _cells(look: dict[str, Any]) -> list[str]:
    agreement = " ".join(f"{100 * a:.1f}" for a in look["agreement"])
    size = [f"{look['answers']:,}", f"{look['epochs']:.1f}", f"{look['tokens'] / 1e6:.1f} M", f"{look['seconds']:.0f}"]
    return [f"{look['block_efficiency']:.3f}", agreement, *size]


def provenance(args: argparse.Namespace, answers: list[Answer]) -> dict[str, Any]:
    return {
        "target": Path(args.target).name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "answers": len(answers),
        "steps": args.steps,
        "batch": args.batch,
        "torch": torch.__version__,
        "headstart": headstart.__version__,
        "commit": report.commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--answers", action="append", help="a file of answers; repeat for more")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="packed sequences of 1,024 tokens in a step")
    parser.add_argument("--only", default="", help=f"some of: {', '.join(VARIATIONS)}")
    parser.add_argument("--out", help="keep the result here, as JSON")
    parser.add_argument("--show", help="print a kept result and end")
    args = parser.parse_args()
    if args.show:
        return report.print_kept(args.show, tables)
    if not args.answers:
        sys.exit("Give --answers: what `headstart train` left in work/answers.jsonl.")
    report.refuse_unknown(args.only, VARIATIONS)
    answers = [a for path in args.answers for a in read_answers(Path(path))]
    target = load(args.target, runner="torch")
    for name, variations in VARIATIONS.items():
        if args.only and name not in args.only.split(","):
            continue
        for label, how in variations.items():
            found = {name: {label: run(args, target, answers, how)}}
            report.show(console, tables({"results": found}))
            if args.out:
                report.keep(args.out, {"provenance": provenance(args, answers), "results": found})


if __name__ == "__main__":
    main()
