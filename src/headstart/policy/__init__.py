"""Who drafts and how much: for each request in each step. Nothing is a real choice and costs nothing.

A policy is asked until it wants nothing more: whom to ask for a draft, seeing what others have proposed in this step. Then
it chooses what is verified: one tree for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from headstart.core import Request, Tree, Verdict
from headstart.drafters import WEIGHTLESS
from headstart.policy.explain import Explanation


@dataclass(frozen=True)
class Wish:
    """What a drafter may propose for one request."""

    nodes: int
    depth: int


Wishes = dict[str, Wish]  # by the name of the drafter that is to be asked
Proposals = Mapping[str, Tree]  # what drafters said that were asked; an empty tree: nothing
Choices = Callable[[Request], Sequence[str]]  # the drafters that may serve a request, as names


@dataclass(frozen=True)
class Load:
    """How busy the step is."""

    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    context: float = 0.0  # tokens behind which a request's rows stand, on average
    room: int = 1 << 20  # rows that there are for the draft of each request


@dataclass(frozen=True)
class Errand:
    """What one drafter did in one step."""

    name: str
    requests: int
    levels: int  # tokens that it drafted one after the other
    rows: int  # tokens that it drafted in all
    seconds: float = 0.0

    @staticmethod
    def of(name: str, depths: Sequence[int], seconds: float = 0.0) -> Errand:
        """Drafts of at most such depths; one without weights makes each in one go."""
        count = len(depths)
        levels, rows = (1, count) if name in WEIGHTLESS else (max(depths), sum(depths))
        return Errand(name, count, levels, rows, seconds)

    def wider(self, nodes: int) -> Errand:
        """With so many more tokens beside the first paths."""
        return replace(self, rows=self.rows + nodes)


class StepTimes(NamedTuple):
    """Seconds of one step."""

    draft: float
    target: float
    verify: float
    host: float
    num_tokens: int  # rows of the forward
    num_prefill_tokens: int = 0  # of them
    period: float = 0.0  # from the end of the last step, or from this one's beginning where that is later, to its end
    reach: float = 0.0  # context of each row, over all rows
    errands: tuple[Errand, ...] = ()
    produced: int = 0  # tokens that joined texts
    policy: float = 0.0  # of deciding, as far as the device may have waited for it
    asked: Sequence[Wishes] = ()  # what drafters were asked for, for each request
    drafted: Sequence[int] = ()  # nodes that were verified, for each request
    late: float = 0.0  # of what it decided, what it did beside the last step, and was not done with when that was over


class Policy(Protocol):
    cuts: bool  # whether it looks at drafts before they are verified, so that they cannot stay on the device

    def enlist(self, request: Request, load: Load) -> bool:
        """A request comes: shall drafters that read along with the target read its prompt? It takes them time, and they can
        serve it only then."""
        ...

    def rests(self, request: Request) -> bool:
        """Shall those stop reading along? It is asked where they are not wished for. When they are, they join again, and have
        missed what came in between."""
        ...

    def ask(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Wishes]:
        """Whom to ask next, for each request; no wishes at all: enough is known."""
        ...

    @property
    def quiet(self) -> bool:
        """Does it draft for nobody, and not want to think about it now?"""
        ...

    def holds(self) -> bool:
        """Would it ask for the same drafts as in the last step, for the same requests? Not where it wants to think anew."""
        ...

    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        """What is verified, for each request."""
        ...

    def is_quiet(self, request: Request) -> bool:
        """May this request go on for some tokens before its drafters are asked again?"""
        ...

    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        """What the step cost and brought."""
        ...

    def catch_up(self, busy: Callable[[], bool]) -> None:
        """The device is at work, and the host would wait for it: time to learn from what was put aside, and to decide what is
        due."""
        ...

    def release(self, request: Request) -> None:
        """The request is over."""
        ...

    def plain_seconds(self, company: int, context: float = 0.0) -> float:
        """Of a step without drafts for so many requests, as measured; 0: nobody has."""
        ...

    def explain(self) -> Explanation:
        """Why it decides as it does."""
        ...
