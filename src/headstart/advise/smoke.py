"""Load a pair and see: how much of its drafts is accepted, and what that is worth here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.bench import workloads
from headstart.bench.own import encode
from headstart.core import SamplingParams, Stats
from headstart.errors import BadInput

PROMPTS, TOKENS = 20, 48


@dataclass(frozen=True)
class Smoke:
    """Of so many prompts, greedily."""

    prompts: int
    acceptance_rate: float
    acceptance_by_position: list[float]
    block_efficiency: float
    speedup: float  # of these answers, one at a time, in turns with plain decoding
    same_text: bool


def smoke(
    target: str,
    spec: Mapping[str, Any],
    device: str = "auto",
    dtype: str = "auto",
    advance: Callable[[int], None] = lambda n: None,
) -> Smoke:
    """Each prompt is answered with these drafts and without, one behind the other."""
    from headstart.llm import LLM
    from headstart.models.load import load

    loaded = load(target, device, dtype)
    every = [encode(loaded.tokenizer, prompt) for prompt in workloads.load("built-in", PROMPTS).prompts]
    asked = [ids for ids in every if len(ids) + TOKENS < loaded.max_len]
    if not asked:
        raise BadInput(f"{target} takes texts of {loaded.max_len} tokens at most, too short for any of our prompts.")
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    seconds, stats, same = [0.0, 0.0], [], True
    with LLM(loaded, speculative=None) as plain, LLM(loaded, speculative=dict(spec)) as drafting:
        for llm in (plain, drafting):  # what happens once happens now
            llm.generate(asked[0], params)
        for ids in asked:
            outputs = [llm.generate(ids, params)[0] for llm in (plain, drafting)]
            seconds = [so_far + output.stats.time_total for so_far, output in zip(seconds, outputs, strict=True)]
            stats.append(outputs[1].stats)
            same &= outputs[0].token_ids == outputs[1].token_ids
            advance(1)
    whole = Stats.total(stats)
    return Smoke(
        len(asked),
        whole.acceptance_rate,
        list(whole.acceptance_by_position),
        whole.block_efficiency,
        seconds[0] / seconds[1],
        same,
    )
