#!/usr/bin/env python3
"""Headstart against transformers on the same weights, the same prompts and the same threads, interleaved in one run.

    python benchmarks/engine.py                                   built-in model: plain, ngram, suffix, batch 1 and 8
    python benchmarks/engine.py --model BIG --draft SMALL         adds a draft model on both sides
    python benchmarks/engine.py --out benchmarks/results/x.json   keeps every sample, with provenance
    python benchmarks/engine.py --show benchmarks/results/x.json  prints a kept result, as Markdown

Every round runs every way of decoding once over all prompts; the table shows medians over rounds and the ratio to transformers'
`generate` in the same round. Tokens per second count the whole call, prefill included. Greedy. Prefix sharing and the suffix
drafter's memory of past outputs are off, so that no prompt profits from an earlier round.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import headstart
from headstart import LLM, SamplingParams
from headstart.models.load import Loaded, load

PARAGRAPH = (
    "The lighthouse on Gull Rock was built in 1874 by two brothers who had never seen the sea before. They carried every stone "
    "across the causeway at low tide, and it took them eleven summers. When the lamp was lit for the first time, the whole "
    "village came to watch. The younger brother stayed on as keeper and wrote down the weather each morning for forty "
    "years. His notebooks are kept in the town library, where anyone may read them."
)
LIST = "apples 3, pears 5, plums 12, walnuts 40, lemons 6, onions 9, carrots 15, leeks 4, eggs 24, candles 2"
PROMPTS = {
    "copy": [
        f"Repeat the following paragraph exactly, word for word:\n\n{PARAGRAPH}",
        f"Copy this list exactly, then copy it again:\n\n{LIST}",
        f"Here is a text. Write it out again without any change.\n\n{PARAGRAPH}",
    ],
    "free": [
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        "Explain how rainbows form, to a curious child.",
        "Describe a market in a small town on a rainy morning.",
    ],
}
BATCH = [
    "Write a short story about a clock that runs backwards.",
    "Explain how bread rises.",
    "Describe a walk through a forest in autumn.",
    "What should a traveller pack for a week in the mountains?",
    "Tell me about the history of the bicycle.",
    "Write a letter to a friend who is learning to swim.",
    "How does a bee find its way home?",
    "Give advice to somebody who starts a vegetable garden.",
]
Way = Callable[[list[list[int]]], list[list[int]]]


def transformers_way(model: Any, max_tokens: int, **options: Any) -> Way:
    def run(prompts: list[list[int]]) -> list[list[int]]:
        out = []
        for ids in prompts:
            row = torch.tensor([ids])
            kept = model.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=max_tokens, do_sample=False, **options
            )
            out.append(kept[0, len(ids) :].tolist())
        return out

    return run


def transformers_batch(model: Any, max_tokens: int, pad: int) -> Way:
    def run(prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        rows = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(rows, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        ends = set(torch.tensor(model.generation_config.eos_token_id).reshape(-1).tolist())
        return [_until(o[width:].tolist(), ends) for o in out]

    return run


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    at = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
    return tokens[:at]


def headstart_way(llm: LLM, max_tokens: int, method: str, together: bool, books: dict[str, Any]) -> Way:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    own = None if method == "none" else {"method": method}

    def run(prompts: list[list[int]]) -> list[list[int]]:
        groups = [prompts] if together else [[p] for p in prompts]
        outs = [o for g in groups for o in llm.generate(g, params, speculative=own)]
        for o in outs:
            s = o.stats
            for name in (
                "steps",
                "tokens",
                "drafted",
                "accepted",
                "time_draft",
                "time_target",
                "time_verify",
                "time_total",
            ):
                books[name] = books.get(name, 0) + getattr(s, name)
        return [o.token_ids for o in outs]

    return run


def shared_copy(model: Any) -> Any:
    """Another model object over the very same weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="a smaller model with the same tokenizer")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-k", type=int, default=5, help="draft tokens, on both sides")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--no-batch", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show:
        print(markdown(json.loads(args.show.read_text())))
        return
    torch.set_num_threads(args.threads)
    report = measure(args)
    show(report)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1))


def build(args: argparse.Namespace) -> tuple[LLM, LLM, Any, Any, Loaded]:
    """A plain engine, a speculating one, and transformers, all over the same weights."""
    target = load(args.model, runner="torch")
    stock = shared_copy(target.model)
    plain = LLM(replace(target, model=shared_copy(target.model)), speculative=None, share_prefixes=False)
    draft = load(args.draft, runner="torch") if args.draft else None
    stock_draft = shared_copy(draft.model) if draft else None
    spec = {"method": "draft_model" if draft else "ngram", "num_speculative_tokens": args.k, "suffix_max_requests": 0}
    llm = LLM(target, speculative=spec, share_prefixes=False, draft=draft)
    return plain, llm, stock, stock_draft, target


def ways(
    args: argparse.Namespace, plain: LLM, llm: LLM, stock: Any, stock_draft: Any, books: dict[str, Any]
) -> dict[str, Way]:
    n = args.max_tokens

    def ours(name: str, method: str) -> Way:
        return headstart_way(plain if method == "none" else llm, n, method, False, books.setdefault(name, {}))

    single: dict[str, Way] = {
        "transformers generate": transformers_way(stock, n),
        "transformers prompt lookup": transformers_way(stock, n, prompt_lookup_num_tokens=args.k),
        "headstart plain": ours("headstart plain", "none"),
        "headstart ngram": ours("headstart ngram", "ngram"),
        "headstart suffix": ours("headstart suffix", "suffix"),
    }
    if stock_draft is not None:
        stock_draft.generation_config.num_assistant_tokens = args.k
        stock_draft.generation_config.num_assistant_tokens_schedule = "constant"
        single["transformers assisted"] = transformers_way(stock, n, assistant_model=stock_draft)
        single["headstart draft model"] = ours("headstart draft model", "draft_model")
    return single


def measure(args: argparse.Namespace) -> dict[str, Any]:
    plain, llm, stock, stock_draft, target = build(args)
    books: dict[str, Any] = {}
    encode = lambda text: target.tokenizer.chat([{"role": "user", "content": text}])  # noqa: E731
    kinds = {kind: [encode(t) for t in texts[: args.prompts]] for kind, texts in PROMPTS.items()}
    batch = [encode(t) for t in BATCH]
    jobs: list[tuple[str, str, Way, list[list[int]]]] = []
    for kind, prompts in kinds.items():
        kind_books: dict[str, Any] = books.setdefault(kind, {})
        jobs += [(kind, n, w, prompts) for n, w in ways(args, plain, llm, stock, stock_draft, kind_books).items()]
    if not args.no_batch:
        pad = min(target.eos_ids)
        own = books.setdefault("batch 8", {})
        jobs.append(("batch 8", "transformers generate", transformers_batch(stock, args.max_tokens, pad), batch))
        methods = {"headstart plain": "none", "headstart ngram": "ngram", "headstart suffix": "suffix"}
        if stock_draft is not None:
            methods["headstart draft model"] = "draft_model"
        for name, method in methods.items():
            engine = plain if method == "none" else llm
            way = headstart_way(engine, args.max_tokens, method, True, own.setdefault(name, {}))
            jobs.append(("batch 8", name, way, batch))
        alone = headstart_way(plain, args.max_tokens, "none", False, own.setdefault("headstart plain, one by one", {}))
        jobs.append(("batch 8", "headstart plain, one by one", alone, batch))
    samples, same = race(jobs, args.rounds)
    plain.close()
    llm.close()
    return {"provenance": provenance(args), "samples": samples, "same_output": same, "books": books}


@torch.inference_mode()
def race(jobs: list[tuple[str, str, Way, list[list[int]]]], rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens per second of every job in every round, and the share of outputs equal to transformers' generate."""
    samples: dict[str, Any] = {}
    same: dict[str, Any] = {}
    reference: dict[str, list[list[int]]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("racing", total=(rounds + 1) * len(jobs))
        for number in range(rounds + 1):  # round 0 warms up
            for kind, name, way, prompts in jobs:
                start = time.perf_counter()
                outs = way(prompts if number else prompts[:8])
                seconds = time.perf_counter() - start
                progress.advance(task)
                if number == 0:
                    if name == "transformers generate":
                        reference[kind] = outs
                    equal = [a == b for a, b in zip(outs, reference[kind], strict=True)]
                    same.setdefault(kind, {})[name] = sum(equal) / len(equal)
                    continue
                samples.setdefault(kind, {}).setdefault(name, []).append(sum(map(len, outs)) / seconds)
    return samples, same


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "headstart": headstart.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": cpu_name(),
        "threads": args.threads,
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d"),
    }


def cpu_name() -> str:
    try:
        out = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in out.splitlines() if line.startswith("Model name")), "")


def show(report: dict[str, Any]) -> None:
    console = Console(width=120)
    for kind, ways in report["samples"].items():
        table = Table(title=f"{kind}: tokens per second, median of rounds")
        for column in ("way", "tok/s", "x generate", "same output", "block efficiency", "draft/target/verify/host"):
            table.add_column(column, justify="left" if column == "way" else "right")
        base = ways["transformers generate"]
        for name, rates in ways.items():
            ratio = statistics.median(a / b for a, b in zip(rates, base, strict=True))
            book = report["books"][kind].get(name, {})
            same = report["same_output"][kind][name]
            table.add_row(name, f"{statistics.median(rates):.1f}", f"{ratio:.2f}", f"{same:.0%}", *_book(book))
        console.print(table)
    for line, ok in bars(report):
        console.print(("[green]met[/]  " if ok else "[red]not met[/] ") + line)
    console.print(report["provenance"])


def markdown(report: dict[str, Any]) -> str:
    """One row per way, one column per kind of prompt: tokens per second, and the ratio to transformers' generate."""
    kinds = list(report["samples"])
    names = list(dict.fromkeys(n for ways in report["samples"].values() for n in ways))
    lines = ["| tokens per second (x generate) | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(_cell(report["samples"][k], name) for k in kinds) + " |")
    return "\n".join(lines)


def _cell(ways: dict[str, list[float]], name: str) -> str:
    if name not in ways:
        return ""
    ratio = statistics.median(a / b for a, b in zip(ways[name], ways["transformers generate"], strict=True))
    return f"{statistics.median(ways[name]):.1f} ({ratio:.2f}x)"


def _book(book: dict[str, Any]) -> tuple[str, str]:
    if not book:
        return "", ""
    return f"{book['tokens'] / book['steps']:.2f}", " ".join(f"{p:.1%}" for p in shares(book))


def shares(book: dict[str, Any]) -> list[float]:
    """Draft, target, verify, and all the rest of the time that requests took: planning, committing, text, delivery."""
    parts = [book["time_draft"], book["time_target"], book["time_verify"]]
    return [p / book["time_total"] for p in [*parts, book["time_total"] - sum(parts)]]


def bars(report: dict[str, Any]) -> list[tuple[str, bool]]:
    """What this engine promises on a CPU."""
    s = report["samples"]

    def ratio(kind: str, a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(s[kind][a], s[kind][b], strict=True))

    plain = ratio("free", "headstart plain", "transformers generate")
    lookup = ratio("copy", "headstart ngram", "transformers prompt lookup")
    book = report["books"]["free"]["headstart plain"]
    host = shares(book)[3]
    out = [
        (f"plain decoding, batch 1, is {plain:.2f}x transformers' generate (bar 1.15)", plain >= 1.15),
        (f"ngram on copying is {lookup:.2f}x transformers' prompt lookup (bar 1.5)", lookup >= 1.5),
        (f"host time is {host:.1%} of a plain step (bar 5%)", host < 0.05),
    ]
    if "batch 8" in s:
        scale = ratio("batch 8", "headstart plain", "headstart plain, one by one")
        out.append((f"plain decoding at batch 8 is {scale:.2f}x the tokens per second of batch 1 (bar 2)", scale >= 2))
    return out


if __name__ == "__main__":
    main()
