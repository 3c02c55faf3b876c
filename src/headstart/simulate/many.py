"""Many traces, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headstart.simulate.answers import Answers
from headstart.simulate.entrants import Entrant
from headstart.simulate.machines import Machine
from headstart.simulate.replay import Outcome, Replay, Setting
from headstart.traffic import Trace


def compare(trace: Trace, entrants: Sequence[Entrant], machine: Machine, setting: Setting) -> list[Outcome]:
    """Plain decoding of a trace, then each policy, with its ratio to that."""
    answers = [Answers(trace, i) for i in range(len(trace.requests))]
    plain = Replay(trace, answers, Entrant.parse("none"), machine, setting).run()
    out = [plain]
    for entrant in entrants:
        if entrant.name == "none":
            continue
        own = Replay(trace, answers, entrant, machine, setting).run()
        own.sooner, own.less = plain.latency / own.latency, plain.seconds / own.seconds
        out.append(own)
    return out


@dataclass(frozen=True)
class Summary:
    """One policy over many traces."""

    policy: str
    traces: int
    median: float
    worst: float
    best: float
    losing: float  # share of traces that lose over 2%, in time to the end of a request and in work alike
    losing_time: float  # in the first alone,
    losing_work: float  # and in the second alone
    sooner: float  # the median for requests alone
    tokens_per_second: float

    @staticmethod
    def of(policy: str, outcomes: Sequence[Outcome]) -> Summary:
        ratios = [o.ratio for o in outcomes]
        losing, time, work = (
            sum(r < 0.98 for r in many) / len(ratios)
            for many in (ratios, [o.sooner for o in outcomes], [o.less for o in outcomes])
        )
        speed = sum(o.tokens for o in outcomes) / sum(o.seconds for o in outcomes)
        sooner = float(np.median([o.sooner for o in outcomes]))
        middle = float(np.median(ratios))
        return Summary(policy, len(ratios), middle, min(ratios), max(ratios), losing, time, work, sooner, speed)
