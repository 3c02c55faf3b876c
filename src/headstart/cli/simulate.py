"""`headstart simulate`: replay traffic against policies, without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from headstart.cli.options import Json, Quiet, option
from headstart.errors import BadInput
from headstart.progress import bar, set_quiet

if TYPE_CHECKING:
    from headstart.simulate.entrants import Entrant
    from headstart.simulate.machines import Machine
    from headstart.simulate.many import Summary
    from headstart.simulate.replay import Outcome, Setting
    from headstart.traffic import Trace

PATIENCE = 2.0  # seconds after which progress is shown
SHOWN = 5  # traces that lost most


def simulate(
    trace: Annotated[
        str | None, option("--trace", help="File of traffic, recorded or written by hand.", show_default=False)
    ] = None,
    synthetic: Annotated[int, option("--synthetic", "-n", help="So many made-up traces.")] = 0,
    seed: Annotated[int, option("--seed", help="Of the first made-up trace.")] = 0,
    costs: Annotated[
        str, option("--costs", help="What things take: cpu, gpu, h200, node or a JSON file; several with commas.")
    ] = "cpu,gpu,h200,node",
    policy: Annotated[
        str,
        option(
            "--policy",
            help="none, auto, adaptive, ahead, auto:NAME+NAME, fixed:NAME:TOKENS, goodput:NAME:TOKENS; several with commas.",
        ),
    ] = "auto",
    max_num_seqs: Annotated[int, option("--max-num-seqs", help="Requests that run together.")] = 32,
    max_batch_tokens: Annotated[int, option("--max-batch-tokens", help="Rows of one forward.")] = 512,
    noise: Annotated[float, option("--noise", help="How much measured times vary, as a share.")] = 0.05,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Replay traffic against policies without a model, and compare them with plain decoding of the same traffic.

    The ratio to plain decoding is the larger of two: how many times shorter requests take from arrival to end, as a mean, and
    how many times shorter the engine is at work. Below 0.98, a trace loses more than 2%.

    Example: `headstart simulate --synthetic 1000`, or
    `headstart simulate --trace traffic.jsonl --costs gpu --policy auto,fixed:ngram:3`
    """
    set_quiet(quiet)
    from headstart.simulate.entrants import Entrant
    from headstart.simulate.machines import read_machine

    machines = [read_machine(name.strip()) for name in costs.split(",")]
    entrants = [Entrant.parse(name.strip()) for name in policy.split(",")]
    setting = _setting(max_num_seqs, max_batch_tokens, noise)
    work = [(m, t) for m in machines for t in _traces(trace, synthetic, seed, m)]
    for entrant in entrants:
        entrant.check([t for _, t in work])
    found = list(_run(work, entrants, setting))
    if as_json:
        _print_json(found, setting)
    else:
        _print(found)


def _setting(max_num_seqs: int, max_batch_tokens: int, noise: float) -> Setting:
    from headstart.simulate.replay import Setting

    if max_num_seqs < 1:
        raise BadInput(f"--max-num-seqs {max_num_seqs} is not usable: expected a whole number from 1 on.")
    if max_batch_tokens < max_num_seqs:
        raise BadInput(f"--max-batch-tokens {max_batch_tokens} is not usable: every request needs a row.")
    if not 0 <= noise <= 1:
        raise BadInput(f"--noise {noise} is not usable: expected a number from 0 to 1.")
    return Setting(max_num_seqs, max_batch_tokens, noise)


def _traces(file: str | None, synthetic: int, seed: int, machine: Machine) -> list[Trace]:
    from headstart.traffic import read_trace, synthesise

    if (file is None) == (synthetic == 0) or synthetic < 0 or seed < 0:
        raise BadInput("Give either --trace FILE or --synthetic N, a number of traces to make up; --seed is 0 or more.")
    if file is not None:
        return [read_trace(file)]
    return [synthesise(number, machine.tick) for number in range(seed, seed + synthetic)]


Found = tuple["Machine", "Trace", "list[Outcome]"]


def _run(work: Sequence[tuple[Machine, Trace]], entrants: Sequence[Entrant], setting: Setting) -> Iterator[Found]:
    """Each trace on each machine; with a bar, once it is clear that this takes a while."""
    from headstart.simulate.many import compare

    began, advance = time.monotonic(), None
    with ExitStack() as stack:
        for i, (machine, trace) in enumerate(work):
            yield machine, trace, compare(trace, entrants, machine, setting)
            if advance is not None:
                advance(1)
            elif time.monotonic() - began > PATIENCE and len(work) > 1:
                advance = stack.enter_context(bar("Replaying", len(work), "traces", done=i + 1))


# ------------------------------------------------------------------ what came out
def _summaries(found: Sequence[Found]) -> list[tuple[str, Summary]]:
    from headstart.simulate.many import Summary

    own: dict[tuple[str, int], list[Outcome]] = {}
    for machine, _, outcomes in found:
        for i, outcome in enumerate(outcomes):
            own.setdefault((machine.name, i), []).append(outcome)
    return [(machine, Summary.of(some[0].policy, some)) for (machine, _), some in own.items()]


def _print(found: Sequence[Found]) -> None:
    from rich.table import Table

    from headstart.cli import show

    table = Table("costs", "policy", title="Times as fast as plain decoding", title_justify="left")
    for heading in ("traces", "median", "worst", "best", "lose over 2%", "in time", "in work", "tokens/s"):
        table.add_column(heading, justify="right")
    for machine, s in _summaries(found):
        ratios = [f"{r:.3f}" for r in (s.median, s.worst, s.best)]
        losing = [f"{share:.1%}" for share in (s.losing, s.losing_time, s.losing_work)]
        table.add_row(machine, s.policy, str(s.traces), *ratios, *losing, f"{s.tokens_per_second:,.0f}")
    console = show.out()
    console.print(table)
    losers = sorted((o.ratio, m.name, o.policy, t.seed, t.title) for m, t, own in found for o in own if o.ratio < 0.98)
    for ratio, machine, policy, seed, title in losers[:SHOWN]:
        console.print(f"  {ratio:.3f}  {machine}, {policy}, seed {seed}: {title or 'recorded'}", markup=False)


def _print_json(found: Sequence[Found], setting: Setting) -> None:
    from headstart.cli import show

    runs: list[dict[str, Any]] = [
        {"costs": m.name, "seed": t.seed, "title": t.title, "outcomes": [o.to_dict() for o in own]}
        for m, t, own in found
    ]
    summaries = [{"costs": name} | vars(summary) for name, summary in _summaries(found)]
    show.print_json({"summaries": summaries, "setting": setting, "traces": runs})
