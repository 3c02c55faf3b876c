"""`headstart demo`: plain decoding against speculation, live, and whether both texts are the same."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli import ask
from headstart.cli.groups import expand
from headstart.cli.options import (
    SAMPLING,
    EngineOptions,
    Json,
    MaxTokens,
    Quiet,
    SpeculationOptions,
    Temperature,
    option,
)
from headstart.config import AUTO, SpeculativeConfig
from headstart.core import SamplingParams
from headstart.progress import note, set_quiet, status
from headstart.shapes import GROWN

if TYPE_CHECKING:
    from headstart.cli.race import Race
    from headstart.llm import LLM

PROMPTS = {
    "Fix a typo": """\
Fix the typo in this paragraph and repeat the whole paragraph:

The garden behind the school has twelve beds. In spring, the children plant beans, carrots, and sunflowers. In summer, \
they water the beds every morning. In autum, \
they bring the vegetables to the kitchen and cook soup for the whole school.""",
    "Rewrite code": """\
Rename the class Stack to Pile in this Python code:

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0
```""",
    "Tell a story": "Tell a short story about a fox who learns to play the piano.",
}
NEXT = """\
What to try next:
  headstart demo --temperature 0.7 --seed 3    sampled, and still the same text
  headstart demo --drafter ngram               drafts without any weights: best where text is copied
  headstart demo --prompt "..." --model NAME   your prompt on your model
  headstart generate "..." --drafter ngram --profile
  headstart chat --drafter ngram"""


@expand
def demo(
    engine: EngineOptions,
    speculation: SpeculationOptions,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 0.0,
    seed: Annotated[int, option("--seed", help="Both lanes draw with this seed.", panel=SAMPLING)] = 0,
    prompt: Annotated[
        list[str] | None,
        option("--prompt", "-p", help="Race on your own prompt; repeatable. [default: three built in]", metavar="TEXT"),
    ] = None,
    as_json: Json = False,
    plain: Annotated[bool, option("--plain", help="Lines instead of the live display.")] = False,
    quiet: Quiet = False,
) -> None:
    """Race plain decoding against speculation, and compare both texts token by token.

    One model is loaded. Each prompt is first decoded plainly, then with the drafter: unless you name another, auto on the
    built-in model, which has a neural head too (on a GPU that head alone), and ngram on other models.
    Accepted draft tokens are coloured. Exit code 1 means that the texts differ where they must not.

    Example: `headstart demo --drafter suffix --prompt "Repeat: to be or not to be"`
    """
    set_quiet(quiet)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    preset = _preset(engine)
    config = speculation.config(default=preset["method"], preset=preset)
    load = _load_average()
    with engine.open(config) as llm:
        races = _prepare(llm, _prompts(prompt), config.method)
        _run(llm, races, params, "json" if as_json else "plain" if plain or not sys.stdout.isatty() else "live")
    may_differ = config.verification == "rejection" and not params.greedy
    if as_json:
        _print_json(races, params, engine.model, config, load)
    else:
        _close(races, config.method, may_differ)
    if not may_differ and not all(r.identical or r.near_tie for r in races):
        raise typer.Exit(1)


def _preset(engine: EngineOptions) -> dict[str, Any]:
    """On a CPU whatever pays, with the head that comes along among it. On a GPU, where to know that takes a minute the first
    time, that head in a shape that pays nearly everywhere."""
    from headstart.models.builtin import head_of
    from headstart.models.load import pick_device

    if head_of(engine.model, "eagle3") is None or engine.runner == "llamacpp":
        return {"method": "ngram"}
    if pick_device(engine.device).type == "cpu":
        return {"method": AUTO}
    return {"method": "eagle3", "num_speculative_tokens": 6, "num_draft_nodes": 15} | GROWN


def _load_average() -> float | None:
    """How busy the machine is before the race; said when it disturbs the numbers."""
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        note(
            f"Other programs keep this machine busy (load {load:.1f} on {cores} cores): the speeds below are disturbed."
        )
    return load


def _prompts(own: list[str] | None) -> dict[str, str]:
    return {f"Prompt {i}": text for i, text in enumerate(own, 1)} if own else PROMPTS


def _prepare(llm: LLM, prompts: dict[str, str], drafter: str) -> list[Race]:
    from headstart.cli.race import Lane, Race

    races = []
    for title, text in prompts.items():
        asked = ask.as_prompt(llm, text)
        ids = llm.tokenizer.encode(asked) if isinstance(asked, str) else llm.tokenizer.chat(asked)
        races.append(Race(title, text, ids, Lane("plain"), Lane(drafter)))
    return races


def _run(llm: LLM, races: list[Race], params: SamplingParams, how: str) -> None:
    from rich.console import Console

    from headstart.cli import race, stage

    with status("Warming up"):
        race.warm_up(llm, races)
    for one in races:
        if how == "live":
            with stage.LiveStage(Console(highlight=False), one, params.max_tokens) as live:
                race.run(llm, one, params, live.changed)
            continue
        race.run(llm, one, params, lambda: None)
        if how == "plain":
            stage.print_plain(one)


def _close(races: list[Race], drafter: str, may_differ: bool) -> None:
    from headstart.cli import show, stage

    console = show.out()
    console.print()
    console.print(stage.table(races, drafter))
    for line in verdict(races, may_differ):
        console.print(line, markup=False)
    console.print(f"\n{NEXT}", markup=False)


def verdict(races: list[Race], may_differ: bool) -> list[str]:
    """Whether both texts are identical, from their token ids."""
    different = [r for r in races if not r.identical]
    if not different:
        tokens = sum(len(r.plain.token_ids) for r in races)
        return [f"Both texts are identical on every prompt: {tokens} tokens compared, with and without speculation."]
    lines = [f"{r.title}: the texts differ from token {r.first_difference} on{_why(r)}." for r in different]
    if may_differ:
        lines.append(
            "Rejection keeps the distribution, not the text of a seed: they may differ. --verification walk keeps both."
        )
    return lines


def _why(race: Race) -> str:
    if race.margin is None:
        return ""
    apart = f" (the model sees the two tokens {race.margin:.2g} apart in log p"
    return apart + (": a near-tie that rounding can swap)" if race.near_tie else ": more than rounding explains)")


def _print_json(
    races: list[Race], params: SamplingParams, model: str, config: SpeculativeConfig, load: float | None
) -> None:
    from headstart.cli import show

    result: dict[str, Any] = {
        "prompts": [r.result() for r in races],
        "identical": all(r.identical for r in races),
        "params": params,
        "load_average": load,
    }
    show.print_json(result | show.provenance(model, config))
