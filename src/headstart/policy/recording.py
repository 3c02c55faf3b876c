"""A policy that writes down what it sees: a trace that can be replayed without a model.

Each request becomes one line when it is over: its token ids, and what the text said about each draft. No text is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headstart import tree
from headstart.core import PENDING, Request, Tree, Verdict
from headstart.errors import BadInput
from headstart.policy import Load, Policy, Proposals, StepTimes, Wishes
from headstart.policy.explain import Explanation
from headstart.traffic import Arrival, Seen, header, to_line


class Recording:
    """Any policy, and a file of all that came by."""

    def __init__(self, policy: Policy, path: str | Path, title: str = "") -> None:
        self.policy, self.cuts = policy, policy.cuts
        self._began = time.perf_counter()
        self._drafts: dict[str, dict[tuple[int, str], Tree]] = {}  # of a request: by tokens before, and drafter
        try:
            self._file = Path(path).expanduser().open("w", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"The trace cannot be written to {path}: {error}.") from None
        self._write(header(title=title))

    def ask(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Wishes]:
        """A policy is asked once more when all has been proposed: so everything is seen here."""
        for request, own in zip(requests, proposals, strict=True):
            drafts = self._drafts.setdefault(request.id, {})
            if request.tokens[-1] != PENDING:  # else only the device knows where the draft stands
                drafts |= {(len(request.tokens), name): draft for name, draft in own.items() if len(draft)}
        return self.policy.ask(requests, proposals, load)

    def enlist(self, request: Request, load: Load) -> bool:
        return self.policy.enlist(request, load)

    def rests(self, request: Request) -> bool:
        return self.policy.rests(request)

    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        return self.policy.choose(requests, proposals, load)

    def is_quiet(self, request: Request) -> bool:
        return self.policy.is_quiet(request)

    @property
    def quiet(self) -> bool:
        return self.policy.quiet

    def holds(self) -> bool:
        return self.policy.holds()

    def plain_seconds(self, company: int, context: float = 0.0) -> float:
        return self.policy.plain_seconds(company, context)

    def explain(self) -> Explanation:
        return self.policy.explain()

    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        self.policy.learn(times, requests, verdicts)

    def catch_up(self, busy: Callable[[], bool]) -> None:
        self.policy.catch_up(busy)

    def release(self, request: Request) -> None:
        self.policy.release(request)
        drafts = self._drafts.pop(request.id, {})
        if request.num_output < 1:
            return  # it never ran
        arrival, seen = max(0.0, request.arrived - self._began), _seen(request, drafts)
        prompt, output = tuple(request.prompt), tuple(request.output)
        self._write(to_line(Arrival(arrival, len(prompt), len(output), {}, prompt, output, seen)))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        if not self._file.closed:
            self._file.write(line + "\n")
            self._file.flush()


def check_writable(path: str | Path) -> None:
    """Can a trace be written here? Nothing that is there is written over."""
    file = Path(path).expanduser()
    if file.exists():
        raise BadInput(f"{path} exists already: name another file for the trace, or remove it first.")
    if not file.parent.is_dir():
        raise BadInput(f"There is no folder {file.parent} for the trace: make it first, or name another one.")


def _seen(request: Request, drafts: dict[tuple[int, str], Tree]) -> dict[str, tuple[Seen, ...]]:
    """What the text said about each draft, by drafter."""
    out: dict[str, list[Seen]] = {}
    for (at, name), draft in drafts.items():
        text = request.tokens[at:]
        if text and PENDING not in draft.tokens:
            right = _right(draft, text)
            out.setdefault(name, []).append(Seen(at - len(request.prompt), right, _confidence(draft)))
    return {name: tuple(own) for name, own in out.items()}


def _right(draft: Tree, text: Sequence[int]) -> tuple[bool, ...]:
    """Depth by depth up to the first that was wrong, or to the end of the draft or the text."""
    met = tree.follow(draft, text)
    wrong = len(met) < len(text) and (met[-1] if met else -1) in draft.parents
    return (True,) * len(met) + (False,) * wrong


def _confidence(draft: Tree) -> tuple[float, ...]:
    first = tree.first_path(draft)
    return tuple(min(1.0, max(0.0, c)) for c in first.confidence or ())
