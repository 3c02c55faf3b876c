#!/usr/bin/env python3
"""Does `auto` ever cost? Throughput of plain decoding, of fixed settings and of `auto`, by load and by kind of prompt.

    python benchmarks/policy.py --spec-bench question.jsonl --gsm8k test.jsonl --out benchmarks/results/policy-cpu.json
    python benchmarks/policy.py --show benchmarks/results/policy-cpu.json      prints a kept result, as Markdown

A point is a number of requests that run at once and a kind of prompts. All ways answer the same prompts, in turns; what is
compared is tokens per second, prompts included, for as long as so many do run at once: when nobody waits any more and the first
place stays empty, the run ends, or its tail would tell of smaller loads, a third of the time and chance how long. The ratio is
the median over rounds, each with prompts of its own. The suffix drafter does not remember past answers here,
or it would know them from the other ways' turns.

With `--in-step`, all ways answer at the same time, one step of each in turn: what disturbs the machine disturbs all of them.
That is for runners whose steps are over when they return, so not for a GPU.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent))
import made_up
import report

from headstart import LLM, SamplingParams
from headstart.core import Request
from headstart.errors import HeadstartError
from headstart.loop import calm_collector
from headstart.models.load import Loaded, load
from headstart.rehearse import prepare
from headstart.shapes import GROWN

console = Console(width=170)
MIXED, NOISE, CODE, MATHS = "mixed", "noise", "code", "maths"
KINDS = {
    "writing": ("writing", "roleplay", "humanities", "stem"),
    "summaries": ("summarization",),
    "translation": ("translation",),
    "extraction": ("extraction", "rag", "qa"),
    "reasoning": ("reasoning", "math", "coding"),
}
Prompt = tuple[list[int], float]  # token ids, and the temperature


# ------------------------------------------------------------------ prompts
def kinds(args: argparse.Namespace, target: Loaded) -> dict[str, list[Prompt]]:
    """Prompts of each kind, in an order of chance."""
    rng, vocab = random.Random(1), target.vocab_size

    def chat(text: str) -> list[int]:
        return target.tokenizer.chat([{"role": "user", "content": text}])

    found: dict[str, list[Prompt]] = {}
    if args.spec_bench:
        rows = report.rows(args.spec_bench, "category", "turns")
        for kind, categories in KINDS.items():
            own = [r["turns"][0] for r in rows if r["category"] in categories]
            found[kind] = [(chat(text), 0.0) for text in own if len(text) < args.longest]
    if args.gsm8k:
        found[MATHS] = [(chat(r["question"]), 0.0) for r in report.rows(args.gsm8k, "question")]
    lines = Path(__file__).with_name("code_prompts.txt").read_text(encoding="utf-8").splitlines()
    found[CODE] = [(chat(line), 0.0) for line in lines]
    if none := [kind for kind, own in found.items() if not own]:
        sys.exit(f"No prompt of these kinds is below --longest {args.longest} characters: {', '.join(none)}.")
    for own in found.values():
        rng.shuffle(own)
    found[NOISE] = [([rng.randrange(vocab) for _ in range(40)], 1.5) for _ in range(400)]
    return found


def take(prompts: dict[str, list[Prompt]], kind: str, count: int, start: int) -> list[Prompt]:
    """So many prompts of a kind, from this one on; `mixed` takes turns through the kinds, but noise."""
    if kind != MIXED:
        own = prompts[kind]
        return [own[(start + i) % len(own)] for i in range(count)]
    names = [name for name in prompts if name != NOISE]
    return [
        prompts[names[i % len(names)]][(start + i // len(names)) % min(20, len(prompts[names[i % len(names)]]))]
        for i in range(count)
    ]


# ------------------------------------------------------------------ measuring
def way(name: str) -> dict[str, Any]:
    """ "plain", "auto", "ngram 3", "eagle3 2", "eagle3 15x5" (a tree of 15 nodes, 5 levels)."""
    method, _, size = name.partition(" ")
    if method == "plain":
        return {"method": "none"}
    spec: dict[str, Any] = {"method": method}
    if method in ("auto", "suffix"):
        spec["suffix_max_requests"] = 0
    nodes, _, depth = size.partition("x")
    if depth:
        return spec | GROWN | {"num_draft_nodes": int(nodes), "num_speculative_tokens": int(depth)}
    return spec | ({"num_speculative_tokens": int(nodes)} if nodes else {})


@dataclass
class Run:
    """Prompts that one engine answers, for as long as each place is taken: behind that, fewer run at once than were to."""

    llm: LLM
    requests: list[Request]
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._before = _thought(self.llm)
        for request in self.requests:
            self.llm.engine.add(request)

    @property
    def goes_on(self) -> bool:
        scheduler = self.llm.engine.scheduler
        return bool(scheduler.waiting) or len(scheduler.running) == min(len(self.requests), scheduler.max_num_seqs)

    def step(self) -> None:
        began = time.perf_counter()
        self.llm.engine.step()
        self.seconds += time.perf_counter() - began

    def end(self) -> dict[str, Any]:
        """What came of it. Whoever is not done yet goes."""
        policy, aside = (now - then for now, then in zip(_thought(self.llm), self._before, strict=True))
        texts = [r.output[: r.stats.tokens] for r in self.requests]  # the last token may not be known yet
        for request in self.requests:
            self.llm.engine.abort(request)
        while not self.llm.engine.idle:
            self.llm.engine.step()
        stats, tokens = [r.stats for r in self.requests], sum(map(len, texts))
        return {
            "seconds": self.seconds,
            "speed": tokens / self.seconds,
            "tokens": tokens,
            **{n: sum(getattr(s, n) for s in stats) for n in ("steps", "drafted", "accepted")},
            "policy": policy,
            "aside": aside,
            "by drafter": _by_drafter([s.by_drafter for s in stats]),
            "texts": texts,
        }


def answer(llms: dict[str, LLM], prompts: list[Prompt], tokens: int, spread: float = 0.0) -> dict[str, dict[str, Any]]:
    """All of these engines answer all prompts, one step of each in turn."""
    runs = {name: Run(llm, _requests(prompts, tokens, spread)) for name, llm in llms.items()}
    order = list(runs.values())
    while going := [run for run in order if run.goes_on]:
        for run in going:
            run.step()
        order.reverse()
    return {name: run.end() for name, run in runs.items()}


def _thought(llm: LLM) -> tuple[float, float]:
    """Seconds of deciding and learning so far; and of learning while a device was at work."""
    return llm.engine.seconds["policy"], llm.engine.aside


def lengths(count: int, tokens: int, spread: float) -> list[int]:
    """Of so many answers. With `spread`, some are that much longer and others shorter: where all are equally long, plain
    decoding ends them in the same step, and reads the next prompts together."""
    return [round(tokens * (1 + spread * (2 * (0.618 * i % 1) - 1))) for i in range(count)]


def _requests(prompts: list[Prompt], tokens: int, spread: float) -> list[Request]:
    return [
        Request(ids, SamplingParams(temperature=t, max_tokens=n, seed=i, ignore_eos=True), i, streams=False)
        for i, ((ids, t), n) in enumerate(zip(prompts, lengths(len(prompts), tokens, spread), strict=True))
    ]


def _by_drafter(books: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Drafted and accepted tokens."""
    names = sorted({name for book in books for name in book})
    return {name: [sum(book[name][i] for book in books if name in book) for i in (0, 1)] for name in names}


def point(
    llms: dict[str, LLM], prompts: dict[str, list[Prompt]], kind: str, load: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Every way in turns."""
    names = list(llms) if kind == MIXED else ["plain", "auto"]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    count = max(load * args.waves, args.least)
    for name in names:  # what a batch of this size prepares on first use
        llms[name].engine.scheduler.max_num_seqs = load
        answer({name: llms[name]}, take(prompts, kind, load, 7 + args.rounds * count), 24)  # and what a policy learns
    for turn in range(args.rounds):
        own = take(prompts, kind, count, turn * count)
        order = names if turn % 2 == 0 else names[::-1]
        for together in [order] if args.in_step else [[name] for name in order]:
            for name, found in answer({name: llms[name] for name in together}, own, args.tokens, args.spread).items():
                runs[name].append(found)
    return {name: _summary(runs[name], runs["plain"]) for name in names}


def shifts(
    llms: dict[str, LLM], prompts: dict[str, list[Prompt]], load: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Code, then prose, then code again: what each way makes of a kind once 50 steps of it are over."""
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(args.rounds):
        for phase, kind in enumerate((CODE, "writing", CODE)):
            for name, llm in llms.items():
                llm.engine.scheduler.max_num_seqs = load
                start = (3 * turn + phase) * 2 * load
                answer({name: llm}, take(prompts, kind, load, start), 50)
                own = take(prompts, kind, max(load * args.waves, args.least), start + load)
                speed = answer({name: llm}, own, args.tokens, args.spread)[name]["speed"]
                found.setdefault(f"{phase + 1}: {kind}", {}).setdefault(name, []).append(speed)
    return {phase: {name: statistics.median(s) for name, s in own.items()} for phase, own in found.items()}


def _summary(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [(a, b) for r, p in zip(runs, plain, strict=True) for a, b in zip(r["texts"], p["texts"], strict=True)]
    seconds = sum(r["seconds"] for r in runs)
    return {
        "speed": statistics.median(r["speed"] for r in runs),
        "ratio": statistics.median(r["speed"] / p["speed"] for r, p in zip(runs, plain, strict=True)),
        "speeds": [r["speed"] for r in runs],
        "block efficiency": sum(r["tokens"] for r in runs) / sum(r["steps"] for r in runs),
        "drafted": sum(r["drafted"] for r in runs) / sum(r["tokens"] for r in runs),
        "accepted": sum(r["accepted"] for r in runs) / sum(r["tokens"] for r in runs),
        "by drafter": _by_drafter([r["by drafter"] for r in runs]),
        "policy share": sum(r["policy"] for r in runs) / seconds,
        "aside share": sum(r["aside"] for r in runs)
        / seconds,  # learning while a device was at work: it delays nothing
        "same text": sum(all(map(operator.eq, a, b)) for a, b in texts) / len(texts),  # as far as both got
    }


def begin(args: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, Any], dict[str, list[Prompt]]]:
    """The ways, each with an engine, and prompts of each kind."""
    names = ["plain", "auto", *args.ways]
    if args.made_up:
        device = stack.enter_context(made_up.no_kernels(args.made_up))
        engines = {name: made_up.engine(_spec(name, args), device, max(args.loads)) for name in names}
        return {name: SimpleNamespace(engine=own) for name, own in engines.items()}, made_up.prompts(400)
    target = load(args.target)
    # what helps plain decoding too is not speculation's gain
    options = {"wide_weights": True, **json.loads(args.engine)}
    llms: dict[str, Any] = {
        name: stack.enter_context(LLM(target, speculative=_spec(name, args), max_num_seqs=max(args.loads), **options))
        for name in names
    }
    prompts = kinds(args, target)
    for name, llm in llms.items():
        prepare(llm.engine)
        answer({name: llm}, take(prompts, MIXED, 4, 0), 8)  # whatever is prepared on first use
        console.print(f"{name}: ready")
    return llms, prompts


def run(args: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {}
    with ExitStack() as stack:
        llms, prompts = begin(args, stack)
        if unknown := [kind for kind in args.kinds or () if kind not in (MIXED, *prompts)]:
            sys.exit(f"No prompts of the kind {unknown[0]!r}: there are {', '.join([MIXED, *prompts])}.")
        stack.enter_context(calm_collector())
        if args.shifts:
            return {"shifts": {str(number): shifts(llms, prompts, number, args) for number in args.loads}}
        for number in track(args.loads, description="Measuring", console=console):
            for kind in [MIXED, *prompts] if not args.kinds else args.kinds:
                found = point(llms, prompts, kind, number, args)
                out.setdefault(str(number), {})[kind] = found
                cells = ", ".join(f"{n} {s['ratio']:.2f}" for n, s in found.items() if n != "plain")
                console.print(f"{number} at once, {kind}: plain {found['plain']['speed']:.1f}/s; {cells}")
                if args.out:
                    report.keep(args.out, {"provenance": provenance(args), "results": out})
        if args.shifts_at:
            turned = {"shifts": {str(number): shifts(llms, prompts, number, args) for number in args.shifts_at}}
            report.show(console, tables({"results": turned}))
            if args.out:
                beside = Path(args.out).with_name(f"{Path(args.out).stem}-shifts.json")
                report.keep(str(beside), {"provenance": provenance(args), "results": turned})
    return out


def _spec(name: str, args: argparse.Namespace) -> dict[str, Any]:
    spec = way(name)
    return spec | ({"model": args.head} if args.head and spec["method"] in ("auto", "eagle3") else {})


# ------------------------------------------------------------------ showing
def tables(kept: dict[str, Any]) -> Iterator[tuple[str, report.Rows]]:
    results = kept["results"]
    if "shifts" in results:
        yield from _shift_tables(results["shifts"])
        return
    ways = list(next(iter(results.values()))[MIXED]) if MIXED in next(iter(results.values())) else []
    if ways:
        head = ["at once", "plain, tokens/s", *ways[1:], "auto over the best fixed"]
        rows = []
        for number, own in results.items():
            found = own[MIXED]
            fixed = [found[w]["ratio"] for w in ways if w not in ("auto", "plain")] or [1.0]
            cells = [f"{found[w]['ratio']:.2f}" for w in ways[1:]]
            best = found["auto"]["ratio"] / max(1.0, *fixed)
            rows.append([number, f"{found['plain']['speed']:.1f}", *cells, f"{best:.2f}"])
        yield "Mixed prompts: throughput over plain decoding", [head, *rows]
    names = [k for k in next(iter(results.values())) if k != MIXED]
    rows = [[n, *(f"{own[k]['auto']['ratio']:.2f}" if k in own else "" for k in names)] for n, own in results.items()]
    yield "`auto` over plain decoding, by kind of prompts", [["at once", *names], *rows]
    shares = [[n, *(f"{100 * own[k]['auto']['policy share']:.2f}%" for k in own)] for n, own in results.items()]
    yield "Share of the time that deciding and learning take", [["at once", *next(iter(results.values()))], *shares]


def _shift_tables(found: dict[str, Any]) -> Iterator[tuple[str, report.Rows]]:
    for number, phases in found.items():
        names = list(next(iter(phases.values())))
        rows = [["phase", *names, "auto over the best fixed"]]
        for phase, own in phases.items():
            best = max(speed for name, speed in own.items() if name != "auto")
            rows.append([phase, *(f"{own[n]:.1f}" for n in names), f"{own['auto'] / best:.2f}"])
        yield f"Tokens per second behind a shift of traffic, {number} at once", rows


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "target": f"made up: {args.made_up}" if args.made_up else Path(args.target).name,
        "threads": torch.get_num_threads(),
        **report.where(),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "waves": args.waves,
        "spread": args.spread,
        "in step": args.in_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", help="a head's folder; left out, the one that comes with the target")
    parser.add_argument(
        "--made-up",
        help="the real engine on a made-up device with these costs: gpu, h200, node or a JSON file; no model is loaded",
    )
    parser.add_argument("--spec-bench", help="Spec-Bench's question.jsonl")
    parser.add_argument("--gsm8k", help="GSM8K's test.jsonl")
    parser.add_argument("--loads", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", type=lambda s: [w.strip() for w in s.split(",") if w.strip()], default=[])
    parser.add_argument("--kinds", type=lambda s: s.split(","), help="only these, such as mixed,code")
    parser.add_argument("--shifts", action="store_true", help="code, prose, code instead of single kinds")
    parser.add_argument(
        "--shifts-at",
        type=lambda s: [int(x) for x in s.split(",")],
        help="code, prose, code at these loads too, behind all else; kept as OUT-shifts.json",
    )
    parser.add_argument("--in-step", action="store_true", help="all ways at the same time, one step of each in turn")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--spread", type=float, default=0.0, help="by how much of that answers are longer or shorter")
    parser.add_argument("--least", type=int, default=7, help="prompts of a point, where fewer run at once")
    parser.add_argument("--waves", type=int, default=1, help="prompts of a point, for each that runs at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--longest", type=int, default=1500, help="characters of a prompt")
    parser.add_argument("--engine", default="{}", help="options of LLM, as JSON")
    parser.add_argument("--out", help="keep the result here, as JSON, after every point")
    parser.add_argument("--show", help="print a kept result and end")
    args = parser.parse_args()
    if args.show:
        return report.print_kept(args.show, tables)
    if args.in_step and (torch.cuda.is_available() or args.shifts or args.shifts_at):
        parser.error("--in-step is for CPUs, and for single kinds of prompts: leave it out on a GPU and with --shifts.")
    try:
        result = {"provenance": provenance(args), "results": run(args)}
    except HeadstartError as error:
        sys.exit(str(error))
    if args.out:
        report.keep(args.out, result)
    report.show(console, tables(result))


if __name__ == "__main__":
    main()
