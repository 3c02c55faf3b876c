"""How much to draft: nodes for each request in this step. 0 is a real choice and costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headstart.core import Request, Verdict


@dataclass(frozen=True)
class Load:
    """How busy the step is."""

    num_running: int
    num_waiting: int
    num_prefill_tokens: int


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step."""

    draft: float
    target: float
    verify: float
    host: float
    num_tokens: int  # rows of the forward


class Policy(Protocol):
    def budget(self, requests: Sequence[Request], load: Load) -> list[int]:
        """Most nodes for each request."""
        ...

    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        """What the step cost and brought."""
        ...
