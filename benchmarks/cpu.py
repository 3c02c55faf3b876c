#!/usr/bin/env python3
"""Headstart on a CPU, on torch and on llama.cpp, beside transformers, llama.cpp and vLLM: the same prompts, interleaved.

    python benchmarks/cpu.py --gguf model.Q8_0.gguf                 the built-in model on torch, this file on llama.cpp
    python benchmarks/cpu.py --gguf FILE --vllm venv/bin/python     adds vLLM's CPU build, in its own environment
    python benchmarks/cpu.py --only steps                           milliseconds of a forward by its number of rows
    python benchmarks/cpu.py --out benchmarks/results/cpu.json      keeps every sample, with provenance
    python benchmarks/cpu.py --show benchmarks/results/cpu.json     prints a kept result, as Markdown

Parts
    speeds      tokens per second of decoding, from the first token on, greedy: `free` writes a story, `copy` repeats a text
    steps       milliseconds of a forward of 1 to 32 rows behind 128 tokens, for each format, and the share of memory bandwidth
    perplexity  of this repository's own documentation, for each format: what quantising costs

Every round runs every way once, after a round that does not count; tables show medians over rounds. It refuses to time on a
busy machine (`--busy` insists).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parent))
import report
from engine import PROMPTS

import headstart
from headstart import LLM, SamplingParams
from headstart.models.llamacpp import native
from headstart.policy.costs import measure

console = Console(width=150)
PARTS = ("speeds", "steps", "perplexity")
ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32)
ANSWER = "speed: "
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, method, tokens = sys.argv[1:4]
ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
spec = None if method == "none" else ngram
llm = LLM(folder, dtype="float32", speculative_config=spec, max_model_len=1024, enable_prefix_caching=False)
def seconds(ids, n):
    begin = time.perf_counter()
    out = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=n), use_tqdm=False)[0].outputs[0]
    return time.perf_counter() - begin, len(out.token_ids)
print("speed: 0", flush=True)
for line in sys.stdin:
    ids = json.loads(line)
    first, _ = seconds(ids, 1)
    whole, count = seconds(ids, int(tokens))
    print("speed:", (count - 1) / (whole - first), flush=True)
"""


@dataclass
class Way:
    """One way to decode: prompts in, tokens per second out."""

    name: str
    speed: Callable[[str], float]
    close: Callable[[], None]


# ------------------------------------------------------------------ ways
def headstart_way(name: str, model: str, tokens: int, speculative: Any = None, **options: Any) -> Way:
    llm = LLM(model, speculative=speculative, max_model_len=1024, share_prefixes=False, **options)

    def speed(prompt: str) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        stats = llm.chat([{"role": "user", "content": prompt}], params)[0].completions[0].stats
        return stats.decode_tokens_per_second

    return Way(name, speed, llm.close)


def transformers_way(name: str, tokens: int, **options: Any) -> Way:
    from headstart.models.load import load

    loaded = load("smollm2", "cpu", "float32", runner="torch")

    def seconds(ids: torch.Tensor, count: int, **more: Any) -> tuple[float, int]:
        begin = time.perf_counter()
        out = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **more
        )
        return time.perf_counter() - begin, out.shape[1] - ids.shape[1]

    def speed(prompt: str) -> float:
        ids = torch.tensor([loaded.tokenizer.chat([{"role": "user", "content": prompt}])])
        first, _ = seconds(ids, 1)
        whole, count = seconds(ids, tokens, **options)
        return (count - 1) / (whole - first)

    return Way(name, speed, lambda: None)


def llamacpp_decode(name: str, path: str, tokens: int) -> Way:
    """What llama.cpp's own benchmark does: one decode after the other, no sampling, no text."""
    file = native.LlamaFile(Path(path), native.LlamaOptions())
    context = native.LlamaContext(file, 2048, 512, 1, 1)
    from headstart.models.llamacpp.tokenizer import LlamaTokenizer

    tokenizer = LlamaTokenizer(file)

    def speed(prompt: str) -> float:
        ids = np.array(tokenizer.chat([{"role": "user", "content": prompt}]))
        context.remove(0, 0, -1)
        context.decode(ids, np.arange(len(ids)), [[0]] * len(ids), np.array([len(ids) - 1]))
        begin, row = time.perf_counter(), np.array([0])
        for i in range(tokens - 1):
            context.decode(ids[i % len(ids)][None], np.array([len(ids) + i]), [[0]], row)
        return (tokens - 1) / (time.perf_counter() - begin)

    return Way(name, speed, context.close)


def llamacpp_python(name: str, path: str, tokens: int, lookup: int = 0) -> Way:
    """llama-cpp-python's own generation, with its prompt lookup."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
    llm = llama_cpp.Llama(
        path, n_ctx=2048, n_threads=os.cpu_count(), draft_model=draft, logits_all=bool(lookup), verbose=False
    )
    file = native.LlamaFile(Path(path), native.LlamaOptions())
    from headstart.models.llamacpp.tokenizer import LlamaTokenizer

    tokenizer = LlamaTokenizer(file)

    def speed(prompt: str) -> float:
        ids, made, first = tokenizer.chat([{"role": "user", "content": prompt}]), 0, 0.0
        for token in llm.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            made += 1
            first = first or time.perf_counter()
            if made >= tokens or token in tokenizer.eos_ids:
                break
        return (made - 1) / (time.perf_counter() - first)

    return Way(name, speed, llm.close)


def vllm_way(name: str, python: str, folder: str, method: str, tokens: int) -> Way:
    from headstart.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(folder))
    process = subprocess.Popen(
        [python, "-c", VLLM, folder, method, str(tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},  # GB; its default is most of the memory
        stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def answer() -> float:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANSWER):
                return float(line.removeprefix(ANSWER))
        sys.exit("vLLM ended early.")

    def speed(prompt: str) -> float:
        assert process.stdin is not None
        process.stdin.write(json.dumps(tokenizer.chat([{"role": "user", "content": prompt}])) + "\n")
        process.stdin.flush()
        return answer()

    answer()
    return Way(name, speed, process.kill)


def ways(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Way]]]:
    """Names, and how to open each."""

    def way(open: Callable[..., Way], name: str, *rest: Any, **options: Any) -> tuple[str, Callable[[], Way]]:
        return name, lambda: open(name, *rest, **options)

    n, fixed = args.tokens, {"method": "ngram", "num_speculative_tokens": args.k}
    ngram = {"method": "ngram", "policy": "adaptive"}
    suffix = {"method": "suffix", "policy": "adaptive", "suffix_max_requests": 0}
    drafters = {"plain": None, f"ngram {args.k}": fixed, "ngram adaptive": ngram, "suffix adaptive": suffix}
    yield way(transformers_way, "transformers generate, f32", n)
    yield way(transformers_way, "transformers prompt lookup 5, f32", n, prompt_lookup_num_tokens=5)
    for kind in (None, "int8", "int4"):
        for name, spec in drafters.items():
            own = f"Headstart torch {kind or 'f32'}, {name}"
            yield way(headstart_way, own, "smollm2", n, spec, runner="torch", quantize=kind)
    for path in args.gguf:
        file = Path(path).name
        yield way(llamacpp_decode, f"llama.cpp, decode alone, {file}", path, n)
        yield way(llamacpp_python, f"llama-cpp-python, plain, {file}", path, n)
        yield way(llamacpp_python, f"llama-cpp-python, prompt lookup 10, {file}", path, n, 10)
        for name, spec in drafters.items():
            yield way(headstart_way, f"Headstart llama.cpp, {name}, {file}", path, n, spec, runner="llamacpp")
    if args.vllm:
        from headstart.models.load import resolve

        for method in ("none", "ngram"):
            yield way(vllm_way, f"vLLM CPU, {method}, f32", args.vllm, str(resolve("smollm2")), method, n)


class Worker:
    """One way in a process of its own: threads that one engine leaves waiting would disturb the others."""

    def __init__(self, name: str) -> None:
        self.name = name
        with console.status(f"Opening {name}"):
            self.process = subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
            self._answer()

    def speed(self, prompt: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        """The next line that is one of ours."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return float(line.removeprefix(ANSWER))
        sys.exit(
            f"{self.name} ended early. To see why: python {__file__} {' '.join(sys.argv[1:])} --worker {self.name!r}"
        )

    def close(self) -> None:
        """With everything that it started: vLLM has processes of its own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def serve(args: argparse.Namespace) -> None:
    """Open one way and answer prompts with speeds."""
    way = next(make for name, make in ways(args) if name == args.worker)()
    print(f"{ANSWER}0", flush=True)
    for line in sys.stdin:
        print(f"{ANSWER}{way.speed(json.loads(line))}", flush=True)
    way.close()


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    opened = [Worker(name) for name, _ in ways(args) if any(part in name for part in args.ways.split(","))]
    out: dict[str, Any] = {w.name: {kind: [] for kind in PROMPTS} for w in opened}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("speeds", total=len(opened) * (1 + args.rounds))
        for number in range(1 + args.rounds):
            for way in opened:
                for kind, prompts in PROMPTS.items():
                    values = [way.speed(p) for p in prompts[: args.prompts]]
                    if number:
                        out[way.name][kind].append(len(values) / sum(1 / v for v in values))
                bar.advance(task)
    for way in opened:
        way.close()
    return out


# ------------------------------------------------------------------ steps
def steps(args: argparse.Namespace) -> dict[str, Any]:
    formats: dict[str, tuple[str, dict[str, Any]]] = {
        "torch f32": ("smollm2", {"runner": "torch", "wide_weights": True})
    }
    formats |= {f"torch {q}": ("smollm2", {"runner": "torch", "quantize": q}) for q in ("int8", "int4")}
    formats |= {f"llama.cpp {Path(p).name}": (p, {"runner": "llamacpp"}) for p in args.gguf}
    out = {}
    for name, (model, options) in formats.items():
        with LLM(model, max_model_len=1024, **{"speculative": None, **options}) as llm:
            runner = llm.engine.runner
            costs = measure(runner, max(ROWS), math.inf, ROWS)
            times = {rows: costs.of(rows) * 1e3 for rows in ROWS}
            spare = sum(p.extra_bytes for p in runner.lean.products) if options.get("wide_weights") else 0
            read = runner.weight_bytes - spare  # the second copy is for several rows
            out[name] = {"ms": times, "bytes": read, "GB/s": read / times[1] / 1e6}
        gc.collect()
        console.print(name, out[name])
    return out


def bandwidth() -> float:
    """GB/s that all cores read together."""
    data, best = torch.ones(1 << 28), 0.0
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * 4 / (time.perf_counter() - begin) / 1e9)
    return best


# ------------------------------------------------------------------ perplexity
def perplexity(args: argparse.Namespace) -> dict[str, float]:
    text = "\n".join(
        (Path(__file__).parent.parent / "docs" / name).read_text() for name in ("losslessness.md", "gpu.md")
    )
    models: dict[str, tuple[str, dict[str, Any]]] = {"torch f32": ("smollm2", {"runner": "torch"})}
    models |= {f"torch {q}": ("smollm2", {"runner": "torch", "quantize": q}) for q in ("int8", "int4")}
    models |= {f"llama.cpp {Path(p).name}": (p, {"runner": "llamacpp"}) for p in args.gguf}
    out = {}
    for name, (model, options) in models.items():
        with LLM(model, max_model_len=1024, **{"speculative": None, **options}) as llm:
            out[name] = perplexity_of(llm, text)
        console.print(name, round(out[name], 2))
    return out


def perplexity_of(llm: LLM, text: str, count: int = 3000, piece: int = 500) -> float:
    ids, loss, seen = llm.tokenizer.encode(text)[:count], 0.0, 0
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for start in range(0, len(ids) - 1, piece):
        told = llm.generate([ids[start : start + piece]], params)[0].prompt_logprobs or []
        for entry in told[1:]:
            loss, seen = loss - entry.logprob, seen + 1  # type: ignore[union-attr]
    return math.exp(loss / seen)


# ------------------------------------------------------------------ keeping and showing
def provenance(args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    out = {
        "machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        "load before": os.getloadavg()[0], "read GB/s": bandwidth(), "python": platform.python_version(),
        "torch": torch.__version__, "transformers": transformers.__version__, "headstart": headstart.__version__,
        "commit": report.commit(), "date": time.strftime("%Y-%m-%d"),
        "rounds": args.rounds, "tokens": args.tokens, "k": args.k,
    }  # fmt: skip
    if native.available() is None:
        import llama_cpp

        out["llama-cpp-python"] = llama_cpp.__version__
    return out


def tables(result: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    if "speeds" in result:
        medians = {w: {k: statistics.median(v) for k, v in r.items()} for w, r in result["speeds"].items()}
        rows = [[w, *(f"{r[k]:.1f}" for k in PROMPTS)] for w, r in medians.items()]
        yield "Tokens per second of decoding, greedy", [["way", *PROMPTS], *rows]
    if "steps" in result:
        rows = [
            [f, *(f"{float(r['ms'][n] if n in r['ms'] else r['ms'][str(n)]):.1f}" for n in ROWS),
             f"{r['GB/s'] / result['provenance']['read GB/s']:.2f}"]
            for f, r in result["steps"].items()
        ]  # fmt: skip
        yield "Milliseconds of a forward by rows, context 128", [["format", *map(str, ROWS), "of bandwidth"], *rows]
    if "perplexity" in result:
        yield "Perplexity", [["format", "perplexity"], *([f, f"{v:.2f}"] for f, v in result["perplexity"].items())]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas")
    parser.add_argument("--gguf", action="append", default=[], help="a GGUF file for llama.cpp; may be given again")
    parser.add_argument("--ways", default="", help="only ways whose name has one of these in it, with commas")
    parser.add_argument("--vllm", help="the Python of an environment with vLLM's CPU build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-k", type=int, default=8, help="draft tokens")
    parser.add_argument("--busy", action="store_true", help="time although other work runs on this machine")
    parser.add_argument("--out", help="keep the result here, as JSON")
    parser.add_argument("--show", help="print a kept result and end")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.show:
        return report.print_kept(args.show, tables)
    report.refuse_unknown(args.only, PARTS)
    if args.gguf and (why_not := native.available()) is not None:
        sys.exit(f"--gguf needs llama.cpp, and {why_not}.")
    if missing := [path for path in args.gguf if not Path(path).is_file()]:
        sys.exit(f"{missing[0]} does not exist: --gguf names a GGUF file.")
    if args.worker:
        return serve(args)
    if os.getloadavg()[0] > 0.5 and not args.busy:
        sys.exit(f"The load is {os.getloadavg()[0]:.2f}: timings would mean nothing. Wait, or insist with --busy.")
    result: dict[str, Any] = {"provenance": provenance(args)}
    for part, run in (("speeds", speeds), ("steps", steps), ("perplexity", perplexity)):
        if part in args.only.split(","):
            result[part] = run(args)
    report.show(console, tables(result))
    if args.out:
        report.keep(args.out, result)


if __name__ == "__main__":
    main()
