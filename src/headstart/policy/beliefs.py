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
OLD, AGED = 0.9, 0.999  # what is left of a request's, and of everybody's past experience, after one more node
DOUBT = 0.3  # the chance of a node of which nothing is known,
HOPE = 0.8  # and where it comes from a head: one that was trained for this target
PRIOR = 1.0  # trials that these count for
TRUST = 3.0  # trials of its own after which a request's experience outweighs everybody's
OPEN = 4  # claims of one drafter about one request that wait for its text


@dataclass
class Count:
    right: float = 0.0
    tried: float = 0.0

    def add(self, right: bool, rest: float) -> None:
        self.right = self.right * rest + right
        self.tried = self.tried * rest + 1


class Claim:
    """A draft, and how far the text has followed it."""

    def __init__(self, kinds: list[Kind], draft: Tree, at: int) -> None:
        self.tokens, self.kinds, self._children = draft.tokens, kinds, tree.children(draft.parents)
        self._at, self._here, self._depth = at, -1, 1  # the next token of the text to look at, and the node before it

    def follow(self, text: Sequence[int]) -> list[tuple[Kind, bool]]:
        """The nodes that the text has met since, each with whether it was right."""
        trials: list[tuple[Kind, bool]] = []
        while not self.over and self._at < len(text):
            said, nodes = text[self._at], self._children[self._here]
            trials += [(self.kinds[n], self.tokens[n] == said) for n in nodes]
            first = (self.kinds[nodes[0]][0], FIRST, min(self._depth, DEEPER))
            trials.append((first, self.tokens[nodes[0]] == said))
            self._here = next((n for n in nodes if self.tokens[n] == said), len(self.tokens))
            self._at += 1
            self._depth += 1
        return trials

    @property
    def over(self) -> bool:
        """The text has left the draft, or gone all its way."""
        return self._here not in self._children


@dataclass
class History:
    """One request's claims that are open, by drafter, and its experience."""

    claims: dict[str, list[Claim]] = field(default_factory=dict)
    counts: dict[Kind, Count] = field(default_factory=dict)


class Beliefs:
    def __init__(self) -> None:
        self._all: dict[Kind, Count] = {}
        self._own: dict[str, History] = {}

    # ------------------------------------------------------------------ what is believed
    def chances(self, request: Request, name: str, draft: Tree) -> list[float]:
        """That each node is reached and right."""
        return self._chances(request, _kinds(name, draft), draft)

    def _chances(self, request: Request, kinds: list[Kind], draft: Tree) -> list[float]:
        known: dict[Kind, float] = {}
        out: list[float] = []
        for kind, parent in zip(kinds, draft.parents, strict=True):
            if kind not in known:
                known[kind] = self._chance(request.id, kind)
            out.append(known[kind] * (out[parent] if parent >= 0 else 1.0))
        return out

    def outlook(self, request: Request, name: str, depth: int) -> list[float]:
        """That the first candidates of a draft which is not made yet are reached and right, at depth 1, 2, ..."""
        out, reached, chance = [], 1.0, None
        for d in range(1, depth + 1):
            chance = self._chance(request.id, (name, FIRST, min(d, DEEPER)), chance)
            reached *= chance
            out.append(reached)
        return out

    def _chance(self, request: str, kind: Kind, guess: float | None = None) -> float:
        """`guess`: what it may be, as far as it was not tried."""
        shared = self._all.get(kind)
        guess = _guess(kind) if guess is None else guess
        general = guess if shared is None else (shared.right + PRIOR * guess) / (shared.tried + PRIOR)
        history = self._own.get(request)
        own = history.counts.get(kind) if history else None
        return general if own is None else (own.right + TRUST * general) / (own.tried + TRUST)

    # ------------------------------------------------------------------ what is learned
    def claim(self, request: Request, name: str, draft: Tree) -> list[float]:
        """This draft was made; the text will tell. Returns its nodes' chances."""
        kinds = _kinds(name, draft)
        claims = self._own.setdefault(request.id, History()).claims.setdefault(name, [])
        if len(claims) < OPEN:
            claims.append(Claim(kinds, draft, len(request.tokens)))
        return self._chances(request, kinds, draft)

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
                count.add(right, rest)

    def forget(self, request: Request) -> None:
        self._own.pop(request.id, None)


def _kinds(name: str, draft: Tree) -> list[Kind]:
    depth = tree.depths(draft.parents)
    if draft.confidence is not None:
        return [(name, SURE + _bucket(c), min(d, DEEP)) for c, d in zip(draft.confidence, depth, strict=True)]
    said = draft.kinds or [0] * len(draft)
    return [(name, k, min(d, DEEP)) for k, d in zip(said, depth, strict=True)]


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
