"""How much to draft: nodes for each request in this step. 0 is a real choice and costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headstart.core import Request, Tree, Verdict


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
    num_prefill_tokens: int = 0  # of them
    period: float = 0.0  # from the end of the last step, or from this one's beginning where that is later, to its end


class Policy(Protocol):
    cuts: bool  # whether it looks at drafts before they are verified, so that they cannot stay on the device

    def budget(self, requests: Sequence[Request], load: Load) -> list[int]:
        """Most nodes for each request; without them its drafter is not asked."""
        ...

    def is_quiet(self, request: Request) -> bool:
        """May this request go on for some tokens before its drafter is asked again?"""
        ...

    def keep(
        self, requests: Sequence[Request], names: Sequence[str], trees: Sequence[Tree], load: Load
    ) -> list[list[int]] | None:
        """Which nodes of these drafts to verify, for each request in ascending order; None: all. A name is "" where no
        drafter was asked."""
        ...

    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        """What the step cost and brought."""
        ...

    def release(self, request: Request) -> None:
        """The request is over."""
        ...
