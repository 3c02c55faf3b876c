"""`headstart check`: will this target and draft work, in which engine, and if not, why?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import Json, Quiet, option
from headstart.errors import BadInput, nearest
from headstart.progress import bar, set_quiet

if TYPE_CHECKING:
    from headstart.advise.check import Finding, Pair, Report
    from headstart.advise.facts import Facts
    from headstart.advise.smoke import Smoke

MARKS = {"stop": ("✗", "red"), "warn": ("!", "yellow"), "note": ("·", "dim")}
TITLES = {"headstart": "Headstart", "vllm": "vLLM", "llamacpp": "llama.cpp", "tabbyapi": "TabbyAPI"}


def check(
    target: Annotated[
        str, typer.Argument(help="A folder, a GGUF file, a hub id in the cache, ollama:NAME, or a built-in name.")
    ],
    draft: Annotated[str | None, typer.Argument(help="The draft model, or the folder of a head.")] = None,
    for_: Annotated[
        str, option("--for", help="Engines that it has to work in, for the exit code; several with commas.")
    ] = "headstart",
    gpu: Annotated[
        str | None, option("--gpu", help="The GPU it will run on, such as T4 or 'RTX 4090'. [default: the one here]")
    ] = None,
    smoke: Annotated[bool, option("--smoke", help="Load both, and see what is accepted, with 20 prompts.")] = False,
    device: Annotated[str, option("--device", help="For --smoke: auto, cpu, cuda or cuda:0.")] = "auto",
    dtype: Annotated[str, option("--dtype", help="For --smoke: auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Will it work, and in which engine?

    Reads configs, tokenizers and the headers of weights, but no weights: files that are cut off, architectures, vocabularies
    under each engine's own rule, quantisation against the GPU, heads against their target. Exit code 1 means that it will not
    work.

    Example: `headstart check my-70b my-1b`, `headstart check smollm2 my-head --smoke`, or
    `headstart check big.gguf small.gguf --for llamacpp`
    """
    from headstart.advise import check as checking
    from headstart.advise.facts import look

    set_quiet(quiet)
    asked = [name.strip() for name in for_.split(",")]
    if unknown := [name for name in asked if name not in checking.ENGINES]:
        raise BadInput(f"--for {unknown[0]} is not an engine.{nearest(unknown[0], checking.ENGINES)}")
    if smoke and draft is None:
        raise BadInput("--smoke needs a draft model or a head: name it behind the target.")
    pair = checking.Pair(look(target), look(draft) if draft is not None else None, _capability(gpu))
    report = checking.check(pair)
    works = all(report.works(name) for name in asked)
    tried = _smoke(pair, device, dtype) if smoke and report.works("headstart") else None
    if as_json:
        _print_json(report, tried, works)
    else:
        _print(report, tried)
    if not works or (tried is not None and not tried.same_text):
        raise typer.Exit(1)


def _capability(gpu: str | None) -> float | None:
    from headstart.advise.check import capability_here, capability_of

    if gpu is not None:
        if (known := capability_of(gpu)) is None:
            raise BadInput(f"--gpu {gpu} is not known here: name a common one, such as T4, A100, RTX 4090 or H100.")
        return known
    return capability_here()


def _smoke(pair: Pair, device: str, dtype: str) -> Smoke:
    from headstart.advise.drafts import speculation
    from headstart.advise.smoke import PROMPTS, smoke

    with bar("Trying it", PROMPTS, "prompts") as advance:
        assert pair.draft is not None
        return smoke(pair.target.name, speculation(pair.target, pair.draft), device, dtype, advance)


# ------------------------------------------------------------------ what is told
def _print_json(report: Report, tried: Smoke | None, works: bool) -> None:
    from headstart.cli.show import print_json

    def findings(many: tuple[Finding, ...]) -> list[dict[str, str]]:
        return [asdict(one) for one in many]

    told: dict[str, Any] = {
        "works": works,
        "common": findings(report.common),
        "engines": {
            v.engine: {"works": report.works(v.engine), "findings": findings(v.findings)} for v in report.verdicts
        },
        "models": [_facts(model) for model in report.pair.models],
        "smoke": tried,
    }
    print_json(told)


def _facts(model: Facts) -> dict[str, Any]:
    names = ("name", "form", "architecture", "head", "quantized", "parameters", "weight_bytes", "dtype", "layers", "hidden",
             "heads", "kv_heads", "head_dim", "vocab_size", "max_len", "chat_template", "problems")  # fmt: skip
    return {name: getattr(model, name) for name in names}


def _print(report: Report, tried: Smoke | None) -> None:
    from headstart.cli.show import out

    console = out()
    for model in report.pair.models:
        console.print(f"{model.name}: {_described(model)}", markup=False)
    for finding in report.common:
        console.print(_line(finding))
    for verdict in report.verdicts:
        fine = report.works(verdict.engine)
        console.print(
            f"\n{TITLES[verdict.engine]}: {'yes' if fine else 'no'}", style="bold green" if fine else "bold red"
        )
        for finding in verdict.findings:
            console.print(_line(finding))
    if tried is not None:
        console.print(f"\n{_told(tried)}", markup=False)


def _told(tried: Smoke) -> str:
    shares = " ".join(f"{share:.0%}" for share in tried.acceptance_by_position)
    return (
        f"Tried with {tried.prompts} prompts: {tried.acceptance_rate:.0%} of the drafted tokens were accepted (by position "
        f"{shares}), {tried.block_efficiency:.2f} tokens a forward, {tried.speedup:.2f} times plain decoding here; "
        f"{'the text is the same.' if tried.same_text else 'THE TEXT DIFFERS.'}"
    )


def _described(model: Facts) -> str:
    if model.problems and not model.parameters:
        return "not readable"
    size = (
        f"{model.parameters / 1e9:.2f} billion weights"
        if model.parameters >= 1e9
        else f"{model.parameters / 1e6:.0f} million weights"
    )
    kind = "a head" if model.head else model.architecture or "of unknown architecture"
    weights = f"{size} of {model.bits:.1f} bits ({model.quantized or model.dtype}, {model.form})"
    return f"{kind}, {weights}" + ("" if model.head else f", {model.layers} layers, {model.vocab_size:,} tokens")


def _line(finding: Finding) -> Any:
    from rich.text import Text

    mark, style = MARKS[finding.level]
    return Text(f"  {mark} {finding.text}", style=style)
