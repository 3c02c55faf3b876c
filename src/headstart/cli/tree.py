"""`headstart tree`: measure which candidates the target takes, and write the static tree that fits best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headstart.cli.demo import PROMPTS
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
from headstart.config import OWN_OPTIONS, SpeculativeConfig
from headstart.core import SamplingParams, Stats
from headstart.errors import BadInput, ConfigError
from headstart.progress import bar, set_quiet
from headstart.shapes import MOST_NODES, Shape, best_shape, chain, depth_of, expected_tokens, wide_shape, write_shape

if TYPE_CHECKING:
    from headstart.llm import LLM
    from headstart.tally import Tally
    from headstart.train.data import Prompt

MOST_RANKS = 64


@dataclass(frozen=True)
class Found:
    """The best tree, and what it was chosen by."""

    shape: Shape
    chances: list[list[float]]
    tally: Tally
    stats: Stats  # of the run that measured

    @property
    def expected(self) -> dict[str, float]:
        """Tokens per target forward."""
        depth, nodes = depth_of(self.shape), len(self.shape)
        return {
            "tree": expected_tokens(self.shape, self.chances),
            "chain_of_same_depth": expected_tokens(chain(depth), self.chances),
            "chain_of_same_nodes": expected_tokens(chain(nodes), self.chances),
        }

    def facts(self) -> dict[str, Any]:
        """What goes into the file beside the tree."""
        chances = [[round(c, 4) for c in row] for row in self.chances]
        return {
            "steps": self.tally.steps,
            "expected_block_efficiency": round(self.expected["tree"], 3),
            "chances": chances,
        }


@expand
def tree(
    out: Annotated[str, option("--out", "-o", help="File to write.", show_default=False)],
    engine: EngineOptions,
    speculation: SpeculationOptions,
    nodes: Annotated[int, option("--nodes", "-n", help="Nodes of the tree.")] = 12,
    ranks: Annotated[int, option("--ranks", help="Candidates of a node that are looked at.")] = 8,
    prompts: Annotated[
        list[str] | None,
        option(
            "--prompts",
            "-p",
            help="File of prompts, as `headstart train` reads them; repeatable. [default: three built in]",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, option("--seed", help="The first answer draws with this seed.", panel=SAMPLING)] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute the best static tree for a drafter, from a run.

    The prompts are answered with wide drafts. Where the path so far was right, it is counted which candidate of the drafter
    came to be the target's token: its best one (rank 0), the next, or none. From these chances by depth and rank follows
    the tree of NODES nodes that makes the most tokens per target forward; `-k` is how many levels it may have. The chances
    are taken to depend on depth and rank alone.

    Measure with prompts and a temperature like those that you will use. Without a drafter, the built-in model's own head is
    measured.

    Example: `headstart tree --nodes 12 -k 5 --out tree.json`, then `headstart generate "..." -d eagle3 --static-tree tree.json`
    """
    set_quiet(quiet)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    config = measuring(speculation.config(default="eagle3"), nodes, ranks)
    file, asked = _writable(out), _prompts(prompts)
    with engine.open(config) as llm:
        found = measure(llm, asked, params, nodes, ranks)
    about = {"model": engine.model, "drafter": config.method, "draft_model": config.model, "temperature": temperature}
    write_shape(file, found.shape, **about, **found.facts())
    if as_json:
        _print_json(found, file, engine.model, config, params)
    else:
        _print(found, file, config)


def measuring(config: SpeculativeConfig, nodes: int, ranks: int) -> SpeculativeConfig:
    """The same drafter with wide trees, `num_speculative_tokens` deep."""
    if not 1 <= nodes <= MOST_NODES:
        raise BadInput(f"--nodes {nodes} is not usable: expected a whole number from 1 to {MOST_NODES}.")
    if not 1 <= ranks <= MOST_RANKS:
        raise BadInput(f"--ranks {ranks} is not usable: expected a whole number from 1 to {MOST_RANKS}.")
    if "static_tree" not in OWN_OPTIONS.get(config.method, ("static_tree",)):
        raise ConfigError(f"{config.method!r} cannot draft static trees: name a head or a draft model with --drafter.")
    if config.tree or config.static_tree is not None or config.policy != "fixed":
        raise ConfigError("headstart tree drafts wide trees of its own: leave out tree, static_tree and policy.")
    if config.num_speculative_tokens < 1:
        raise ConfigError("A tree has one level at least: raise -k (num_speculative_tokens).")
    wide = wide_shape(config.num_speculative_tokens, ranks, nodes)
    return replace(config, tree=True, static_tree=wide, num_draft_nodes=len(wide))


def measure(llm: LLM, prompts: list[Prompt], params: SamplingParams, nodes: int, ranks: int) -> Found:
    """Answer the prompts, a few at a time so that the wide trees fit into a forward, and listen."""
    from headstart.tally import Tally
    from headstart.train.data import encode

    config = llm.engine.drafting.config
    tally, stats = Tally(config.num_speculative_tokens, ranks), []
    llm.engine.drafting.listeners.append(tally.hear)
    together = max(1, llm.engine.config.max_batch_tokens // (config.nodes + 1))
    with bar("Measuring", len(prompts), "prompts") as advance:
        for start in range(0, len(prompts), together):
            some = [encode(llm, p) for p in prompts[start : start + together]]
            seeds = [replace(params, seed=(params.seed or 0) + start + i) for i in range(len(some))]
            stats += [output.stats for output in llm.generate(some, seeds)]
            advance(len(some))
    if not tally.steps:
        raise BadInput("Nothing was drafted: use longer answers (--max-tokens) or other prompts.")
    chances = tally.chances()
    return Found(best_shape(chances, nodes), chances, tally, Stats.total(stats))


def _writable(out: str) -> Path:
    """Said before a model is loaded."""
    file = Path(out).expanduser()
    if file.is_dir() or not file.parent.is_dir():
        raise BadInput(f"--out {out} is not a file in a folder that exists.")
    return file


def _prompts(files: list[str] | None) -> list[Prompt]:
    from headstart.train.data import Prompt, read_prompts

    return read_prompts(files) if files else [Prompt(title, (("user", text),)) for title, text in PROMPTS.items()]


# ------------------------------------------------------------------ what came out
def _print(found: Found, file: Path, config: SpeculativeConfig) -> None:
    from headstart.cli import show

    console, expected = show.out(), found.expected
    console.print(_table(found))
    depth, nodes = depth_of(found.shape), len(found.shape)
    console.print(f"Expected tokens per target forward, for {found.tally.steps} measured drafts:")
    console.print(f"  {expected['tree']:.2f}  this tree, {nodes} nodes over {depth} levels")
    console.print(f"  {expected['chain_of_same_depth']:.2f}  a chain of {depth}")
    deeper = f" (beyond level {len(found.chances)} as at that level)" if nodes > len(found.chances) else ""
    console.print(f"  {expected['chain_of_same_nodes']:.2f}  a chain of {nodes}{deeper}")
    model = f" --draft-model {config.model}" if config.model else ""
    console.print(f'{file} holds it: headstart generate "..." --drafter {config.method}{model} --static-tree {file}')


def _table(found: Found) -> Any:
    """Chances by depth and rank; how often a draft got there."""
    from rich.table import Table

    table = Table("level", title="Chance that a candidate is right, its path being right", title_justify="left")
    for heading in ("tried", *(f"rank {r}" for r in range(len(found.chances[0])))):
        table.add_column(heading, justify="right")
    for depth, row in enumerate(found.chances):
        tried = max(found.tally.tried[depth])
        table.add_row(str(depth + 1), str(tried), *(f"{chance:.1%}" for chance in row))
    return table


def _print_json(found: Found, file: Path, model: str, config: SpeculativeConfig, params: SamplingParams) -> None:
    from headstart.cli import show

    result = {
        "file": str(file),
        "paths": found.shape,
        "expected": found.expected,
        "chances": found.chances,
        "tried": found.tally.tried,
        "right": found.tally.right,
        "steps": found.tally.steps,
        "stats": found.stats,
        "params": params,
    }
    show.print_json(result | show.provenance(model, config))
