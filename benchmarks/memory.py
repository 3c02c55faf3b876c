#!/usr/bin/env python3
"""Memory of a running engine: its peak against the model's weights + KV pool, and its growth over many requests.

    python benchmarks/memory.py                    built-in model, 2 GiB of KV, 1,000 requests, plain decoding
    python benchmarks/memory.py --drafter ngram    with a drafter (on some CPUs a second copy of the weights)

The pool is touched from end to end, as if it were full: on a CPU the system hands out its pages when they are first used.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from headstart import LLM, SamplingParams

MB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--kv-memory", type=int, default=2048, help="megabytes")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before = resident()
    llm = LLM(args.model, speculative=args.drafter, kv_memory=args.kv_memory * MB)
    engine = llm.engine
    weights = sum({p.data_ptr(): p.nbytes for p in engine.runner.model.parameters()}.values())
    with torch.inference_mode():
        for tensor in (*engine.runner.keys, *engine.runner.values):
            tensor.zero_()
    full, marks, tenth = resident(), [], args.requests // 10
    for i in track(range(10), "requests", console=Console(stderr=True)):
        prompts = [f"Request {i * tenth + j}: say a number." for j in range(tenth)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
        marks.append(resident())
        engine.check_integrity()
        assert engine.idle and engine.pool.num_used == 0
    pool = engine.pool.num_slots * engine.runner.slot_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    report = {
        "model": args.model,
        "drafter": args.drafter,
        "interpreter and libraries MB": before // MB,
        "weights MB": weights // MB,
        "second copy of weights MB": (engine.runner.weight_bytes - weights) // MB,
        "kv pool MB": pool // MB,
        "resident with a full pool MB": full // MB,
        "peak MB": peak // MB,
        "peak / (weights + pool)": round(peak / (weights + pool), 3),
        "requests": args.requests,
        "resident after each tenth of the requests MB": [m // MB for m in marks],
        "torch": torch.__version__,
        "machine": platform.machine(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    llm.close()


if __name__ == "__main__":
    main()
