"""The care of drafters: who serves which request, what they may propose, and what happens when one breaks.

A drafter is somebody else's code. Whatever it does, a request's text is unaffected: what is no tree is dropped and
said, and a drafter that raises leaves its requests to go on without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headstart import tree
from headstart.config import SpeculativeConfig
from headstart.core import DeviceStep, DeviceTexts, Draft, Reading, Request, RequestView, Tree, Verdict, View
from headstart.drafters import WEIGHTLESS, Drafter, Surroundings, build
from headstart.errors import ConfigError
from headstart.progress import note
from headstart.scheduler import Planned


@dataclass
class Asked:
    """One drafter's share of a step: its view, and the numbers of the ready parts that it drafted for."""

    name: str
    view: View
    members: list[int]


@dataclass(frozen=True)
class Left:
    """What the last forward left on the device, and which of its segments is whose."""

    step: DeviceStep
    lines: Mapping[str, int]


@dataclass
class Drafted:
    """The drafts of one step: a tree for each ready part, its drafter, and the distributions that nodes were drawn from."""

    trees: list[Tree]
    names: list[str]
    logq: list[torch.Tensor | None]
    depth: list[int] = field(default_factory=list)  # tokens of each that may be accepted
    asked: list[Asked] = field(default_factory=list)
    mail: list[tuple[Draft, list[int]]] = field(default_factory=list)  # drafts that only the device knows; for whom

    def sources(self) -> tuple[dict[int, tuple[list[int], int, int]], torch.Tensor | None]:
        """For each tree whose tokens are in the mail, where, as `Batch.source` says it, and where it says how many they are
        and under which parents (-1: nowhere); and all the mail."""
        where: dict[int, tuple[list[int], int, int]] = {}
        start = 0
        for draft, members in self.mail:
            assert draft.mail is not None
            for j, (i, a) in enumerate(zip(members, draft.offsets.tolist(), strict=False)):
                index = draft.mail.index[a : a + len(self.trees[i])]
                more = (draft.mail.sizes, draft.mail.parents)
                sized, grown = (-1 if x is None else start + int(x[j]) for x in more)
                where[i] = (-2 - start - index).tolist(), sized, grown
            start += len(draft.mail.device)
        tensors = [draft.mail.device for draft, _ in self.mail if draft.mail is not None]
        return where, torch.cat(tensors) if len(tensors) > 1 else (tensors[0] if tensors else None)

    def open_mail(self) -> None:
        """The trees become what was drafted; waits until the device has told it."""
        for draft, members in self.mail:
            assert draft.mail is not None
            for i, told in zip(members, draft.mail.wait(), strict=True):
                size = len(self.trees[i])
                self.trees[i].tokens[:], self.trees[i].parents[:] = told.tokens[:size], told.parents[:size]
        self.mail = []


class Drafting:
    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        self.config, self.around = config, around
        self.drafters: dict[str, Drafter] = {}
        if (drafter := build(config, around)) is not None:
            self.drafters[config.method] = drafter
        self.taps = drafter.needs.hidden_layers if drafter is not None else ()  # who joins later needs no hidden states
        self.listeners: list[Callable[[View, list[Tree], list[Verdict]], None]] = []  # who else hears verdicts
        self._views: dict[str, RequestView] = {}
        self._without: set[str] = set()  # requests whose drafter broke

    def choose(self, request: Request) -> str | None:
        """Which drafter serves this request; built on first use where it needs no weights."""
        name = request.speculation.method or self.config.method
        if not request.speculation.enabled or name == "none" or request.id in self._without:
            return None
        if name not in self.drafters:
            if name not in WEIGHTLESS:
                loaded = ", ".join(["none", *WEIGHTLESS, *(d for d in self.drafters if d not in WEIGHTLESS)])
                raise ConfigError(f"Drafter {name!r} is not loaded in this engine. A request can choose: {loaded}.")
            self.drafters[name] = build(replace(self.config, method=name), self.around)  # type: ignore[assignment]
        return name

    def space(self, request: Request) -> int:
        """Requests share KV with those whose drafter has read it: 0 for all that need no hidden states."""
        reading = [name for name, d in self.drafters.items() if d.needs.hidden_layers]
        name = self.choose(request)
        return 1 + reading.index(name) if name in reading else 0

    def verification(self, request: Request) -> str:
        return request.speculation.verification or self.config.verification

    # ------------------------------------------------------------------ one step
    def propose(
        self,
        ready: Sequence[Planned],
        depth: Callable[[Planned], int],
        texts: DeviceTexts | None = None,
        slots: Callable[[Request], np.ndarray] | None = None,
        left: Left | None = None,
    ) -> Drafted:
        """Ask each drafter once, for all requests that it serves, and once more for those with a seat on the device."""
        out = Drafted([Tree() for _ in ready], [""] * len(ready), [None] * len(ready), [0] * len(ready))
        groups: dict[tuple[str, bool], list[int]] = {}
        for i, part in enumerate(ready):
            name = self.choose(part.request)
            if name and (part.budget or (part.seat >= 0 and self.drafters[name].needs.hidden_layers)):
                groups.setdefault((name, part.seat >= 0), []).append(i)
        for (name, seated), members in groups.items():
            view = View([self._view(ready[i], depth(ready[i])) for i in members], texts if seated else None)
            if seated and left is not None:
                view.step = left.step
                for i, r in zip(members, view.requests, strict=True):
                    r.line = left.lines.get(r.id, -1) if ready[i].piece == 1 else -1
            needs = self.drafters[name].needs
            if slots is not None and (needs.hidden_layers or needs.target_kv):
                for i, r in zip(members, view.requests, strict=True):
                    held, computed = slots(ready[i].request), ready[i].request.computed
                    r.slots, r.room = held[:computed], held[computed:]
            self._ask(Asked(name, view, members), out)
        return out

    def reads(self, request: Request) -> bool:
        """Does its drafter read what the target computes?"""
        name = self.choose(request)
        return name is not None and bool(self.drafters[name].needs.hidden_layers)

    def can_draft_ahead(self, request: Request) -> bool:
        """Can its drafter draft where the target's device keeps the texts?"""
        name = self.choose(request)
        return name is not None and self.drafters[name].ahead

    def _view(self, part: Planned, depth: int) -> RequestView:
        r = part.request
        how = self.verification(r)
        self._views[r.id] = RequestView(
            r.id, r.tokens, len(r.prompt), part.budget, depth, r.params, r.seed, how, r, part.seat
        )  # fmt: skip
        return self._views[r.id]

    def _ask(self, asked: Asked, out: Drafted) -> None:
        """Keep the trees, within their budgets."""
        requests = asked.view.requests
        try:
            draft = self.drafters[asked.name].propose(asked.view)
            trees = draft.trees()
        except Exception as error:
            return self._drop(asked.name, requests, f"failed: {error!r}")
        if len(trees) != len(requests):
            return self._drop(asked.name, requests, f"gave {len(trees)} trees for {len(requests)} requests")
        for i, r, grown in zip(asked.members, requests, trees, strict=True):
            size = self.around.vocab_size
            if wrong := tree.check(grown, size, draft.mail is not None) or check_logq(grown, draft.logq, size):
                self._drop(asked.name, [r], f"gave no tree: {wrong}")
                continue
            told = draft.mail.depth if draft.mail is not None else None  # such a tree is taken whole
            out.trees[i] = tree.prune(grown, r.budget, r.max_depth) if told is None else grown
            out.depth[i] = max(tree.depths(out.trees[i].parents), default=0) if told is None else told
            out.names[i], out.logq[i] = asked.name, draft.logq
        out.asked.append(asked)
        if draft.mail is not None:
            out.mail.append((draft, asked.members))

    def observe(self, drafted: Drafted, verdicts: Sequence[Verdict]) -> None:
        """Tell every drafter what became of its drafts; of requests that are over it has heard the last."""
        for asked in drafted.asked:
            alive = [(r, i) for r, i in zip(asked.view.requests, asked.members, strict=True) if r.id in self._views]
            view = (
                asked.view if len(alive) == len(asked.members) else replace(asked.view, requests=[r for r, _ in alive])
            )
            heard = view, [drafted.trees[i] for _, i in alive], [verdicts[i] for _, i in alive]
            for listener in self.listeners:
                listener(*heard)
            try:
                self.drafters[asked.name].observe(*heard)
            except Exception as error:
                self._drop(asked.name, view.requests, f"failed on a verdict: {error!r}")

    def read(self, readings: Sequence[tuple[Planned, Reading]], hidden: Mapping[int, torch.Tensor] | None) -> None:
        """Hand each drafter that asks for hidden states what the target computed of its requests."""
        for name, drafter in self.drafters.items():
            own = [(p, r) for p, r in readings if self.choose(p.request) == name] if drafter.needs.hidden_layers else []
            if not own:
                continue
            for part, _ in own:
                if part.request.id not in self._views:
                    self._view(part, 0)
            try:
                drafter.read([r for _, r in own], hidden)
            except Exception as error:
                views = [self._views[p.request.id] for p, _ in own]
                self._drop(name, views, f"failed on hidden states: {error!r}")

    # ------------------------------------------------------------------ leaving
    def release(self, request: Request) -> None:
        """The request is over."""
        self._without.discard(request.id)
        view = self._views.pop(request.id, None)
        for name, drafter in self.drafters.items() if view is not None else ():
            try:
                drafter.release(view)  # type: ignore[arg-type]
            except Exception as error:
                self._drop(name, [], f"failed on a release: {error!r}")

    def close(self) -> None:
        for name, drafter in self.drafters.items():
            try:
                drafter.close()
            except Exception as error:
                note(f"Drafter {name!r} could not close: {error}")
        self.drafters.clear()

    def _drop(self, name: str, requests: Sequence[RequestView], why: str) -> None:
        note(f"Drafter {name!r} {why}. {len(requests)} request(s) go on without drafts; their text is unaffected.")
        self._without.update(r.id for r in requests)


def check_logq(draft: Tree, logq: torch.Tensor | None, vocab_size: int) -> str | None:
    """Why these distributions cannot serve for rejection, or None."""
    if logq is None or draft.logq_rows is None:
        return None
    if logq.ndim != 2 or logq.shape[1] != vocab_size:
        return f"its distributions have the shape {tuple(logq.shape)}, not (rows, {vocab_size})"
    if max(draft.logq_rows, default=0) >= len(logq):
        return f"a node was drawn from row {max(draft.logq_rows)} of {len(logq)}"
    if any(len({draft.logq_rows[c] for c in siblings}) > 1 for siblings in tree.children(draft.parents).values()):
        return "siblings were drawn from different distributions"
    if bool(logq[sorted(set(draft.logq_rows))].isnan().any()):
        return "its distributions hold NaN"
    return None
