"""The care of drafters: who serves which request, what they may propose, and what happens when one breaks.

A drafter is somebody else's code. Whatever it does, a request's text is unaffected: what is no tree is dropped and
said, and a drafter that raises leaves its requests to go on without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from headstart import tree
from headstart.config import AUTO, SpeculativeConfig
from headstart.core import DeviceStep, DeviceTexts, Draft, Reading, Request, RequestView, Tree, Verdict, View
from headstart.drafters import WEIGHTLESS, Drafter, Surroundings, build
from headstart.errors import ConfigError
from headstart.policy import Errand, Wish, Wishes
from headstart.progress import note
from headstart.scheduler import Planned

if TYPE_CHECKING:
    from headstart.models.base import Reader

NO_TREE = Tree()
NOBODY: list[str] = []


@dataclass
class Asked:
    """One drafter's share of a step: its view, and the numbers of the ready parts that it drafted for."""

    name: str
    view: View
    members: list[int]
    lines: Mapping[str, int] | None = None  # which segment of the forward behind which it was asked again is whose


@dataclass(frozen=True)
class Left:
    """What the last forward left on the device, and which of its segments is whose."""

    step: DeviceStep
    lines: Mapping[str, int]


class Drafted:
    """The drafts of one step: what was proposed for each ready part, by drafter, and the tree that is verified."""

    def __init__(self, count: int) -> None:
        self.proposals: list[dict[str, Tree]] = [{} for _ in range(count)]
        self.trees = [NO_TREE] * count
        self.depth = [0] * count  # tokens of each tree that may be accepted
        self.asked: list[Asked] = []
        self.errands: list[Errand] = []
        self.wishes: list[Wishes] = [{} for _ in range(count)]  # what they were asked for
        self.mail: list[tuple[Draft, list[int]]] = []  # drafts that only the device knows; for whom
        self._drawn: dict[tuple[int, str], torch.Tensor] = {}  # distributions that nodes were drawn from

    def logq(self, i: int) -> torch.Tensor | None:
        """What the nodes of tree i were drawn from."""
        origins = self.trees[i].origins
        return self._drawn.get((i, origins[0])) if origins else None

    def propose(self, i: int, name: str, draft: Tree, logq: torch.Tensor | None) -> None:
        draft.origins = [name] * len(draft)
        self.proposals[i][name] = draft
        if logq is not None:
            self._drawn[i, name] = logq

    def whole(self) -> list[Tree]:
        """Everything that was proposed, by one drafter for each."""
        return [_first(own) for own in self.proposals]

    def settle_on(self, trees: Sequence[Tree]) -> None:
        """These are verified. A tree in the mail is as deep as the mail says."""
        self.trees = list(trees)
        told = {i: d.mail.depth for d, members in self.mail for i in members if d.mail and d.mail.depth is not None}
        for i, t in enumerate(self.trees):
            if t.tokens:
                self.depth[i] = told[i] if i in told else max(tree.depths(t.parents))

    def sources(self) -> tuple[dict[int, tuple[list[int], int, int]], torch.Tensor | None]:
        """For each tree whose tokens are in the mail, where, as `Batch.source` says it, and where it says how many they are
        and under which parents (-1: nowhere); and all the mail."""
        where: dict[int, tuple[list[int], int, int]] = {}
        start = 0
        for draft, members in self.mail:
            assert draft.mail is not None
            index = (-2 - start - draft.mail.index).tolist()
            told = (draft.mail.sizes, draft.mail.parents)
            sized, grown = ([-1] * len(members) if x is None else (start + x).tolist() for x in told)
            for i, a, s, g in zip(members, draft.offsets.tolist(), sized, grown, strict=False):
                where[i] = index[a : a + len(self.trees[i].tokens)], s, g
            start += len(draft.mail.device)
        return where, self.all_mail()

    def all_mail(self) -> torch.Tensor | None:
        tensors = [draft.mail.device for draft, _ in self.mail if draft.mail is not None]
        return torch.cat(tensors) if len(tensors) > 1 else (tensors[0] if tensors else None)

    def open_mail(self) -> None:
        """The trees become what was drafted; waits until the device has told it."""
        for draft, members in self.mail:
            assert draft.mail is not None
            for i, told in zip(members, draft.mail.wait(), strict=True):
                own = self.trees[i]
                size, count = len(own.tokens), len(told.tokens)
                if count > size:
                    told.tokens, told.parents = told.tokens[:size], told.parents[:size]
                own.tokens, own.parents = told.tokens, told.parents
                if count < size:
                    own.origins = (own.origins or [])[:count]
        self.mail = []


class Drafting:
    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        self.config, self.around = config, around
        self.drafters: dict[str, Drafter] = {}
        for name in self._names():
            if (drafter := build(replace(config, method=name), around)) is not None:
                self.drafters[name] = drafter
        self.auto = tuple(self.drafters)
        self.taps = next((d.needs.hidden_layers for d in self.drafters.values() if d.needs.hidden_layers), ())
        self.listeners: list[Callable[[View, list[Tree], list[Verdict]], None]] = []  # who else hears verdicts
        self._views: dict[str, RequestView] = {}
        self._without: set[tuple[str, str]] = set()  # requests whose drafter broke, or does not read along
        self._choices: dict[str, tuple[str, ...]] = {}  # of requests that are here,
        self._readers: dict[str, list[str]] = {}  # and those of them that read along, where there are any
        self.changes = 0  # of choices, while requests run

    def _names(self) -> tuple[str, ...]:
        """Whom to build at once."""
        if self.config.method != AUTO:
            return (self.config.method,)
        extras = self.around.extras
        head = (extras["head"].spec.method,) if "head" in extras else ()
        return (*WEIGHTLESS, *head, *(("draft_model",) if "draft_model" in extras else ()))

    def choices(self, request: Request) -> tuple[str, ...]:
        """The drafters that may serve this request, the cheapest first."""
        known = self._choices.get(request.id)
        return known if known is not None else self._offer(request)

    def _offer(self, request: Request) -> tuple[str, ...]:
        if not request.speculation.enabled:
            return ()
        name = request.speculation.method or self.config.method
        names = self.auto if name == AUTO else self._named(name)
        return tuple(n for n in names if (request.id, n) not in self._without)

    def check(self, request: Request) -> None:
        """Can this request have the drafter that it names?"""
        name = request.speculation.method
        if name not in (None, AUTO, "none", *WEIGHTLESS) and name not in self.drafters:
            loaded = ", ".join(["none", *WEIGHTLESS, *(d for d in self.drafters if d not in WEIGHTLESS)])
            raise ConfigError(f"Drafter {name!r} is not loaded in this engine. A request can choose: {loaded}.")

    def _named(self, name: str) -> tuple[str, ...]:
        """Built on first use where it needs no weights."""
        if name == "none":
            return ()
        if name not in self.drafters:
            self.drafters[name] = build(replace(self.config, method=name), self.around)  # type: ignore[assignment]
        return (name,)

    def space(self, request: Request) -> int:
        """Requests share KV with those whose drafter has read it: 0 for all that need no hidden states."""
        reading = [name for name, d in self.drafters.items() if d.needs.hidden_layers]
        return next((1 + reading.index(name) for name in self.choices(request) if name in reading), 0)

    def verification(self, request: Request) -> str:
        return request.speculation.verification or self.config.verification

    # ------------------------------------------------------------------ one step
    def propose(
        self,
        out: Drafted,
        ready: Sequence[Planned],
        wishes: Sequence[Wishes],
        depth: Callable[[Planned], int],
        texts: DeviceTexts | None = None,
        slots: Callable[[Request], np.ndarray] | None = None,
        left: Left | None = None,
    ) -> None:
        """Ask each drafter once, for all requests that wish it, and once more for those with a seat on the device."""
        out.wishes = [kept | own if kept and own else kept or own for kept, own in zip(out.wishes, wishes, strict=True)]
        groups: dict[tuple[str, bool], list[int]] = {}
        for i, (part, own) in enumerate(zip(ready, wishes, strict=True)):
            for name, wish in own.items():
                if wish.nodes or (part.seat >= 0 and self.drafters[name].needs.hidden_layers):
                    groups.setdefault((name, part.seat >= 0), []).append(i)
        for (name, seated), members in groups.items():
            views = [self._view(ready[i], depth(ready[i]), wishes[i][name]) for i in members]
            view = View(views, texts if seated else None)
            if seated and left is not None:
                view.step = left.step
                for i, r in zip(members, view.requests, strict=True):
                    r.line = left.lines.get(r.id, -1) if ready[i].piece == 1 else -1
            needs = self.drafters[name].needs
            if slots is not None and (needs.hidden_layers or needs.target_kv):
                for i, r in zip(members, view.requests, strict=True):
                    request = ready[i].request
                    r.held, r.computed = slots(request), request.computed
            self._ask(Asked(name, view, members), out)

    def can_repeat(self, drafted: Drafted, requests: Sequence[Request]) -> bool:
        """Can the device be asked for these drafts again? Not where one was wished for that could not be made yet, or where a
        drafter that reads along was not asked: it would miss what comes."""
        if self._readers and not self._are_all_asked(drafted, requests):
            return False
        if not drafted.asked:
            return not any(drafted.wishes)
        if len(drafted.mail) < len(drafted.asked) or not all(self.drafters[a.name].repeats for a in drafted.asked):
            return False
        without = [own for t, own in zip(drafted.trees, drafted.wishes, strict=True) if not t.tokens]
        return not any(w.nodes for own in without for w in own.values())

    def _are_all_asked(self, drafted: Drafted, requests: Sequence[Request]) -> bool:
        """All that read along, for all that they read?"""
        asked = {a.name: {r.id for r in a.view.requests} for a in drafted.asked}
        readers = self._readers
        return all(r.id in asked.get(name, ()) for r in requests for name in readers.get(r.id, ()))

    def again(self, drafted: Drafted, left: Left | None) -> Drafted | None:
        """The same questions, behind the next step; None where a drafter broke, or cannot draft as much as the last time."""
        out = Drafted(len(drafted.trees))
        out.wishes, out.asked, out.depth = drafted.wishes, drafted.asked, drafted.depth
        for asked, (last, _) in zip(drafted.asked, drafted.mail, strict=True):
            try:
                draft = self._ask_again(asked, left)
            except Exception as error:
                self._drop(asked.name, asked.view.requests, f"failed: {error!r}")
                return None
            if not _same_places(draft, last):
                return None
            for i, grown in zip(asked.members, draft.trees(), strict=True):
                if len(grown) != len(drafted.trees[i]):
                    return None
                if len(grown):
                    grown.origins = [asked.name] * len(grown)
                    out.trees[i] = grown
            out.mail.append((draft, asked.members))
        return out

    def _ask_again(self, asked: Asked, left: Left | None) -> Draft:
        drafter, view = self.drafters[asked.name], asked.view
        if left is None:
            return drafter.again(view)
        view.step = left.step
        if asked.lines is left.lines:
            return drafter.again(view)
        asked.lines = left.lines  # the first time, texts may have other lines than in the step before
        for r in view.requests:
            r.line = left.lines.get(r.id, -1)
        return drafter.propose(view)

    @property
    def anyone_reads(self) -> bool:
        """Does a drafter read what the target computes, of any request?"""
        return bool(self._readers)

    def reads(self, request: Request) -> bool:
        """Does one read this request?"""
        return request.id in self._readers

    def readers(self, request: Request) -> list[str]:
        """Those that do."""
        return self._readers.get(request.id, NOBODY)

    def at_odds(self, requests: Sequence[Request], wishes: Sequence[Wishes]) -> list[int]:
        """The numbers of those that are read by others than are wished for."""
        readers = self._readers
        return [
            i for i, (r, own) in enumerate(zip(requests, wishes, strict=True)) if readers.get(r.id, NOBODY) != [*own]
        ]

    def could_be_read(self, request: Request) -> bool:
        return bool(self._heads_of(request.id))

    def enlist(self, request: Request) -> None:
        """Drafters that read along read this request."""
        self._readers[request.id] = self._heads_of(request.id)

    def excuse(self, request: Request) -> None:
        """This request goes without them, for good."""
        self._forbid([(request.id, n) for n in self._heads_of(request.id)])

    def rest(self, request: Request) -> int:
        """They stop reading it, until they join again. Returns how far all of them have read it."""
        self.changes += 1
        return min(self.drafters[name].rest(request.id) for name in self._readers.pop(request.id))

    def late(self, request: Request, names: Iterable[str]) -> list[str]:
        """Those of them that would have to join first, or that broke."""
        reading = self._readers.get(request.id, ())
        return [n for n in names if n not in reading and self.drafters[n].needs.hidden_layers]

    def is_served_ahead(self, request: Request, names: Iterable[str]) -> bool:
        """Are just these its readers, and draft before the host knows the last tokens?"""
        readers = self._readers.get(request.id, NOBODY)
        return readers == [*names] and self.are_ahead(readers)

    def join(self, request: Request, names: Iterable[str]) -> None:
        """These read on from the token that is computed next."""
        self.changes += 1
        for name in names:
            if name in self.choices(request):
                self._readers.setdefault(request.id, []).append(name)
                self.drafters[name].join(request.id, request.computed)

    def _heads_of(self, request: str) -> list[str]:
        return [name for name in self._choices.get(request, ()) if self.drafters[name].needs.hidden_layers]

    def are_ahead(self, names: Iterable[str]) -> bool:
        """Can all of these draft before the host knows the last tokens?"""
        return all(self.drafters[name].ahead for name in names)

    def add(self, request: Request) -> None:
        """A request comes; an unknown drafter is said now."""
        self._choices[request.id] = self._offer(request)

    def _forbid(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.changes += 1
        for request, name in pairs:
            self._without.add((request, name))
            self._choices[request] = tuple(n for n in self._choices.get(request, ()) if n != name)
            if reading := [n for n in self._readers.pop(request, []) if n != name]:
                self._readers[request] = reading

    def can_draft_ahead(self, request: Request) -> bool:
        """Can a drafter of it draft where the target's device keeps the texts?"""
        return any(self.drafters[name].ahead for name in self.choices(request))

    def _view(self, part: Planned, depth: int, wish: Wish) -> RequestView:
        r = part.request
        how, deepest = self.verification(r), depth if depth < wish.depth else wish.depth
        view = RequestView(
            r.id, r.tokens, len(r.prompt), wish.nodes, deepest, r.params, r.seed, how, r, part.seat
        )  # fmt: skip
        self._views[r.id] = view
        return view

    def _ask(self, asked: Asked, out: Drafted) -> None:
        """Keep the trees, within their budgets."""
        requests, began = asked.view.requests, time.perf_counter()
        try:
            draft = self.drafters[asked.name].propose(asked.view)
            trees = draft.trees()
        except Exception as error:
            return self._drop(asked.name, requests, f"failed: {error!r}")
        if len(trees) != len(requests):
            return self._drop(asked.name, requests, f"gave {len(trees)} trees for {len(requests)} requests")
        seconds, size = time.perf_counter() - began, self.around.vocab_size
        whole = draft.mail is not None and draft.mail.depth is not None  # then the device made it, as it was told to
        for i, r, grown in zip(asked.members, requests, trees, strict=True):
            if not whole:
                wrong = tree.check(grown, size, draft.mail is not None) or check_logq(grown, draft.logq, size)
                if wrong:
                    self._drop(asked.name, [r], f"gave no tree: {wrong}")
                    continue
                grown = tree.prune(grown, r.budget, r.max_depth)
            out.propose(i, asked.name, grown, draft.logq)
        out.asked.append(asked)
        if draft.mail is not None:
            out.mail.append((draft, asked.members))
        else:
            out.errands.append(Errand.of(asked.name, [min(r.max_depth, r.budget) for r in requests], seconds))

    def observe(self, drafted: Drafted, verdicts: Sequence[Verdict]) -> None:
        """Tell every drafter what became of its drafts; of requests that are over it has heard the last."""
        for asked in drafted.asked:
            heed = getattr(self.drafters[asked.name].observe, "__func__", None)
            if not self.listeners and heed is Drafter.observe:
                continue  # nobody listens
            alive = [(r, i) for r, i in zip(asked.view.requests, asked.members, strict=True) if r.id in self._views]
            view = (
                asked.view if len(alive) == len(asked.members) else replace(asked.view, requests=[r for r, _ in alive])
            )
            own = [_own_verdict(drafted, i, asked.name, verdicts[i]) for _, i in alive]
            heard = view, [t for t, _ in own], [v for _, v in own]
            for listener in self.listeners:
                listener(*heard)
            try:
                self.drafters[asked.name].observe(*heard)
            except Exception as error:
                self._drop(asked.name, view.requests, f"failed on a verdict: {error!r}")

    def read(self, readings: Sequence[tuple[Planned, Reading]], hidden: Mapping[int, torch.Tensor] | None) -> None:
        """Hand each drafter that asks for hidden states what the target computed of its requests."""
        self._hand_out(readings, lambda drafter, own: drafter.read(own, hidden))

    def reads_ahead(self, request: Request) -> bool:
        """Can its drafters that read along read a prompt before the step that computes it is over?"""
        return all(self.drafters[name].reads_ahead for name in self.readers(request))

    def read_ahead(self, readings: Sequence[tuple[Planned, Reading]]) -> None:
        """Tell each of them what the forward that comes will read for it."""
        self._hand_out(readings, lambda drafter, own: drafter.read_ahead(own))

    @property
    def reader(self) -> Reader | None:
        """Who reads prompts in the target's forward: the first that can."""
        return next((d.reader for d in self.drafters.values() if d.reader is not None), None)

    def _hand_out(
        self, readings: Sequence[tuple[Planned, Reading]], hand: Callable[[Drafter, list[Reading]], None]
    ) -> None:
        """To each drafter that reads, what is of its requests."""
        for name, drafter in self.drafters.items():
            if not drafter.needs.hidden_layers:
                continue
            own = [(p, r) for p, r in readings if name in self._readers.get(p.request.id, NOBODY)]
            if not own:
                continue
            for part in [p for p, _ in own if p.request.id not in self._views]:
                self._view(part, 0, Wish(0, 0))
            try:
                hand(drafter, [r for _, r in own])
            except Exception as error:
                views = [self._views[p.request.id] for p, _ in own]
                self._drop(name, views, f"failed on hidden states: {error!r}")

    # ------------------------------------------------------------------ leaving
    def release(self, request: Request) -> None:
        """The request is over."""
        self._without -= {(request.id, name) for name in self.drafters} if self._without else set()
        self._choices.pop(request.id, None)
        self._readers.pop(request.id, None)
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
        self._forbid((r.id, name) for r in requests)


def _first(own: Mapping[str, Tree]) -> Tree:
    """The first of these that is not empty."""
    for grown in own.values():
        if grown.tokens:
            return grown
    return NO_TREE


def _same_places(draft: Draft, last: Draft) -> bool:
    """Do both come by mail, with the same things at the same places?"""
    a, b = draft.mail, last.mail
    if a is None or b is None:
        return False
    return (
        len(a.device) == len(b.device)
        and np.array_equal(a.index, b.index)
        and np.array_equal(draft.offsets, last.offsets)
    )


def _own_verdict(drafted: Drafted, i: int, name: str, verdict: Verdict) -> tuple[Tree, Verdict]:
    """A drafter's own tree, as far as it was verified, and the verdict in its numbers."""
    chosen, own = drafted.trees[i], drafted.proposals[i].get(name, Tree())
    if set(chosen.origins or ()) <= {name} or not len(own):
        return chosen, verdict
    said = verdict.tokens(chosen)
    nodes = tree.follow(own, said[:-1])
    return own, Verdict(nodes, said[len(nodes)])


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
