#!/usr/bin/env python3
"""Memory of a running engine: peak against weights + KV pool, and growth over many requests.

python benchmarks/memory.py                    built-in model, default KV pool, 1,000 requests
python benchmarks/memory.py --kv-memory 512    megabytes of KV
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import torch

from headstart import LLM, SamplingParams


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-memory", type=int, help="megabytes")
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    before = resident()
    llm = LLM(args.model, speculative="ngram", kv_memory=args.kv_memory << 20 if args.kv_memory else None)
    engine = llm.engine
    weights, pool = engine.runner.weight_bytes, engine.pool.num_slots * engine.runner.slot_bytes
    loaded, marks = resident(), []
    rounds = 10
    for i in range(rounds):
        count = args.requests // rounds
        prompts = [f"Request {i * count + j}: say a number." for j in range(count)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
        marks.append(resident())
        engine.check_integrity()
        assert engine.idle and engine.pool.num_used == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    mb = 1 << 20
    report = {
        "interpreter and libraries MB": before // mb,
        "weights MB": weights // mb,
        "kv pool MB": pool // mb,
        "resident after loading MB": loaded // mb,
        "peak MB": peak // mb,
        "peak / (weights + pool)": round(peak / (weights + pool), 3),
        "resident after each tenth of the requests MB": [m // mb for m in marks],
        "requests": args.requests,
        "torch": torch.__version__,
    }
    print(json.dumps(report, indent=1))
    llm.close()


if __name__ == "__main__":
    main()
