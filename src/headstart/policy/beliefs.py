"""How likely a draft's nodes are to be accepted, learned from what texts really said.

A draft is a claim about the next tokens. Whether it was verified or not, the text itself tells some steps later how far it was
right: so a draft that was not worth verifying still teaches, and finding out that drafts have become good costs nothing.

Nodes of one *kind* are counted together: of one drafter, at one depth, and what the drafter says of them, in numbers of its own
or as a confidence, which is believed until it has been tried. One more kind is the first candidate at each depth, whatever was
said of it: so one can tell what a draft will bring before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart import tree
from headstart.config import HEADS
from headstart.core import Request, Tree

Kind = tuple[str, int, int]  # drafter, what it says of the node (FIRST: whatever it says), how deep
FIRST = -1
SURE = 100  # kinds from here on are confidences
DEEP, DEEPER = 3, 8  # depths that are told apart: of a kind, and of FIRST
OLD, AGED = 0.9, 0.999  # what is left of a request's, and of everybody's past experience, after one more node,
PASSING = 0.998  # and of either after one more step
DOUBT = 0.3  # the chance of a node of which nothing is known,
HOPE = 0.8  # and where it comes from a head: one that was trained for this target
PRIOR = 1.0  # trials that these count for,
NEXT = 6.0  # and that the depth before counts for, where what comes deeper is foretold
TRUST = 3.0  # trials of its own after which a request's experience outweighs everybody's
TRIALS = 10  # after which a depth counts as tried
OPEN = 4  # claims of one drafter about one request that wait for its text


@dataclass
class Count:
    right: float = 0.0
    tried: float = 0.0
    step: int = 0  # when it was last tried

    def add(self, right: bool, rest: float, step: int) -> None:
        rest *= self.left(step)
        self.right = self.right * rest + right
        self.tried = self.tried * rest + 1
        self.step = step

    def left(self, step: int) -> float:
        """What is left of it by now: what was not tried for long is not known any more."""
        return 1.0 if step == self.step else PASSING ** (step - self.step)


class Claim:
    """A draft, and how far the text has followed it."""

    def __init__(self, name: str, draft: Tree, at: int) -> None:
        self.name, self.draft = name, draft
        self._children = None if tree.is_chain(draft.parents) else tree.children(draft.parents)
        self._at, self._here, self._depth = at, -1, 1  # the next token of the text to look at, and the node before it

    def follow(self, text: Sequence[int]) -> list[tuple[Kind, bool]]:
        """The nodes that the text has met since, each with whether it was right."""
        trials: list[tuple[Kind, bool]] = []
        tokens = self.draft.tokens
        while self._at < len(text) and (nodes := self._next()):
            said = text[self._at]
            trials += [(_kind(self.name, self.draft, n, self._depth), tokens[n] == said) for n in nodes]
            trials.append(((self.name, FIRST, min(self._depth, DEEPER)), tokens[nodes[0]] == said))
            self._here = next((n for n in nodes if tokens[n] == said), len(tokens))
            self._at += 1
            self._depth += 1
        return trials

    def _next(self) -> Sequence[int]:
        """The nodes that stand behind where the text is."""
        if self._children is not None:
            return self._children.get(self._here, ())
        return (self._here + 1,) if self._here + 1 < len(self.draft) else ()

    @property
    def over(self) -> bool:
        """The text has left the draft, or gone all its way."""
        return not self._next()


@dataclass
class History:
    """One request's claims that are open, by drafter, and its experience."""

    claims: dict[str, list[Claim]] = field(default_factory=dict)
    counts: dict[Kind, Count] = field(default_factory=dict)


class Beliefs:
    def __init__(self) -> None:
        self.step = 0
        self._all: dict[Kind, Count] = {}
        self._own: dict[str, History] = {}

    # ------------------------------------------------------------------ what is believed
    def chances(self, request: Request, name: str, draft: Tree, least: float = 0.0) -> list[float]:
        """That each node is reached and right; 0 where that is less than `least`."""
        known: dict[Kind, float] = {}
        out: list[float] = []
        depths: list[int] = []
        for i, parent in enumerate(draft.parents):
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
            before = out[parent] if parent >= 0 else 1.0
            if before <= 0:
                out.append(0.0)
                continue
            kind = _kind(name, draft, i, depths[i])
            if kind not in known:
                known[kind] = self._chance(request.id, kind)
            chance = known[kind] * before
            out.append(chance if chance >= least else 0.0)
        return out

    def outlook(self, request: Request, name: str, depth: int, least: float = 0.0) -> list[float]:
        """That the first candidates of a draft which is not made yet are reached and right, at depth 1, 2, ...; 0 where that is
        less than `least`."""
        out, reached, chance = [], 1.0, None
        for d in range(1, depth + 1):
            chance = self._chance(request.id, (name, FIRST, min(d, DEEPER)), chance)
            reached *= chance
            if reached < least:
                break
            out.append(reached)
        return out + [0.0] * (depth - len(out))

    def _chance(self, request: str, kind: Kind, guess: float | None = None) -> float:
        """`guess`: what it may be, as far as it was not tried."""
        shared = self._all.get(kind)
        weight = PRIOR if guess is None else NEXT
        guess = _guess(kind) if guess is None else guess
        general = guess
        if shared is not None:
            left = shared.left(self.step)
            general = (shared.right * left + weight * guess) / (shared.tried * left + weight)
        history = self._own.get(request)
        own = history.counts.get(kind) if history else None
        if own is None:
            return general
        left = own.left(self.step)
        return (own.right * left + TRUST * general) / (own.tried * left + TRUST)

    def first(self, name: str) -> float | None:
        """The chance of this drafter's first token, for anybody; None: it was never heard."""
        return self._chance("", (name, FIRST, 1)) if (name, FIRST, 1) in self._all else None

    def is_tried(self, name: str, depth: int) -> bool:
        """Is it known how good this drafter is so deep?"""
        known = self._all.get((name, FIRST, min(depth, DEEPER)))
        return known is not None and known.tried * known.left(self.step) >= TRIALS

    # ------------------------------------------------------------------ what is learned
    def claim(self, request: Request, name: str, draft: Tree, least: float = 0.0) -> list[float]:
        """This draft was made; the text will tell. Returns its nodes' chances."""
        claims = self._own.setdefault(request.id, History()).claims.setdefault(name, [])
        if len(claims) < OPEN:
            claims.append(Claim(name, draft, len(request.tokens)))
        return self.chances(request, name, draft, least)

    def hear_all(self, requests: Sequence[Request]) -> None:
        """A step is over: these texts have grown."""
        self.step += 1
        for request in requests:
            self.hear(request)

    def hear(self, request: Request) -> None:
        """The text of this request has grown."""
        history = self._own.get(request.id)
        for name, claims in history.claims.items() if history else ():
            for claim in claims:
                self._book(history, claim.follow(request.tokens))  # type: ignore[arg-type]
            history.claims[name] = [c for c in claims if not c.over]  # type: ignore[union-attr]

    def _book(self, history: History, trials: list[tuple[Kind, bool]]) -> None:
        for kind, right in trials:
            for counts, rest in ((history.counts, OLD), (self._all, AGED)):
                count = counts.get(kind)
                if count is None:
                    count = counts[kind] = Count()
                count.add(right, rest, self.step)

    def forget(self, request: Request) -> None:
        self._own.pop(request.id, None)


def _kind(name: str, draft: Tree, node: int, depth: int) -> Kind:
    if draft.confidence is not None:
        return name, SURE + _bucket(draft.confidence[node]), min(depth, DEEP)
    return name, draft.kinds[node] if draft.kinds else 0, min(depth, DEEP)


def _bucket(confidence: float) -> int:
    """Confidences of about the same odds: 0 is a half, -12 next to nothing, 12 next to certain."""
    c = min(max(confidence, 1e-4), 1 - 1e-4)
    return min(12, max(-12, round(1.5 * math.log(c / (1 - c)))))


def _guess(kind: Kind) -> float:
    """Before it was tried."""
    name, said, _ = kind
    if said >= SURE // 2:
        return 1 / (1 + math.exp(-(said - SURE) / 1.5))
    return HOPE if name in HEADS else DOUBT
