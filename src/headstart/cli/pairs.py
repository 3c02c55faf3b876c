"""`headstart pairs`: which models on this disk can draft for which, and what would that be worth?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import Json, Quiet, option
from headstart.errors import BadInput, ModelError, nearest
from headstart.progress import bar, set_quiet, status

if TYPE_CHECKING:
    from headstart.advise.facts import Facts
    from headstart.advise.forecast import Forecast, Guess, Hardware
    from headstart.advise.pairs import Candidate, Ranking, Suggestion
    from headstart.advise.stores import Model

TITLES = {"headstart": "Headstart", "vllm": "vLLM", "llamacpp": "llama.cpp", "tabbyapi": "TabbyAPI"}
KINDS = {"draft_model": "model"}
SHOWN = 3  # well-known drafts beside those that are here


def pairs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders to search beside the caches of the hub, of Ollama and of Headstart.", metavar="FOLDERS"
        ),
    ] = None,
    target: Annotated[
        str | None,
        option(
            "--target", help="A folder, a GGUF file, a hub id, ollama:NAME, or a built-in name. [default: every model]"
        ),
    ] = None,
    for_: Annotated[
        str, option("--for", help="Engines that drafts have to work in; several with commas.")
    ] = "headstart",
    gpu: Annotated[
        str | None, option("--gpu", help="Predict for this GPU, such as T4 or 'RTX 4090'. [default: this machine]")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find drafts for a target, best first.

    Looks at models in the hub's cache, in folders, GGUF files and Ollama's store, and predicts for each pair that works what
    is accepted and how much faster it would be; for each that does not, why. Where nothing is on disk, it tells what is well
    known. Exit code 1 means that nothing here drafts for the target.

    Example: `headstart pairs`, `headstart pairs --target my-70b ~/models`, or
    `headstart pairs --target Qwen/Qwen3-32B --gpu H100`
    """
    from headstart.advise import forecast, stores
    from headstart.advise.check import ENGINES

    set_quiet(quiet)
    asked = [name.strip() for name in for_.split(",")]
    if unknown := [name for name in asked if name not in ENGINES]:
        raise BadInput(f"--for {unknown[0]} is not an engine.{nearest(unknown[0], ENGINES)}")
    hardware = forecast.by_name(gpu) if gpu is not None else None
    found = stores.find(folders or ())
    if hardware is None:
        with status("Measuring this machine"):
            hardware = forecast.this_machine()
    models: list[Model] = []
    with bar("Looking at models", len(found), "models") as advance:
        for one in found:
            advance(1, one.name)
            models.append(stores.read(one))
    rankings = [_one(target, models, hardware, asked)] if target is not None else _all(models, hardware, asked)
    if as_json:
        _print_json(rankings, models, hardware)
    else:
        _print(rankings, models, hardware, target is not None)
    if target is not None and not rankings[0].candidates:
        raise typer.Exit(1)


def _one(target: str, models: Sequence[Model], hardware: Hardware, engines: Sequence[str]) -> Ranking:
    from headstart.advise.pairs import rank, rank_absent

    try:
        facts, problem = _look(target, models)
    except ModelError as error:
        if (absent := rank_absent(target, models, hardware)) is not None:
            return absent
        raise ModelError(f"{error} Nor is its family known: fetch it, or name a folder that holds it.") from error
    if facts is not None and not problem:
        if facts.head:
            raise BadInput(f"{target} is a head, and no model by itself: name its target.")
        with bar(f"Pairing {target}", len(models), "models") as advance:
            return rank(facts, models, hardware, engines, advance)
    if (absent := rank_absent(target, models, hardware)) is not None:
        return absent
    raise BadInput(f"{target} cannot be paired: {problem}")


def _look(target: str, models: Sequence[Model]) -> tuple[Facts | None, str]:
    """The target, and what is wrong with it."""
    from headstart.advise.facts import look
    from headstart.advise.pairs import repository

    for model in models:
        if model.name == target:
            return model.facts, model.problem
    files = [m for m in models if m.facts is not None and repository(m.facts) == target]
    if len(files) > 1:
        raise BadInput(f"{target} has {len(files)} files here: name one of them, such as {files[0].name}")
    if files:
        return files[0].facts, files[0].problem
    facts = look(target)
    return facts, facts.problems[0] if facts.problems else ""


def _all(models: Sequence[Model], hardware: Hardware, engines: Sequence[str]) -> list[Ranking]:
    """For every model, the largest first; those without a draft only where none has one."""
    from headstart.advise.pairs import rank

    whole = [m.facts for m in models if m.facts is not None and not m.problem and not m.facts.head]
    whole.sort(key=lambda facts: -facts.parameters)
    rankings = []
    with bar("Pairing", len(whole), "targets") as advance:
        for facts in whole:
            advance(1, facts.name)
            rankings.append(rank(facts, models, hardware, engines))
    return [r for r in rankings if r.candidates] or rankings


# ------------------------------------------------------------------ JSON
def _print_json(rankings: Sequence[Ranking], models: Sequence[Model], hardware: Hardware) -> None:
    from headstart.cli.show import print_json

    print_json(
        {
            "hardware": hardware,
            "rankings": [_ranking(one) for one in rankings],
            "models": [
                {"name": m.name, "place": m.found.place, "path": str(m.found.path), "problem": m.problem or None}
                for m in models
            ],
        }
    )


def _ranking(one: Ranking) -> dict[str, Any]:
    return {
        "target": one.target,
        "on_disk": one.facts is not None,
        "family": one.family.name if one.family is not None else None,
        "candidates": [_candidate(c) for c in one.candidates],
        "rejections": one.rejections,
        "well_known": [_suggestion(s) for s in one.suggestions],
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "name": one.draft.name,
        "kind": one.kind,
        "parameters": one.draft.parameters,
        "weight_bytes": one.draft.weight_bytes,
        "ratio": one.ratio,
        "engines": one.engines,
        "objections": dict(one.objections),
        "vocabulary": one.relation.told() if one.relation is not None else None,
        **_numbers(one.guess, one.forecast),
    }


def _suggestion(one: Suggestion) -> dict[str, Any]:
    told = {"name": one.known.id, "kind": one.known.kind, "parameters": one.known.billions * 1e9, "on_disk": one.here}
    return told | {"fetch": one.known.fetch, **_numbers(one.guess, one.forecast)}


def _numbers(guess: Guess, told: Forecast | None) -> dict[str, Any]:
    accepted = {"expected": guess.alpha, "low": guess.low, "high": guess.high, "why": guess.why}
    return {"acceptance": accepted, "forecast": told}


# ------------------------------------------------------------------ tables
def _print(rankings: Sequence[Ranking], models: Sequence[Model], hardware: Hardware, named: bool) -> None:
    from headstart.cli.show import out

    console = out()
    speed = f"{hardware.bandwidth / 1e9:,.0f} GB/s"
    console.print(f"Predicted for {hardware.name} ({speed}{', measured' if hardware.here else ''}).", markup=False)
    for ranking in rankings:
        _print_ranking(console, ranking, named)
    if not rankings:
        _print_families(console)
    broken = [model for model in models if model.problem and not named]
    for model in broken:
        console.print(f"  ✗ {model.name}: {model.problem}", style="dim", markup=False)


def _print_ranking(console: Any, one: Ranking, named: bool) -> None:
    console.print(f"\n{one.target}: {_described(one)}", style="bold", markup=False)
    if one.candidates:
        console.print(_table([_row(c) for c in one.candidates]))
        for candidate in one.candidates:
            console.print(f"  · {_remark(candidate)}", style="dim", markup=False)
    if one.rejections and named:
        for refused in one.rejections:
            console.print(f"  ✗ {refused.name}: {' '.join(refused.reasons)}", style="red", markup=False)
    elif one.rejections and one.candidates:
        console.print(
            f"  {len(one.rejections)} more do not fit: headstart pairs --target {one.target} tells why.",
            style="dim",
            markup=False,
        )
    _print_known(console, one)


def _described(one: Ranking) -> str:
    if one.facts is None:
        return "not on this disk" + (f"; a model of the family {one.family.name}" if one.family is not None else "")
    facts = one.facts
    weights = f"{facts.parameters / 1e9:.2f} billion weights of {facts.bits:.1f} bits"
    return f"{facts.architecture or 'of unknown architecture'}, {weights}"


def _row(one: Candidate) -> tuple[str, ...]:
    engines = ", ".join(TITLES[name] for name in one.engines)
    return one.draft.name, KINDS.get(one.kind, one.kind), f"{one.ratio:.1%}", *_cells(one.guess, one.forecast), engines


def _cells(guess: Guess, told: Forecast | None) -> tuple[str, ...]:
    accepted = f"{guess.alpha:.0%} ({guess.low:.0%} to {guess.high:.0%})"
    if told is None:
        return accepted, "", "", ""
    speed = f"{told.speedup:.2f} ({told.low:.2f} to {told.high:.2f})"
    return accepted, str(told.gamma), f"{told.tokens:.2f}", speed + ("" if told.speedup > 1 else " slower")


def _table(rows: Sequence[tuple[str, ...]], last: str = "works in") -> Any:
    from rich.table import Table

    table = Table(pad_edge=False)
    for heading in ("draft", "kind", "size", "accepted", "k", "tokens a step", "times as fast", last):
        left = heading in ("draft", "kind", last)
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _remark(one: Candidate) -> str:
    """What the numbers rest on, and whom the tokens keep out."""
    told = f"{one.draft.name}: {one.guess.why}"
    told += "; the target's forwards were measured here." if one.forecast.measured else "."
    if one.relation is not None and one.relation.differing:
        others = ", ".join(TITLES[engine] for engine, _ in one.objections)
        told += f" {one.relation.told()}" + (f" Not in {others}." if others else "")
    return told


def _print_known(console: Any, one: Ranking) -> None:
    missing = [s for s in one.suggestions if not s.here]
    note = f"{one.family.name} {one.family.note}." if one.family is not None and one.family.note else ""
    if one.candidates:
        if missing:
            names = ", ".join(s.known.id for s in missing[:SHOWN])
            console.print(f"  Well known, and not here: {names}.", style="dim", markup=False)
        return
    if not one.suggestions:
        family = f" for {one.family.name}" if one.family is not None else ""
        console.print(f"  Nothing here drafts for it, and no draft{family} is well known. {note}", markup=False)
        console.print("  ngram and suffix need none, and headstart train makes one.", markup=False)
        return
    console.print(
        "  Nothing here drafts for it. Well known:" if one.facts is not None else "  Well known:", markup=False
    )
    console.print(_table([_known_row(s) for s in one.suggestions], "on disk"))
    first = one.suggestions[0].known
    console.print(f"  Fetch one: {first.fetch}; then: headstart check {one.target} {first.id}", markup=False)
    if note:
        console.print(f"  {note}", style="dim", markup=False)


def _known_row(one: Suggestion) -> tuple[str, ...]:
    size = f"{one.known.billions:g}B"
    where = "yes" if one.here else "no"
    return one.known.id, KINDS.get(one.known.kind, one.known.kind), size, *_cells(one.guess, one.forecast), where


def _print_families(console: Any) -> None:
    """Where no model is on disk at all."""
    from rich.table import Table

    from headstart.advise.families import FAMILIES

    console.print("\nThere are no models on this disk. Well-known drafts and heads, by family:", markup=False)
    table = Table("family", "drafts", "heads", pad_edge=False)
    for family in FAMILIES:
        drafts = "\n".join(known.id for known in family.drafts if not known.head)
        heads = "\n".join(known.id for known in family.drafts if known.head)
        table.add_row(family.name, drafts or family.note, heads)
    console.print(table)
    console.print(
        "headstart pairs --target NAME tells those for one target. Or begin with headstart demo.", markup=False
    )
