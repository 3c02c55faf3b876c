"""`headstart tune`: which way to draft and how much, for these prompts on this machine; predicted, tried, and written down."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import MODEL, Json, Quiet, option
from headstart.errors import BadInput, nearest
from headstart.progress import bar, note, set_quiet

if TYPE_CHECKING:
    from headstart.advise.decision import Decision
    from headstart.advise.tune import Guess, Task, Tuned
    from headstart.bench.workloads import Workload
    from headstart.traffic import Trace

WORK, TRAFFIC = "Work", "Recorded traffic"
SHOWN = 6  # settings that were not tried, in the table


def tune(
    target: Annotated[str | None, typer.Argument(help="The model, as `check` takes it.", show_default=False)] = None,
    draft: Annotated[
        str | None, typer.Argument(help="What drafts: a draft model, or the folder of a head.", show_default=False)
    ] = None,
    prompts: Annotated[
        str, option("--prompts", help="As bench --dataset: built-in, NAME:PATH or a file of prompts.", panel=WORK)
    ] = "built-in",
    num_prompts: Annotated[
        int | None,
        option(
            "--num-prompts",
            "-n",
            help="How many of them. [default: 16, or three for each of the most requests at once]",
            panel=WORK,
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, option("--max-tokens", help="Of each answer.", panel=WORK)] = 64,
    concurrency: Annotated[
        str, option("--concurrency", help="Requests at once that it is tuned for, with commas.", panel=WORK)
    ] = "1,4",
    methods: Annotated[
        str, option("--methods", help="Without weights that are looked at: ngram, suffix or none.", panel=WORK)
    ] = "ngram,suffix",
    tries: Annotated[
        int, option("--tries", help="The best so many settings are really run; 0: predictions alone.", panel=WORK)
    ] = 4,
    rounds: Annotated[int, option("--rounds", help="How often each of those is.", panel=WORK)] = 2,
    device: Annotated[str, option("--device", help="auto, cpu, cuda or cuda:0.", panel=MODEL)] = "auto",
    dtype: Annotated[str, option("--dtype", help="auto, float32, bfloat16 or float16.", panel=MODEL)] = "auto",
    max_model_len: Annotated[
        int | None, option("--max-model-len", help="Longest prompt plus answer, in tokens.", panel=MODEL)
    ] = None,
    trace: Annotated[
        str | None,
        option(
            "--trace",
            help="No model: predict from traffic that --record wrote.",
            panel=TRAFFIC,
            show_default=False,
        ),
    ] = None,
    costs: Annotated[
        str,
        option("--costs", help="With --trace, what steps take: cpu, gpu, h200, node or a JSON file.", panel=TRAFFIC),
    ] = "cpu",
    out: Annotated[
        str | None,
        option("--out", "-o", help="Write what was decided to this file, for serve and export.", show_default=False),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the way to draft that is fastest here, for your prompts.

    Drafts are watched behind every token of your prompts' answers, and steps are timed. From both, speed is predicted for many
    settings; the best few are run in turns with plain decoding, and prediction and measurement are printed side by side.

    Example: `headstart tune smollm2`, `headstart tune my-model my-head --prompts mine.txt --concurrency 1,8 --out tuned.json`,
    or without a model `headstart tune --trace traffic.jsonl --costs gpu`
    """
    set_quiet(quiet)
    batches, names = _batches(concurrency), _methods(methods)
    if out is not None and Path(out).is_dir():
        raise BadInput(f"--out {out} is a folder: name a file.")
    if trace is not None:
        if target is not None:
            raise BadInput("--trace needs no model: leave one of the two out.")
        found, decision = _from_traffic(trace, costs, batches, names)
    else:
        if target is None:
            raise BadInput("Name the model that is to be tuned, or traffic that was recorded: --trace FILE.")
        num_prompts = max(16, 3 * batches[-1]) if num_prompts is None else num_prompts
        if min(num_prompts, max_tokens, rounds) < 1 or tries < 0:
            raise BadInput("--num-prompts, --max-tokens and --rounds are 1 or more, --tries 0 or more.")
        task = _task(target, draft, _workload(prompts, num_prompts), batches, max_tokens, rounds, tries, names)
        found, decision = _tune(task, device, dtype, max_model_len)
    if out is not None:
        decision.write(Path(out))
    if as_json:
        _print_json(found, decision)
    else:
        _print(found, decision, batches, out)


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and 1 <= int(part) <= 1024 for part in parts):
        raise BadInput(f"--concurrency {text} is not usable: expected numbers from 1 to 1024, with commas.")
    return tuple(sorted({int(part) for part in parts}))


def _methods(text: str) -> tuple[str, ...]:
    from headstart.drafters import WEIGHTLESS

    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    if unknown := [name for name in names if name not in WEIGHTLESS]:
        raise BadInput(f"--methods {unknown[0]} is not one without weights.{nearest(unknown[0], WEIGHTLESS)}")
    return tuple(dict.fromkeys(names))


def _workload(spec: str, count: int) -> Workload:
    from headstart.bench import workloads

    if spec.partition(":")[0] == "random":
        raise BadInput("--prompts random tells nothing about your texts: name a file of prompts.")
    return workloads.load(spec, count)


def _task(
    target: str,
    draft: str | None,
    workload: Workload,
    batches: tuple[int, ...],
    tokens: int,
    rounds: int,
    tries: int,
    methods: tuple[str, ...],
) -> Task:
    from headstart.advise.drafts import speculation
    from headstart.advise.facts import look
    from headstart.advise.tune import Task
    from headstart.models.heads.at_hand import find_head

    path = draft or find_head(target)
    if path is None and not methods:
        raise BadInput("There is nothing to tune: name a draft model or a head, or methods without weights.")
    own = speculation(look(target), look(str(path))) if path is not None else {}
    return Task(target, workload, batches, tokens, rounds, tries, methods, own)


def _tune(task: Task, device: str, dtype: str, max_len: int | None) -> tuple[Tuned, Decision]:
    from headstart.advise.tune import parts, tune
    from headstart.models.load import load

    loaded = load(task.target, device, dtype, max_len, False, "torch")
    with bar("Tuning", parts(task), "parts") as advance:
        return tune(loaded, task, lambda what: advance(1, what))


def _from_traffic(path: str, costs: str, batches: tuple[int, ...], methods: tuple[str, ...]) -> tuple[Tuned, Decision]:
    from headstart.advise.tune import decide, from_traffic
    from headstart.simulate.machines import read_machine
    from headstart.traffic import read_trace

    trace: Trace = read_trace(path)
    if not any(r.is_recorded for r in trace.requests):
        raise BadInput(f"{path} holds no recorded requests: write it with --record.")
    found = from_traffic(trace, read_machine(costs), batches, methods)
    return found, decide("", found, {}, batches)


# ------------------------------------------------------------------ what is told
def _print_json(found: Tuned, decision: Decision) -> None:
    from headstart.cli.show import print_json

    guesses = [
        {
            "setting": str(g.mode),
            "at_once": g.at_once,
            "predicted": g.predicted,
            "measured": g.measured,
            "error": g.error,
        }
        for g in found.guesses
    ]
    told: dict[str, Any] = {
        "settings": guesses,
        "acceptance": found.acceptance,
        "auto": found.auto,
        "plain_tokens_per_second": found.plain,
        "same_text": found.same_text,
        "decision": decision,
    }
    print_json(told)


def _print(found: Tuned, decision: Decision, batches: tuple[int, ...], out: str | None) -> None:
    from headstart.cli import show

    console = show.out()
    for name, shares in found.acceptance.items():
        told = " ".join(f"{share:.0%}" for share in shares)
        console.print(f"{name}: drafts are right to depth 1, 2, ... for {told} of all tokens.", markup=False)
    for n in batches:
        console.print(_table(found, n))
        if n in found.auto:
            speed = f"plain decoding makes {found.plain[n]:,.1f} tokens/s"
            console.print(f"auto, which decides by itself: {found.auto[n]:.2f} times plain; {speed}.", markup=False)
    if not found.same_text:
        console.print("Some texts differ from plain decoding's: run `headstart bench` to see where.", style="yellow")
    for line in _sentences(decision, out):
        console.print(line, markup=False)


def _table(found: Tuned, at_once: int) -> Any:
    from rich.table import Table

    own = sorted(found.at(at_once), key=lambda g: -g.best_known)
    shown = [g for g in own if g.measured is not None] + [g for g in own if g.measured is None][:SHOWN]
    table = Table(title=f"{at_once} at once: times plain decoding", title_justify="left")
    table.add_column("setting")
    for heading in ("predicted", "measured", "off by"):
        table.add_column(heading, justify="right")
    for guess in shown:
        table.add_row(str(guess.mode), f"{guess.predicted:.2f}", *_held(guess))
    return table


def _held(guess: Guess) -> tuple[str, str]:
    return ("", "") if guess.measured is None else (f"{guess.measured:.2f}", f"{guess.error:+.0%}")


def _sentences(decision: Decision, out: str | None) -> list[str]:
    import json

    if not decision.speculative:
        return ["", "Nothing pays here: plain decoding is the fastest. `auto` finds that out by itself."]
    told = json.dumps(dict(decision.speculative))
    lines = ["", f"Best here: {decision.reasons['method']}", f"  --speculative-config {shlex.quote(told)}"]
    if out is not None:
        note(f"Written to {out}.")
        target = shlex.quote(decision.target) if decision.target else "MODEL"
        lines.append(f"  headstart serve {target} --tuned {shlex.quote(out)}")
        lines.append(f"  headstart export vllm --target {target} --tuned {shlex.quote(out)}")
    return lines
