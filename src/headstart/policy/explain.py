"""Why so much is drafted, and by whom: what a policy believes and has measured, as data and in sentences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tried:
    """One drafter, as the policy sees it."""

    asked: int  # steps in which it was asked,
    proposed: int  # nodes that it proposed
    verified: int  # and that went to the target
    right: float | None  # the chance of its first token now; None: it was never heard
    milliseconds: float  # that it takes for one token of one request
    break_even: float  # the chance that its first token needs to pay for its row and for the drafter's own time
    size: str = ""  # where whole drafts are judged: the one that looks best,
    brings: float = 0.0  # the tokens that it brings
    needs: float = 0.0  # and has to bring, to pay for the time that a step takes longer


@dataclass
class Explanation:
    policy: str
    speedup_estimate: float | None = (
        None  # tokens that came, over those of plain steps in the same time; None: not measured
    )
    plain_steps: int = 0  # that were really taken to know
    running: int = 0
    tokens_per_second: float = 0.0
    plain_milliseconds: float = 0.0  # of a step without drafts, with so many requests
    row_milliseconds: float = 0.0  # that one more row takes
    break_even: float = 0.0  # the chance that a node needs to pay for its row
    deciding: float = 0.0  # share of the time that deciding takes
    drafters: dict[str, Tried] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "drafters": {name: vars(t) for name, t in self.drafters.items()}}

    def sentences(self) -> list[str]:
        if self.speedup_estimate is None:
            return [
                f"The policy is {self.policy}: it drafts what it is told, and measures nothing. --drafter auto decides."
            ]
        out = [
            f"{self.speedup_estimate:.2f} times the tokens of plain decoding in the same time, by {self._measure()}: "
            f"{self.tokens_per_second:.1f} tokens/s.",
            f"With {self.running} at once, a plain step takes {self.plain_milliseconds:.2f} ms" + self._of_rows(),
        ]
        out += [_of_drafter(name, tried) for name, tried in self.drafters.items()]
        return [*out, f"Deciding took {self.deciding:.1%} of the time."]

    def _measure(self) -> str:
        """What plain decoding is known from."""
        if not self.plain_steps:
            return "steps that were timed when the model was loaded"
        return f"{self.plain_steps} plain steps that were taken"

    def _of_rows(self) -> str:
        if not self.row_milliseconds:
            return "."
        row, least = f"{self.row_milliseconds:.2f} ms", f"{self.break_even:.0%}"
        return f" and one more row {row}: a draft token pays from a chance of {least} on."


def _of_drafter(name: str, tried: Tried) -> str:
    if tried.size:
        pays = "pays" if tried.brings >= tried.needs else "does not pay"
        return (
            f"{name} {pays} now: a draft ({tried.size}) brings {tried.brings:.2f} tokens, it needs {tried.needs:.2f}. Asked in "
            f"{tried.asked} steps, {tried.verified} tokens were verified; {tried.milliseconds:.3f} ms each."
        )
    if tried.right is None:
        return f"{name} was asked in {tried.asked} steps, and the text has not told yet whether it is right."
    need = f"it needs {tried.break_even:.0%}" if tried.break_even <= 1 else "no chance would be enough"
    pays = "pays" if tried.right >= tried.break_even else "does not pay"
    return (
        f"{name} {pays} now: its next token is right with {tried.right:.0%}, {need}. Asked in {tried.asked} steps, it proposed "
        f"{tried.proposed} tokens, of which {tried.verified} were verified; {tried.milliseconds:.2f} ms each."
    )
