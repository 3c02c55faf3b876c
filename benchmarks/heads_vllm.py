#!/usr/bin/env python3
"""Does vLLM serve a head that Headstart wrote? Run with the Python of an environment that has vLLM.

headstart convert smollm2 --out smollm2-eagle3
venv/bin/python benchmarks/heads_vllm.py --target FOLDER --head smollm2-eagle3
"""

from __future__ import annotations

import argparse
import os

PROMPTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?",
    "Write a python function that checks if a number is prime.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target, in transformers' format")
    parser.add_argument("--head", required=True, help="folder of the head, in speculators' format")
    parser.add_argument("--tokens", type=int, default=3, help="drafted at a time")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    how = {"method": "eagle3", "model": args.head, "num_speculative_tokens": args.tokens}
    llm = LLM(args.target, max_model_len=512, enforce_eager=True, max_num_seqs=2, disable_log_stats=False,
              speculative_config=how)  # fmt: skip
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for output in llm.chat(asked, SamplingParams(temperature=0, max_tokens=96)):
        print(repr(output.outputs[0].text[:100]))
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            print(metric.name, getattr(metric, "value", None) or getattr(metric, "values", None))


if __name__ == "__main__":
    main()
