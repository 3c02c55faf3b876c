#!/usr/bin/env python3
"""Headstart on a GPU: steps against the hardware's floor, the whole engine, real pairs, and whether texts stay the same.

    python benchmarks/gpu.py                                        shapes of 135M to 8B with random weights
    python benchmarks/gpu.py --model PATH --draft PATH              adds real weights: speculation, and equal outputs
    python benchmarks/gpu.py --only steps,engine --shapes 8B        a part of it
    python benchmarks/gpu.py --out benchmarks/results/gpu.json      keeps it with provenance; parts of one commit add up
    python benchmarks/gpu.py --show benchmarks/results/gpu.json     prints a kept result, as Markdown

Parts
    steps    milliseconds of one forward at a context of 1,024 tokens: plain, and trees of 8 and 64 tokens, and batches; beside
             the floor (all weight products of that forward alone, as one graph of library calls) and its bytes at 4.8 TB/s
    engine   tokens per second of the whole engine, plain decoding, by batch size; how much of the step time is reached
    peers    transformers' `generate`, eager and with its compiled static cache, on the same weights in the same run
    pair     a draft model and ngram on real prompts: speed-up, block efficiency, share of the textbook prediction
    same     are outputs the same with and without speculation, alone and in batches? For each first difference, its margin
    deterministic   the same question under `deterministic`, where the answer has to be yes, and the steps' times there
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
import report

import headstart
from headstart.config import EngineConfig, parse_speculative
from headstart.core import Batch, Choice, Request, SamplingParams, Segment
from headstart.drafters import Surroundings
from headstart.engine import Engine
from headstart.models.runners import make_runner

console = Console(width=150)
SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
    "1.5B": dict(model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "0.5B": dict(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "135M": dict(model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                 num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True),
}  # fmt: skip
STEPS = {
    "1": (1, 1, False),
    "8 tree": (1, 8, True),
    "64 tree": (1, 64, True),
    "8 x 1": (8, 1, False),
    "64 x 1": (64, 1, False),
}
PARTS = ("steps", "engine", "peers", "pair", "same", "deterministic")
CONTEXT, BANDWIDTH = 1024, 4.8e12
BATCHES = (1, 4, 8, 16, 32, 64)
EDIT = (
    "Rewrite the following function so that every variable name is in upper case, and change nothing else:\n\n"
    "def total(prices, rate):\n    amount = 0\n    for price in prices:\n        if price > 0:\n            amount += price\n"
    "    tax = amount * rate\n    result = amount + tax\n    return result\n\n\ndef average(values):\n    count = 0\n"
    "    amount = 0\n    for value in values:\n        amount += value\n        count += 1\n    return amount / count\n"
)


# ------------------------------------------------------------------ what is measured
def random_model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """This shape with random weights, on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SHAPES[name], max_position_embeddings=8192)
    with torch.device("cuda"):
        torch.set_default_dtype(dtype)
        try:
            return AutoModelForCausalLM.from_config(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def a_batch(size: int, new: int, tree: bool, page: int = 16) -> Batch:
    """So many requests at the measured context, each with a chain or a tree of new tokens."""
    rng, segments, positions = np.random.default_rng(0), [], []
    per = -(-(CONTEXT + new) // page)
    for b in range(size):
        pages = rng.permutation(per) + b * per
        slots = (pages[:, None] * page + np.arange(page)).reshape(-1)[: CONTEXT + new]
        parents = np.array([-1, *(int(rng.integers(max(0, i - 8), i)) for i in range(1, new))]) if tree else None
        depth = list(range(new))
        if parents is not None:
            depth = [0] * new
            for i in range(1, new):
                depth[i] = depth[parents[i]] + 1
        segments.append(Segment(b * new, (b + 1) * new, CONTEXT, slots, parents))
        positions += [CONTEXT + d for d in depth]
    rows = np.arange(size * new)
    choice = Choice.of(len(rows), size)
    choice.nodes[:] = [new - 1] * size
    return Batch(rows % 1000, np.array(positions), segments, rows, choice=choice)


def time_step(runner: Any, batch: Batch, repeats: int = 30) -> float:
    """Milliseconds of one forward, launched again and again without waiting."""
    for _ in range(3):
        runner.forward(batch)
    return timed(lambda: runner.forward(batch), repeats)


def timed(run: Callable[[], Any], repeats: int, inner: int = 5) -> float:
    """Median milliseconds of one call."""
    out = []
    torch.cuda.synchronize()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        out.append(begin.elapsed_time(end) / inner)
    return statistics.median(out)


def products_alone(runner: Any, rows: int) -> float:
    """The floor: every weight product of a forward as one graph of library calls, nothing else."""
    from headstart.models.lean import LeanModel

    lean = runner.lean
    assert isinstance(lean, LeanModel)
    weights = [w for b in lean.blocks for w in (b.qkv.weight, b.out.weight, b.gate_up.weight, b.down.weight)]
    inputs = {
        w.shape[1]: torch.randn(rows, w.shape[1], device="cuda", dtype=w.dtype) for w in (*weights, lean.head.weight)
    }

    def run() -> None:
        for w in (*weights, lean.head.weight):
            F.linear(inputs[w.shape[1]], w)

    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return timed(graph.replay, 20)


def steps(model: Any, deterministic: bool = False) -> dict[str, Any]:
    runner = make_runner(model, deterministic=deterministic)
    runner.allocate((CONTEXT + 80) * 66, max_rows=512, max_segments=64)
    weights = runner.weight_bytes
    if runner.text_config.tie_word_embeddings is False:
        weights -= model.get_input_embeddings().weight.numel() * 2  # one row of it is read
    out: dict[str, Any] = {"bytes": weights, "at full bandwidth": weights / BANDWIDTH * 1e3}
    for name, (size, new, tree) in STEPS.items():
        out[name] = time_step(runner, a_batch(size, new, tree))
        if not deterministic and size == 1:
            out[f"{name}, products alone"] = products_alone(runner, new)
    budget = getattr(runner, "budget", None)
    if budget is not None:
        out["graphs"] = {"count": budget.count, "seconds": budget.seconds, "bytes": budget.bytes}
    runner.allocate(16)
    return out


def an_engine(model: Any, speculative: Any = None, draft: Any = None, **options: Any) -> Engine:
    """An engine without text around a model in memory."""
    spec, _ = parse_speculative(speculative)
    names = ("deterministic", "fuse", "kernels")
    runner = make_runner(model, **{n: options.pop(n) for n in names if n in options})
    seqs = options.get("max_num_seqs", 64)
    around = Surroundings(runner.vocab_size, device="cuda", max_model_len=4096, max_num_seqs=seqs, kv_memory=4 << 30)
    around.takes_mail = runner.chooses
    if draft is not None:
        from headstart.models.load import Loaded

        around.extras["draft_model"] = Loaded("draft", draft, None, frozenset(), 4096, runner.vocab_size)
    config = EngineConfig(**({"max_num_seqs": 64, "max_batch_tokens": 512, "share_prefixes": False} | options))
    return Engine(runner, config, 4096, 64 * 2048 // 16, spec, around)


def requests(
    prompts: list[list[int]], tokens: int, temperature: float = 0.0, stop: frozenset[int] = frozenset()
) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=not stop)
    return [Request(list(p), params, seed=i + 1, eos_ids=stop) for i, p in enumerate(prompts)]


def decode(engine: Engine, asked: list[Request]) -> dict[str, float]:
    """Run to the end. Tokens per second count from the moment when every request has its first token."""
    for r in asked:
        engine.add(r)
    while any(not r.num_output for r in asked):
        engine.step()
    begin, had = time.perf_counter(), sum(r.num_output for r in asked)
    num_steps = 0
    while not engine.idle:
        engine.step()
        num_steps += 1
    seconds = time.perf_counter() - begin
    made = sum(r.num_output for r in asked) - had
    return {"tokens_per_second": made / seconds, "ms_per_step": seconds / max(num_steps, 1) * 1e3}


def engine_speeds(
    model: Any, prompt: int = 128, tokens: int = 192, batches: tuple[int, ...] = BATCHES
) -> dict[str, Any]:
    engine = an_engine(model)
    vocab, out = engine.runner.vocab_size, {}
    for size in batches:
        rng = np.random.default_rng(size)
        prompts = [rng.integers(0, vocab, prompt).tolist() for _ in range(size)]
        decode(engine, requests(prompts, 24))
        runs = [decode(engine, requests(prompts, tokens)) for _ in range(3)]
        out[str(size)] = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    mine = time_step(engine.runner, a_batch(1, 1, False))
    out["step of one token at 1,024"] = mine
    at_1k = decode_at(engine, 960)
    out["1 at context 1k"] = at_1k | {"share of step time": mine / at_1k["ms_per_step"]}
    engine.close()
    return out


def decode_at(engine: Engine, prompt: int) -> dict[str, float]:
    rng = np.random.default_rng(7)
    ids = rng.integers(0, engine.runner.vocab_size, prompt).tolist()
    runs = [decode(engine, requests([ids], 128)) for _ in range(3)]
    return {k: statistics.median(r[k] for r in runs) for k in runs[0]}


def peers(model: Any, prompt: int = 128, tokens: int = 128, static: bool = True) -> dict[str, float]:
    """transformers on the same weights: tokens per second of the decode, by the difference of two lengths."""
    ids = torch.randint(0, 1000, (1, prompt), device="cuda")
    model.set_attn_implementation("sdpa")

    def seconds(length: int, **options: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length,
                       do_sample=False, pad_token_id=0, **options)  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def speed(**options: Any) -> float:
        seconds(8, **options)
        return statistics.median((tokens - 8) / (seconds(tokens, **options) - seconds(8, **options)) for _ in range(3))

    out = {"generate, eager": speed()}
    if static:
        out["generate, static cache compiled"] = speed(cache_implementation="static")
    return out


# ------------------------------------------------------------------ real weights
def load_pair(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    from headstart.models.load import load

    model = load(args.model, "cuda")
    draft = load(args.draft, "cuda") if args.draft else None
    return model, draft, model.tokenizer


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.chat([{"role": "user", "content": text}])


def real_prompts(args: argparse.Namespace, count: int) -> list[str]:
    """From a Spec-Bench file where one is given, else the built-in ones in turn."""
    from engine import BATCH, PROMPTS

    if args.questions:
        lines = [json.loads(line) for line in Path(args.questions).read_text().splitlines() if line.strip()]
        step = max(1, len(lines) // count)
        return [line["turns"][0][:1500] for line in lines[::step]][:count]
    own = [*PROMPTS["copy"], *PROMPTS["free"], *BATCH, EDIT]
    return [own[i % len(own)] + ("" if i < len(own) else f" (version {i})") for i in range(count)]


def pair(args: argparse.Namespace, model: Any, draft: Any, tokenizer: Any) -> dict[str, Any]:
    """Speculation on real prompts, against plain decoding in the same run, with the textbook's prediction."""
    free = [chat_ids(tokenizer, p) for p in real_prompts(args, 8)]
    copying = [chat_ids(tokenizer, p) for p in (EDIT, *real_copy())]
    stop, out = model.eos_ids, {}
    plain = an_engine(model.model)
    target_step = {n: time_step(plain.runner, a_batch(1, n, False)) for n in (1, 2, 4, 6, 8, 9, 17)}
    ways: dict[str, tuple[Any, list[list[int]]]] = {
        "ngram 8 on copying": ({"method": "ngram", "num_speculative_tokens": 8}, copying),
        "ngram 16 on copying": ({"method": "ngram", "num_speculative_tokens": 16}, copying),
        "suffix 16 on copying": ({"method": "suffix", "num_speculative_tokens": 16}, copying),
        "ngram 8 on mixed": ({"method": "ngram", "num_speculative_tokens": 8}, free),
    }
    draft_step = 0.0
    if draft is not None:
        runner = make_runner(draft.model)
        runner.allocate(2048)
        draft_step = time_step(runner, a_batch(1, 1, False))
        for gamma in (1, 3, 5):
            spec = {"method": "draft_model", "model": "x", "num_speculative_tokens": gamma}
            ways[f"draft model {gamma} on mixed"] = (spec, free)
            ways[f"draft model {gamma} on copying"] = (spec, copying)
    for name, (spec, prompts) in ways.items():
        if args.ways not in name:
            continue
        engine = an_engine(model.model, spec, draft.model if "draft" in spec["method"] else None)
        ours, theirs = race(engine, plain, prompts, args.tokens, stop)
        out[name] = summary(
            ours, theirs, spec["num_speculative_tokens"], draft_step if "draft" in name else 0.0, target_step
        )
        engine.close()
    plain.close()
    return {"target step ms": target_step, "draft step ms": draft_step, "ways": out}


def real_copy() -> list[str]:
    from engine import PROMPTS

    return PROMPTS["copy"]


def race(
    engine: Engine, plain: Engine, prompts: list[list[int]], tokens: int, stop: frozenset[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One request at a time, the two engines in turn: medians, after two runs that capture graphs and teach suffix."""
    out: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for ids in prompts:
        rounds = [[run_one(e, ids, tokens, stop) for e in (engine, plain)] for _ in range(2 + 9)][2:]
        for kept, runs in zip(out, zip(*rounds, strict=True), strict=True):
            kept.append(runs[-1] | {"speed": statistics.median(r["speed"] for r in runs)})
    return out


def run_one(engine: Engine, ids: list[int], tokens: int, stop: frozenset[int]) -> dict[str, Any]:
    asked = requests([ids], tokens, 0.0, stop)
    speed = decode(engine, asked)["tokens_per_second"]
    return {"speed": speed, "tokens": asked[0].output, "stats": asked[0].stats}


def summary(
    ours: list[Any], theirs: list[Any], gamma: int, draft_ms: float, target: dict[int, float]
) -> dict[str, Any]:
    drafted = sum(o["stats"].drafted for o in ours)
    accepted = sum(o["stats"].accepted for o in ours)
    made, taken = sum(o["stats"].tokens for o in ours), sum(o["stats"].steps for o in ours)
    tau, c = made / taken, draft_ms / target[1]
    wide = min((n for n in target if n >= gamma + 1), default=max(target))
    honest = tau / (c * gamma + target[wide] / target[1])
    speedup = sum(len(o["tokens"]) / t["speed"] for o, t in zip(ours, theirs, strict=True)) / sum(
        len(o["tokens"]) / o["speed"] for o in ours
    )
    return {
        "tokens_per_second": statistics.median(o["speed"] for o in ours),
        "plain": statistics.median(t["speed"] for t in theirs),
        "speedup": speedup,
        "block_efficiency": tau,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "predicted (textbook, measured tau)": tau / (c * gamma + 1),
        "share of textbook": speedup / (tau / (c * gamma + 1)),
        "predicted with v(m)": honest,
        "share with v(m)": speedup / honest,
        "identical outputs": sum(o["tokens"] == t["tokens"] for o, t in zip(ours, theirs, strict=True)),
        "prompts": len(ours),
    }


def same(args: argparse.Namespace, model: Any, draft: Any, tokenizer: Any, deterministic: bool) -> dict[str, Any]:
    """Every way must write what plain decoding, alone, writes. Counts differences; greedy and seeded."""
    prompts = [chat_ids(tokenizer, p) for p in real_prompts(args, args.prompts)]
    options = {"deterministic": deterministic}
    drafters: dict[str, Any] = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "suffix": {"method": "suffix", "num_speculative_tokens": 16},
    }
    if draft is not None:
        tree = {"method": "draft_model", "model": "x", "tree": True, "num_speculative_tokens": 4, "num_draft_nodes": 12}
        drafters["draft model, chain"] = {"method": "draft_model", "model": "x", "num_speculative_tokens": 4}
        drafters["draft model, tree"] = tree
    out: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        reference: list[list[int]] = []
        for name, spec in drafters.items():
            for size in args.batches[1:] if "tree" in name else args.batches:
                own = draft.model if draft is not None and "draft" in name else None
                began = time.perf_counter()
                engine = an_engine(model.model, spec, own, max_num_seqs=size, **options)
                texts = run_all(engine, prompts, args.tokens, temperature, model.eos_ids)
                reference = reference or texts
                different = [i for i, (a, b) in enumerate(zip(texts, reference, strict=True)) if a != b]
                key = f"temperature {temperature:g}, {name}, batch {size}"
                out[key] = {"different": len(different), "of": len(texts), "tokens": sum(map(len, texts))}
                if different and not temperature:
                    margins = [margin(model.model, prompts[i], texts[i], reference[i]) for i in different]
                    out[key]["largest margin at a first difference"] = max(margins)
                console.print(key, out[key], f"{time.perf_counter() - began:.1f} s")
                engine.close()
                del engine
                gc.collect()
    return out


@torch.inference_mode()
def margin(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """How far apart the model itself puts the two tokens at which two texts part."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return float("inf")
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([prompt + theirs[:at]], device="cuda"), use_cache=False).logits[0, -1].float()
    return float((logits[theirs[at]] - logits[ours[at]]).abs())


def run_all(
    engine: Engine, prompts: list[list[int]], tokens: int, temperature: float, stop: frozenset[int]
) -> list[list[int]]:
    asked = requests(prompts, tokens, temperature, stop)
    for r in asked:
        engine.add(r)
    while not engine.idle:
        engine.step()
    return [r.output for r in asked]


# ------------------------------------------------------------------ keeping and showing
def provenance() -> dict[str, Any]:
    import transformers
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "headstart": headstart.__version__,
        "commit": report.commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def show(result: dict[str, Any]) -> None:
    """Tables for the terminal."""
    where = result["provenance"]
    console.print(
        f"{where['gpu']}, torch {where['torch']}, Triton {where['triton']}, commit {where['commit']}, {where['date']}"
    )
    report.show(console, tables(result))


def tables(result: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    if "steps" in result:
        names = [*STEPS, *(f"{n}, products alone" for n in ("1", "8 tree", "64 tree")), "at full bandwidth"]
        rows = [[s, *(_ms(r.get(n)) for n in names)] for s, r in result["steps"].items()]
        yield "Milliseconds of one forward, context 1,024, bf16", [["shape", *names], *rows]
    if "engine" in result:
        sizes = [str(b) for b in BATCHES]
        rows = [[s, *(_speed(r.get(n)) for n in sizes), _speed(r.get("1 at context 1k")),
                 f"{r['1 at context 1k']['share of step time']:.2f}"] for s, r in result["engine"].items()]  # fmt: skip
        yield (
            "Whole engine, tokens per second, plain, prompt 128",
            [["shape", *sizes, "1, at 1k", "of step time"], *rows],
        )
    if "peers" in result:
        ways = sorted({w for r in result["peers"].values() for w in r})
        rows = [[s, *(f"{r[w]:.0f}" if w in r else "" for w in ways)] for s, r in result["peers"].items()]
        yield "transformers on the same weights, tokens per second, batch 1", [["shape", *ways], *rows]
    if "pair" in result:
        keys = ["tokens_per_second", "plain", "speedup", "block_efficiency", "acceptance_rate", "share of textbook",
                "share with v(m)"]  # fmt: skip
        rows = [[w, *(f"{r[k]:.2f}" if k not in keys[:2] else f"{r[k]:.0f}" for k in keys),
                 f"{r['identical outputs']}/{r['prompts']}"] for w, r in result["pair"]["ways"].items()]  # fmt: skip
        yield "Speculation, batch 1", [["way", *keys, "identical"], *rows]
    for part in ("same", "same, deterministic"):
        if part in result:
            worst = "largest margin at a first difference"
            rows = [
                [w, str(r["different"]), str(r["of"]), str(r["tokens"]), _ms(r.get(worst))]
                for w, r in result[part].items()
            ]
            yield f"Outputs: {part}", [["way", "different", "of", "tokens", worst], *rows]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _speed(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['tokens_per_second']:.0f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas")
    parser.add_argument("--shapes", default="8B,1.5B,0.5B,135M", help="shapes with random weights, with commas")
    parser.add_argument("--model", help="a real model: folder, GGUF file or name")
    parser.add_argument("--draft", help="a draft model for it")
    parser.add_argument("--ways", default="", help="of the part `pair`, only those whose name has this in it")
    parser.add_argument("--questions", help="a Spec-Bench question.jsonl for prompts")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of the part `same`")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64],
        help="batch sizes of the parts `same` and `deterministic`, with commas",
    )  # fmt: skip
    parser.add_argument(
        "--static", choices=["none", "real", "all"], default="real",
        help="for which models transformers' static cache is compiled too (a minute or more each)",
    )  # fmt: skip
    parser.add_argument("--out", help="keep the result here, as JSON")
    parser.add_argument("--show", help="print a kept result and end")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.show:
        return report.print_kept(args.show, tables)
    report.refuse_unknown(args.only, PARTS)
    report.refuse_unknown(args.shapes, SHAPES)
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU; torch sees none.")
    parts, result = args.only.split(","), {"provenance": provenance()}
    for name in filter(None, args.shapes.split(",")):
        model = random_model(name)
        if "steps" in parts:
            result.setdefault("steps", {})[name] = steps(model)
            if "deterministic" in parts:
                result["steps"][f"{name}, deterministic"] = steps(model, True)
        if "engine" in parts:
            result.setdefault("engine", {})[name] = engine_speeds(model)
        if "peers" in parts:
            result.setdefault("peers", {})[name] = peers(model, static=args.static == "all")
        del model
        gc.collect()
        torch.cuda.empty_cache()
        console.print(f"{name} done")
    if args.model:
        model, draft, tokenizer = load_pair(args)
        name = f"{Path(args.model).name}, real weights"
        if "steps" in parts:
            result.setdefault("steps", {})[name] = steps(model.model)
        if "engine" in parts:
            result.setdefault("engine", {})[name] = engine_speeds(model.model)
        if "peers" in parts:
            result.setdefault("peers", {})[name] = peers(model.model, static=args.static != "none")
        if "pair" in parts:
            result["pair"] = pair(args, model, draft, tokenizer)
        if "same" in parts:
            result["same"] = same(args, model, draft, tokenizer, False)
        if "deterministic" in parts:
            result["same, deterministic"] = same(args, model, draft, tokenizer, True)
    show(result)
    if args.out:
        report.keep(args.out, result)


if __name__ == "__main__":
    main()
