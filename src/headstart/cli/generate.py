"""`headstart generate`: one prompt, one answer or several."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli import ask
from headstart.cli.groups import expand
from headstart.cli.options import EngineOptions, Json, Quiet, SpeculationOptions, option
from headstart.cli.sampling import GenerateSampling
from headstart.core import Chunk, Completion, SamplingParams, Stats
from headstart.progress import note, set_quiet

if TYPE_CHECKING:
    from headstart.llm import LLM


@expand
def generate(
    prompt: Annotated[str, typer.Argument(help="What the model answers; - reads standard input.", show_default=False)],
    engine: EngineOptions,
    speculation: SpeculationOptions,
    sampling: GenerateSampling,
    chat: Annotated[
        bool | None,
        option(
            "--chat/--raw",
            help="Through the chat template, or as it is. [default: the template where the model has one]",
        ),
    ] = None,
    system: Annotated[str | None, option("--system", help="System message that stands before the prompt.")] = None,
    as_json: Json = False,
    profile: Annotated[bool, option("--profile", help="Table of where the time went.")] = False,
    explain: Annotated[
        bool, option("--explain", help="Why so much was drafted, and by whom: costs, chances, what was tried.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Answer one prompt.

    The text goes to standard output as it is made; in a terminal, accepted draft tokens are coloured.

    Example: `headstart generate "Repeat: the cat sat on the mat." --drafter ngram --temperature 0.8 --seed 7`
    """
    set_quiet(quiet)
    params, config = sampling.params(), speculation.config()
    text = ask.read(prompt)
    with engine.open(config, profile) as llm:
        asked = ask.as_prompt(llm, text, chat, system)
        began = time.perf_counter()
        if as_json:
            completions = _print_json(llm, asked, params, text, engine.model, config, explain)
        else:
            completions = _stream(llm, asked, params)
        seconds = time.perf_counter() - began
        why = llm.explain()
    from headstart.cli import show

    if not quiet and not as_json:
        show.say(show.summary(Stats.total([c.stats for c in completions]), seconds, config.method))
    if explain and not as_json:
        show.say("\n".join(why.sentences()), style="")
    if profile:
        show.say(show.time_table(max((c.stats for c in completions), key=lambda s: s.time_total)), style="")


def _stream(llm: LLM, asked: Any, params: SamplingParams) -> list[Completion]:
    """Print pieces as they come; of several answers, one after the other."""
    if params.logprobs is not None or params.prompt_logprobs is not None:
        note("Log probabilities are printed with --json only.")
    chunks: list[list[Chunk]] = [[] for _ in range(params.n)]
    printer = _printer(llm, params)
    for chunk in llm.stream(asked, params):
        chunks[chunk.index].append(chunk)
        if params.n == 1:
            printer.add(chunk)
    if params.n == 1:
        print(flush=True)
    else:
        _print_all(llm, params, chunks)
    return [own[-1].completion for own in chunks if own[-1].completion is not None]


def _print_all(llm: LLM, params: SamplingParams, chunks: list[list[Chunk]]) -> None:
    for i, own in enumerate(chunks):
        print(f"--- {i + 1} of {params.n}")
        printer = _printer(llm, params)
        for chunk in own:
            printer.add(chunk)
        print(flush=True)


def _printer(llm: LLM, params: SamplingParams) -> Any:
    from headstart.cli.paint import Printer

    return Printer(lambda ids: llm.tokenizer.decode(ids, params.skip_special_tokens))


def _print_json(
    llm: LLM, asked: Any, params: SamplingParams, text: str, model: str, config: Any, explain: bool
) -> list[Completion]:
    from headstart.cli import show

    output = llm.generate(asked, params)[0]
    result = {
        "prompt": text,
        "chat": not isinstance(asked, str),
        "prompt_token_ids": output.prompt_token_ids,
        "completions": output.completions,
        "prompt_logprobs": output.prompt_logprobs,
        "params": params,
    }
    if explain:
        result["explanation"] = llm.explain().to_dict()
    show.print_json(result | show.provenance(model, config))
    return output.completions
