"""What things take on a machine, which a policy has to find out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import BadInput
from headstart.policy import Errand
from headstart.policy.costs import Costs, Work
from headstart.policy.periods import Mode
from headstart.scheduler import Plan

USUAL_CONTEXT = 100  # tokens before the rows of a step that is tried out


@dataclass(frozen=True)
class Machine:
    """The true seconds, which a policy has to find out."""

    name: str
    costs: Costs
    work: Mapping[str, Work]
    around: float = 0.0  # of each step, outside forward and drafters
    # of drafters that read along: by prompts and their tokens
    reading: Mapping[str, Work] = field(default_factory=dict)
    # of a decision about who drafts, by requests, where the machine drafts before anyone has seen the drafts; None: it does not
    deciding: Work | None = None
    changing: float = 0.0  # of a step in which requests come or go, where somebody drafts

    @property
    def ahead(self) -> bool:
        """It drafts by itself, so who drafts is decided beforehand."""
        return self.deciding is not None

    def decision(self, company: int) -> float:
        """Seconds in which it is decided who drafts."""
        return self.deciding.of(1, company) if self.deciding is not None else 0.0

    @property
    def tick(self) -> float:
        """A plain step of one request."""
        return self.costs.of(1) + self.around

    def step(self, mode: Mode | None, company: int) -> float:
        """Seconds of a whole step, where all draft in the same way."""
        if mode is None:
            return self.costs.of(company, USUAL_CONTEXT) + self.around
        errand = Errand.of(mode.drafter, [mode.depth] * company).wider((mode.nodes - mode.depth) * company)
        rows = company * (1 + mode.nodes)
        return self.costs.of(rows, USUAL_CONTEXT) + self.errand(errand, company) + self.around

    def forward(self, plan: Plan, rows: int, reach: float) -> float:
        """Seconds of the target, for so many rows behind so much context in all."""
        return self.costs.of(rows, reach / rows)

    def errand(self, errand: Errand, company: int) -> float:
        """Seconds of a drafter, in this company."""
        return (self.work.get(errand.name) or Work()).of(errand.levels, errand.rows)


def _presets() -> Iterator[Machine]:
    yield Machine(
        "cpu",
        Costs({1: 0.022, 2: 0.025, 3: 0.031, 4: 0.037, 8: 0.072, 16: 0.110, 32: 0.193, 64: 0.363}, 5e-7),
        {"ngram": Work(3e-5, 1e-5), "suffix": Work(5e-5, 3e-5), "eagle3": Work(3e-3, 3e-4)},
        around=3e-4,
        reading={"eagle3": Work(0.0, 1e-4)},
    )
    yield Machine(
        "gpu",
        Costs(
            {1: 1.2e-3, 2: 1.25e-3, 4: 1.5e-3, 8: 1.6e-3, 16: 1.8e-3, 32: 2.1e-3, 64: 2.8e-3, 256: 4.5e-3, 1024: 1e-2},
            2e-9,
        ),
        {"ngram": Work(5e-5, 1e-6), "suffix": Work(3e-5, 2e-5), "eagle3": Work(3e-4, 1.2e-5)},
        around=1.5e-4,
        reading={"eagle3": Work(3e-5, 5e-8)},
        deciding=Work(2.5e-4, 1.5e-5),
        changing=4e-4,
    )
    yield Machine(
        "h200",
        Costs(
            {
                1: 1.16e-3,
                4: 1.2e-3,
                16: 1.26e-3,
                32: 1.45e-3,
                64: 1.6e-3,
                128: 2.05e-3,
                256: 2.75e-3,
                512: 4.6e-3,
                1024: 9e-3,
            },
            1e-9,
        ),
        {"ngram": Work(5e-5, 1e-6), "suffix": Work(3e-4, 4e-5), "eagle3": Work(9.5e-5, 3e-6)},
        around=1.5e-4,
        reading={"eagle3": Work(2e-5, 4e-8)},
        deciding=Work(3.5e-4, 5e-6),
        changing=1e-4,
    )
    yield Machine(
        "node",
        Costs({1: 0.012, 16: 0.0125, 64: 0.0145, 256: 0.026, 1024: 0.085}, 5e-9),
        {"ngram": Work(5e-5, 1e-6), "suffix": Work(3e-5, 2e-5), "eagle3": Work(9e-4, 4e-6)},
        around=5e-4,
        reading={"eagle3": Work(5e-5, 3e-7)},
        deciding=Work(2.5e-4, 1.5e-5),
    )


PRESETS = {machine.name: machine for machine in _presets()}


def read_machine(name: str) -> Machine:
    """A preset by its name, or a file as `Costs.to_dict` writes it, with "drafters", and more that docs/simulator.md tells."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise BadInput(f"No costs are called {name!r}: name a file, or one of {', '.join(PRESETS)}.")
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Machine(
            path.stem,
            Costs.from_dict(kept),
            {str(n): _work(w, "level", "row") for n, w in kept.get("drafters", {}).items()},
            around=_seconds(kept.get("around", 0.0)),
            reading={str(n): _work(w, "prompt", "token") for n, w in kept.get("reading", {}).items()},
            deciding=_work(kept["deciding"], "decision", "request") if "deciding" in kept else None,
            changing=_seconds(kept.get("changing", 0.0)),
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise BadInput(f"The costs in {name} cannot be used: {what}.") from None


def _work(kept: Mapping[str, Any], first: str, second: str) -> Work:
    return Work(_seconds(kept[f"seconds_by_{first}"]), _seconds(kept[f"seconds_by_{second}"]))


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise ValueError("seconds are numbers from 0 on")
    return float(value)
