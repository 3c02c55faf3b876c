#!/usr/bin/env python3
"""What `policy.py` asks of a GPU, behind turns of traffic and for single kinds, without one: the same order in the simulator.

    python benchmarks/turns.py --loads 16,1,4 --seeds 8            code, then prose, then code
    python benchmarks/turns.py --kinds mixed,noise --loads 16,32   single kinds

`auto` begins knowing no more than what it tried out at load, and keeps what it learns from phase to phase, as an engine does.
Told is what it makes of a phase over the best of plain decoding and fixed settings: the median of three rounds, each a third of
which is settled before; mean and worst over seeds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent))
import report
from policy import lengths

from headstart.errors import BadInput
from headstart.simulate.answers import Answers
from headstart.simulate.entrants import Entrant
from headstart.simulate.machines import read_machine
from headstart.simulate.replay import Replay, Setting
from headstart.traffic import Arrival, Skill, Trace

WAYS = ("auto", "none", "fixed:eagle3:2", "fixed:eagle3:15x5", "fixed:ngram:3")
TOKENS, SPREAD, WAVES, LEAST, ROUNDS = 128, 0.5, 3, 8, 3  # as policy.py is asked on a GPU
TURNS = ("code", "writing", "code")
KINDS = {  # near what was seen with heads of some minutes: how often their next token is right; n-grams are found, and right
    "code": [(0.56, 0.05, 0.3)],
    "writing": [(0.36, 0.25, 0.35)],
    "mixed": [
        (0.3, 0.3, 0.3),
        (0.35, 0.25, 0.35),
        (0.42, 0.6, 0.6),
        (0.5, 0.3, 0.5),
        (0.45, 0.3, 0.45),
        (0.56, 0.1, 0.3),
    ],
    "noise": [(0.03, 0.3, 0.0)],
}


@dataclass(frozen=True)
class Phase:
    """Requests that come together, of which so many run at once."""

    load: int
    requests: tuple[Arrival, ...]
    name: str | None = None  # None: it is not measured


def phases(rng: random.Random, loads: list[int], kinds: list[str]) -> Iterator[Phase]:
    for load in loads:
        count = max(WAVES * load, LEAST)
        for i, kind in enumerate(kinds or TURNS * ROUNDS):
            name = kind if kinds else f"{1 + i % len(TURNS)}: {kind}"
            yield Phase(load, tuple(_request(rng, kind, 24 if kinds else 50) for _ in range(load)))
            for _ in range(ROUNDS if kinds else 1):
                yield Phase(load, tuple(_request(rng, kind, n) for n in lengths(count, TOKENS, SPREAD)), name)


def _request(rng: random.Random, kind: str, tokens: int) -> Arrival:
    """Texts of a kind differ, and change from one eighth to the next."""
    right, found, copies = rng.choice(KINDS[kind])
    width = 0.07 if right > 0.1 else 0.02
    mean = rng.gauss(right, width)
    head = tuple((i / 8, min(0.95, max(0.0, rng.gauss(mean, width)))) for i in range(8))
    copied = Skill(((0.0, copies),), found, 0.2)
    return Arrival(
        0.0, rng.randint(20, 200), tokens, {"eagle3": Skill(head, 1.0, 0.2), "ngram": copied, "suffix": copied}
    )


def play(seed: int, way: str, costs: str, loads: list[int], kinds: list[str]) -> dict[tuple[int, str], float]:
    """Tokens per second in each phase: the median over rounds."""
    own = list(phases(random.Random(seed), loads, kinds))
    trace = Trace(tuple(r for phase in own for r in phase.requests), seed)
    setting, found = Setting(max(loads), 2048, 0.03), dict[tuple[int, str], list[float]]()
    answers = [Answers(trace, i) for i in range(len(trace.requests))]
    replay = Replay(trace, answers, Entrant.parse(way), read_machine(costs), setting)
    coming = replay.coming
    for phase in own:
        replay.setting = replace(setting, max_num_seqs=phase.load)
        replay.coming = deque(coming.popleft() for _ in phase.requests)
        tokens, seconds = replay.out.tokens, replay.out.seconds
        replay.play()
        if phase.name is not None:
            speed = (replay.out.tokens - tokens) / (replay.out.seconds - seconds)
            found.setdefault((phase.load, phase.name), []).append(speed)
    return {key: statistics.median(speeds) for key, speeds in found.items()}


def run(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    jobs = list(product(range(args.seeds), WAYS))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        running = [pool.submit(play, seed, way, args.costs, args.loads, args.kinds) for seed, way in jobs]
        speeds = [job.result() for job in track(running, description="Simulating", console=console)]
    out = []
    for load, name in speeds[0]:
        own = {job: found[load, name] for job, found in zip(jobs, speeds, strict=True)}
        best = [max(own[seed, way] for way in WAYS[1:]) for seed in range(args.seeds)]
        over = [own[seed, "auto"] / most for seed, most in enumerate(best)]
        plain = [own[seed, "auto"] / own[seed, "none"] for seed in range(args.seeds)]
        out.append({"load": load, "phase": name, "over best": over, "over plain": plain})
    return out


def tables(kept: dict[str, Any]) -> Iterator[tuple[str, report.Rows]]:
    rows = [["at once", "phase", "over the best: mean", "worst", "over plain: mean", "worst"]]
    for found in kept["results"]:
        told = [f"{tell(found[what]):.3f}" for what in ("over best", "over plain") for tell in (statistics.mean, min)]
        rows.append([str(found["load"]), found["phase"], *told])
    yield "`auto` in the simulator", rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=lambda s: [int(x) for x in s.split(",")], default=[16, 1, 4])
    parser.add_argument("--kinds", type=lambda s: s.split(","), default=[], help=f"single kinds: {', '.join(KINDS)}")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--costs", default="h200", help="gpu, h200, node or a JSON file")
    parser.add_argument("--out", help="keep the result here, as JSON")
    parser.add_argument("--show", help="print a kept result and end")
    args = parser.parse_args()
    if args.show:
        return report.print_kept(args.show, tables)
    report.refuse_unknown(",".join(args.kinds), KINDS)
    if args.seeds < 1 or min(args.loads) < 1:
        parser.error("--seeds and --loads are numbers from 1 on.")
    try:
        read_machine(args.costs)
    except BadInput as error:
        sys.exit(str(error))
    console = Console(width=120)
    options = {"costs": args.costs, "seeds": args.seeds, "loads": args.loads}
    result = {"provenance": {**report.where(), **options}, "results": run(args, console)}
    if args.out:
        report.keep(args.out, result)
    report.show(console, tables(result))


if __name__ == "__main__":
    main()
