"""How likely a draft's nodes are to be accepted, learned from what texts really said.

A draft is a claim about the next tokens. Whether it was verified or not, the text itself tells some steps later how far it was
right: so a draft that was not worth verifying still teaches, and finding out that drafts have become good costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart import tree
from headstart.config import HEADS
from headstart.core import Request, Tree

Kind = tuple[str, int, int]  # drafter, what it says of the node, how deep (2: or more)
OLD, AGED = 0.9, 0.999  # what is left of a request's, and of everybody's past experience, after one more node
DOUBT = 0.3  # the chance of a node of which nothing is known,
HOPE = 0.8  # and where it comes from a head: one that was trained for this target
TRUST = 3.0  # trials of its own after which a request's experience outweighs everybody's
OPEN = 4  # claims of one request that wait for its text


@dataclass
class Count:
    right: float = 0.0
    tried: float = 0.0

    def add(self, right: bool) -> None:
        self.right += right
        self.tried += 1

    def fade(self, rest: float) -> None:
        self.right *= rest
        self.tried *= rest


class Claim:
    """A draft, and how far the text has followed it."""

    def __init__(self, kinds: list[Kind], draft: Tree, at: int) -> None:
        self.tokens, self.kinds, self._children = draft.tokens, kinds, tree.children(draft.parents)
        self._at, self._here = at, -1  # the next token of the text to look at, and the node that it stands behind

    def follow(self, text: Sequence[int]) -> list[tuple[Kind, bool]]:
        """The nodes that the text has met since, each with whether it was right."""
        trials: list[tuple[Kind, bool]] = []
        while not self.over and self._at < len(text):
            said, nodes = text[self._at], self._children[self._here]
            trials += [(self.kinds[n], self.tokens[n] == said) for n in nodes]
            self._here = next((n for n in nodes if self.tokens[n] == said), len(self.tokens))
            self._at += 1
        return trials

    @property
    def over(self) -> bool:
        """The text has left the draft, or gone all its way."""
        return self._here not in self._children


@dataclass
class History:
    """One request's claims that are open, and its experience."""

    claims: list[Claim] = field(default_factory=list)
    counts: dict[Kind, Count] = field(default_factory=dict)


class Beliefs:
    def __init__(self) -> None:
        self._all: dict[Kind, Count] = {}
        self._own: dict[str, History] = {}

    # ------------------------------------------------------------------ what is believed
    def chances(self, request: Request, name: str, draft: Tree) -> list[float]:
        """That each node is reached and right."""
        return self._chances(request, _kinds(name, draft), draft.parents)

    def _chances(self, request: Request, kinds: list[Kind], parents: Sequence[int]) -> list[float]:
        known: dict[Kind, float] = {}
        out: list[float] = []
        for kind, parent in zip(kinds, parents, strict=True):
            if kind not in known:
                known[kind] = self._chance(request.id, kind)
            out.append(known[kind] * (out[parent] if parent >= 0 else 1.0))
        return out

    def _chance(self, request: str, kind: Kind) -> float:
        shared = self._all.get(kind) or Count()
        general = (shared.right + (HOPE if kind[0] in HEADS else DOUBT)) / (shared.tried + 1)
        history = self._own.get(request)
        own = history.counts.get(kind) if history else None
        return general if own is None else (own.right + TRUST * general) / (own.tried + TRUST)

    # ------------------------------------------------------------------ what is learned
    def claim(self, request: Request, name: str, draft: Tree) -> list[float]:
        """This draft was made; the text will tell. Returns its nodes' chances."""
        claims, kinds = self._own.setdefault(request.id, History()).claims, _kinds(name, draft)
        if len(claims) < OPEN:
            claims.append(Claim(kinds, draft, len(request.tokens)))
        return self._chances(request, kinds, draft.parents)

    def hear(self, request: Request) -> None:
        """The text of this request has grown."""
        history = self._own.get(request.id)
        if history is None or not history.claims:
            return
        for claim in history.claims:
            self._book(history, claim.follow(request.tokens))
        history.claims = [c for c in history.claims if not c.over]

    def _book(self, history: History, trials: list[tuple[Kind, bool]]) -> None:
        for kind, right in trials:
            for counts, rest in ((history.counts, OLD), (self._all, AGED)):
                count = counts.setdefault(kind, Count())
                count.fade(rest)
                count.add(right)

    def forget(self, request: Request) -> None:
        self._own.pop(request.id, None)


def _kinds(name: str, draft: Tree) -> list[Kind]:
    said = draft.kinds or [0] * len(draft)
    return [(name, k, min(d, 2)) for k, d in zip(said, tree.depths(draft.parents), strict=True)]
