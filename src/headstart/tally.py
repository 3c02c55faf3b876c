"""Which candidate the target took: counts by depth and rank, and the chances that they speak for."""

from __future__ import annotations

from collections.abc import Sequence

from headstart import tree
from headstart.core import Tree, Verdict, View

PRIOR = 2.0  # trials that the guess before any measurement counts for


class Tally:
    """What became of drafts whose siblings stand in the order of their ranks.

    A node is *tried* when its parent was accepted (the root always is), and *right* when it was accepted itself. So the chances
    are those behind a path that was right, whichever it was; the rest of the path is taken not to matter.
    """

    def __init__(self, depth: int, ranks: int) -> None:
        self.tried = [[0] * ranks for _ in range(depth)]
        self.right = [[0] * ranks for _ in range(depth)]
        self.steps = 0

    def hear(self, view: View, trees: Sequence[Tree], verdicts: Sequence[Verdict]) -> None:
        """As a drafter observes."""
        for draft, verdict in zip(trees, verdicts, strict=True):
            if len(draft):
                self.add(draft, verdict)

    def add(self, draft: Tree, verdict: Verdict) -> None:
        self.steps += 1
        below, accepted = tree.children(draft.parents), set(verdict.accepted)
        for depth, node in enumerate([-1, *verdict.accepted][: len(self.tried)]):
            for rank, child in enumerate(below.get(node, ())[: len(self.tried[0])]):
                self.tried[depth][rank] += 1
                self.right[depth][rank] += child in accepted

    def chances(self) -> list[list[float]]:
        """[depth - 1][rank]: the share that was right. Where little was tried, the depth above speaks too; above the first one,
        a half, a quarter, and so on."""
        before = [0.5 ** (r + 1) for r in range(len(self.tried[0]))]
        out = []
        for tried, right in zip(self.tried, self.right, strict=True):
            before = [(n + PRIOR * b) / (t + PRIOR) for n, t, b in zip(right, tried, before, strict=True)]
            out.append(before)
        return out
