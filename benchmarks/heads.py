#!/usr/bin/env python3
"""Heads on prompts that they were not trained on: tokens per target forward, acceptance by position, and real speed.

    python benchmarks/heads.py --target M --head DIR --gsm8k test.jsonl --spec-bench question.jsonl
    python benchmarks/heads.py ... --out benchmarks/results/heads.json     keeps it with provenance
    python benchmarks/heads.py --show benchmarks/results/heads.json        prints a kept result, as Markdown

Each prompt is decoded plainly and with each way to draft, in turns, one request at a time. Speed is tokens per second of
decoding, the median over prompts of the ratio to plain decoding in the same turn; block efficiency is over all tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent))
import report

from headstart import LLM, SamplingParams

console = Console(width=150)
TREE = {"tree": True, "top_k": 8, "max_branches": 8, "p_split": 0.0}


def way(name: str) -> dict[str, Any]:
    """ "chain 5"; "tree 32", or "tree 15x7" of 15 nodes down to depth 7; "adaptive"."""
    if name == "adaptive":
        return {"policy": "adaptive"}
    kind, _, size = name.partition(" ")
    nodes, _, depth = size.partition("x")
    if kind == "chain":
        return {"num_speculative_tokens": int(nodes)}
    if kind == "tree":
        return TREE | {"num_speculative_tokens": int(depth or 6), "num_draft_nodes": int(nodes)}
    raise SystemExit(f"Unknown way {name!r}: chain N, tree N, tree NxDEPTH or adaptive.")


# ------------------------------------------------------------------ prompts
def gsm8k(path: str, count: int) -> list[tuple[str, str]]:
    rows = report.rows(path, "question")
    return [("gsm8k", row["question"]) for row in rows[:: max(1, len(rows) // count)][:count]]


def spec_bench(path: str, count: int) -> list[tuple[str, str]]:
    """As many of each category as are asked for, spread over the file."""
    found: dict[str, list[str]] = {}
    for row in report.rows(path, "category", "turns"):
        found.setdefault(row["category"], []).append(row["turns"][0])
    return [(name, p) for name, own in found.items() for p in own[:: max(1, len(own) // count)][:count]]


def code() -> list[tuple[str, str]]:
    lines = Path(__file__).with_name("code_prompts.txt").read_text(encoding="utf-8").splitlines()
    return [("code", line) for line in lines]


# ------------------------------------------------------------------ measuring
def measure(args: argparse.Namespace, name: str, prompts: list[tuple[str, str]], temperature: float, how: str) -> Any:
    """One way against plain decoding, prompt by prompt in turns."""
    spec = {"method": args.method, "verification": how} | way(name) | json.loads(args.more)
    spec |= {"model": args.head} if args.head else {}
    options = json.loads(args.engine) | {"share_prefixes": False, "max_model_len": 2048}
    rows = []
    with LLM(args.target, speculative=spec, **options) as llm:
        ask(llm, prompts[0][1], args.tokens, 0.0, 0, None)  # whatever is prepared on first use
        for i, (category, prompt) in enumerate(track(prompts, description=f"{name}, temperature {temperature}")):
            drafted = ask(llm, prompt, args.tokens, temperature, i, None)
            plain = ask(llm, prompt, args.tokens, temperature, i, False)
            rows.append(row(category, drafted, plain))
    return rows


def ask(llm: LLM, prompt: str, tokens: int, temperature: float, seed: int, speculative: Any) -> Any:
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed)
    return llm.chat([{"role": "user", "content": prompt}], params, speculative=speculative)[0]


def row(category: str, drafted: Any, plain: Any) -> dict[str, Any]:
    stats = drafted.stats
    return {
        "category": category,
        "tokens": stats.tokens,
        "steps": stats.steps,
        "drafts": stats.drafts,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "by_position": stats.accepted_by_position,
        "speed": stats.decode_tokens_per_second,
        "plain": plain.stats.decode_tokens_per_second,
        "same": drafted.token_ids == plain.token_ids,
        "seconds": {n: getattr(stats, f"time_{n}") for n in ("draft", "target", "verify", "host")},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Block efficiency without the first token, which the prompt's own forward gives."""
    fast = [r["speed"] / r["plain"] for r in rows if r["plain"] and r["speed"]]
    drafts = sum(r["drafts"] for r in rows) or 1
    longest = max((len(r["by_position"]) for r in rows), default=0)
    hit = [sum(r["by_position"][i] for r in rows if len(r["by_position"]) > i) for i in range(longest)]
    return {
        "prompts": len(rows),
        "block efficiency": sum(r["tokens"] - 1 for r in rows) / max(1, sum(r["steps"] - 1 for r in rows)),
        "speed-up": statistics.median(fast) if fast else 0.0,
        "speed-up, all tokens": sum(r["tokens"] / r["plain"] for r in rows if r["plain"] and r["speed"])
        / max(1e-9, sum(r["tokens"] / r["speed"] for r in rows if r["plain"] and r["speed"])),
        "same text": sum(r["same"] for r in rows),
        "by position": [round(h / drafts, 3) for h in hit],
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    prompts = gsm8k(args.gsm8k, args.prompts) if args.gsm8k else []
    prompts += spec_bench(args.spec_bench, args.each) if args.spec_bench else []
    prompts += code() if args.code else []
    if not prompts:
        raise SystemExit("Give --gsm8k, --spec-bench or --code: there are no prompts.")
    out: dict[str, Any] = {}
    for temperature, how in [(t, h) for t in args.temperatures for h in (("walk", "rejection") if t else ("walk",))]:
        for name in args.ways:
            rows = measure(args, name, prompts, temperature, how)
            groups = {c: [r for r in rows if r["category"] == c] for c in dict.fromkeys(r["category"] for r in rows)}
            found = {c: summary(own) for c, own in groups.items()} | {"all": summary(rows)}
            out[f"{name}, temperature {temperature:g}" + (f", {how}" if temperature else "")] = found
            report.show(console, tables({"results": {f"{name}, temperature {temperature:g}, {how}": found}}))
    return out


def tables(kept: dict[str, Any]) -> Iterator[tuple[str, report.Rows]]:
    head = ["prompts", "n", "block efficiency", "speed-up", "over all", "same text", "accepted by position"]
    for name, groups in kept["results"].items():
        yield name, [head, *([category, *_cells(s)] for category, s in groups.items())]


def _cells(s: dict[str, Any]) -> list[str]:
    found = [f"{s[n]:.2f}" for n in ("block efficiency", "speed-up", "speed-up, all tokens")]
    return [str(s["prompts"]), *found, f"{s['same text']}/{s['prompts']}", " ".join(map(str, s["by position"]))]


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "target": Path(args.target).name,
        "head": Path(args.head).name if args.head else "its own",
        **report.where(),
        "tokens": args.tokens,
        "options": args.engine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", help="the head's folder; left out, the one that comes with the target")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--gsm8k", help="GSM8K's test.jsonl")
    parser.add_argument("--spec-bench", help="Spec-Bench's question.jsonl")
    parser.add_argument("--code", action="store_true", help="the prompts of code_prompts.txt, beside this file")
    parser.add_argument("--prompts", type=int, default=40, help="of GSM8K")
    parser.add_argument("--each", type=int, default=2, help="of each category of Spec-Bench")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--ways", type=lambda s: s.split(","), default=["chain 3", "chain 5", "tree 16", "tree 32", "adaptive"]
    )
    parser.add_argument("--temperatures", type=lambda s: [float(x) for x in s.split(",")], default=[0.0])
    parser.add_argument("--engine", default="{}", help="options of LLM, as JSON")
    parser.add_argument("--more", default="{}", help="more of the speculative config, as JSON")
    parser.add_argument("--out", help="keep the result here, as JSON")
    parser.add_argument("--show", help="print a kept result and end")
    args = parser.parse_args()
    if args.show:
        return report.print_kept(args.show, tables)
    result = {"provenance": provenance(args), "results": run(args)}
    if args.out:
        report.keep(args.out, result)


if __name__ == "__main__":
    main()
