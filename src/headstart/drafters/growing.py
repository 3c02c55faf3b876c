"""Trees that grow level by level, for drafters that give logits: whose children come next, and which nodes stay.

A node's value is the product of confidences on its path; the best nodes are expanded next, and in the end the best of all fill
the budget. Or the shape is fixed beforehand (`shapes`): each node gets the children that a plan names, whatever their values.

Under the walk, candidates are ranked by log q + g with the request's own noise, so they agree with the target far more often
than independent samples. Under rejection, children are drawn from q without replacement with noise of their own, and how many
are drawn is decided before their tokens are known: a choice that depended on them would bias the text.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from headstart import shapes
from headstart.config import SpeculativeConfig
from headstart.core import Request, RequestView, Tree
from headstart.drafters import Drafter, Surroundings
from headstart.noise import derive_seed
from headstart.sampling import Row, top_scores
from headstart.tree import best_nodes, depths, path, select


@dataclass
class Growth:
    """One request's draft while it grows."""

    view: RequestView
    context: list[int]  # in the draft's vocabulary
    rule: Request  # whose parameters and noise rank the candidates
    depth: int
    length: int  # tokens that the request had
    samples: bool  # children are drawn from q, not ranked
    computed: int = 0
    plan: shapes.Plan | None = None  # where the shape is fixed beforehand
    tree: Tree = field(default_factory=Tree)
    values: list[float] = field(default_factory=list)
    ranks: list[shapes.Path] = field(default_factory=list)  # each node's path, as a shape has it
    frontier: list[int] = field(default_factory=list)  # nodes whose children come next; -1 is the root
    expanded: list[int] = field(default_factory=list)  # nodes whose KV is computed, in slot order
    draft_tokens: list[int] = field(default_factory=list)  # each node's token in the draft's vocabulary
    logits: torch.Tensor | None = None  # (frontier, V), as `_rank` takes them


class GrowingDrafter(Drafter):
    """Level by level: `_rank` the candidates of the frontier, choose the next frontier, `_expand` it."""

    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        super().__init__(config, around)
        if config.static_tree is None:
            self.top_k = (config.top_k or 4) if config.tree else 1
            self.width = config.max_branches if config.tree else 1
        else:
            inner = shapes.inner_by_level(config.static_tree)
            self.top_k, self.width = shapes.num_ranks(config.static_tree), max(inner, default=1)
            self._inner = sum(inner)
            self._plans = functools.cache(functools.partial(shapes.plan, config.static_tree))
        self.shape = self.top_k, self.width  # of this proposal

    # -------------------------------------------------------------- what a drafter brings
    def _expand(self, growths: list[Growth], level: int) -> None:
        """Compute the frontiers: `logits` of their children, and `expanded` has them."""
        raise NotImplementedError

    def _rank(
        self, logits: torch.Tensor, rows: list[Row], samples: bool, level: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `top_scores`: the best tokens of each row, their confidence, and log q, which only `samples` needs."""
        return top_scores(logits, rows, self.shape[0])

    def _rows(self, g: Growth) -> list[Row]:
        """The places whose next token the frontier's logits are about."""
        return [Row(g.rule, [g.tree.tokens[i] for i in path(g.tree.parents, n)]) for n in g.frontier]

    def _ends(self, g: Growth) -> Set[int]:
        """Tokens behind which nothing is drafted."""
        return g.rule.stop_ids

    def _own(self, token: int) -> int:
        """A token of the target in the draft's vocabulary."""
        return token

    def _drafts(self) -> str:
        """For people."""
        if not self.config.tree:
            return "chains"
        return f"{'static trees of' if self.config.static_tree else 'trees of up to'} {self.config.nodes} nodes"

    # -------------------------------------------------------------- growth
    def _rule(self, r: RequestView, request: Request) -> tuple[Request, bool]:
        """Whose parameters and noise rank the candidates, and whether they are drawn from q."""
        if r.verification != "rejection" or r.params.greedy:
            return request, False
        if self.config.draft_sample_method == "probabilistic":
            return replace(request, seed=derive_seed(r.seed, "draft")), True
        return replace(request, params=replace(request.params, temperature=0.0)), False

    def _plan(self, depth: int, budget: int, samples: bool) -> shapes.Plan | None:
        return None if self.config.static_tree is None else self._plans(budget, depth, samples)

    def _room(self, depth: int, budget: int) -> int:
        """Most nodes that one proposal expands."""
        if self.config.static_tree is not None:
            return self._inner
        return depth if self.width == 1 else min(depth * self.width, 4 * budget + self.width)

    def _grow_levels(self, growths: list[Growth], logq: list[torch.Tensor]) -> None:
        for level in itertools.count(1):
            active = [g for g in growths if g.frontier and level <= g.depth]
            if not active:
                break
            self._branch(active, logq, level)
            if further := [g for g in active if g.frontier and level < g.depth]:
                self._expand(further, level)

    def _branch(self, growths: list[Growth], logq: list[torch.Tensor], level: int) -> None:
        """Give every frontier node its children, then choose the next frontier among them."""
        logits = torch.cat([g.logits for g in growths])  # type: ignore[misc]
        rows = [row for g in growths for row in self._rows(g)]
        samples = any(g.samples for g in growths)
        tokens, confidence, full = self._rank(logits, rows, samples, level - 1)
        base = sum(len(x) for x in logq)
        if samples and full is not None:
            logq.append(full)
        row = 0
        for g in growths:
            count = len(g.frontier)
            part = slice(row, row + count)
            q = full[part] if g.samples and full is not None else None
            self._add_children(g, tokens[part].tolist(), confidence[part].tolist(), q, base + row)
            row += count

    def _add_children(
        self,
        g: Growth,
        tokens: list[list[int]],
        confidence: list[list[float]],
        logq: torch.Tensor | None,
        first_row: int,
    ) -> None:
        fresh: list[int] = []
        for i, parent in enumerate(g.frontier):
            q = None if logq is None else logq[i].exp()
            base = g.values[parent] if parent >= 0 else 1.0
            for rank in self._children(g, parent, confidence[i], q):
                token = tokens[i][rank]
                chance = confidence[i][rank] if q is None else float(q[token])
                if not chance > 0:
                    continue
                self._add_node(g, token, parent, rank, base * chance, first_row + i if q is not None else None)
                fresh.append(len(g.tree) - 1)
        ends = self._ends(g)
        g.frontier = self._next_frontier(g, [n for n in fresh if g.tree.tokens[n] not in ends])

    def _children(self, g: Growth, parent: int, chances: list[float], q: torch.Tensor | None) -> Sequence[int]:
        """Ranks of the candidates that become children."""
        if g.plan is not None:
            wanted = g.plan.children.get(g.ranks[parent] if parent >= 0 else (), ())
            return [rank for rank in wanted if rank < len(chances)]
        if q is not None:  # decide by q alone, before looking at what was drawn
            chances = q.topk(min(self.shape[0], len(q))).values.tolist()
        if chances[0] < self.config.p_min:
            return ()
        return range(sum(1 for k, c in enumerate(chances) if k == 0 or c >= self.config.p_split))

    def _next_frontier(self, g: Growth, fresh: list[int]) -> list[int]:
        if g.plan is not None:
            return [n for n in fresh if g.ranks[n] in g.plan.children]
        best = sorted(fresh, key=lambda n: -g.values[n])[: self.shape[1]]
        full = len(g.expanded) + len(best) > self._room(g.depth, g.view.budget)
        return [] if full or (g.samples and len(g.tree) >= g.view.budget) else best

    def _add_node(self, g: Growth, token: int, parent: int, rank: int, value: float, row: int | None) -> None:
        g.tree.tokens.append(token)
        g.tree.parents.append(parent)
        if not g.samples:  # what was drawn must not decide what stays
            g.tree.confidence = [*(g.tree.confidence or []), value / (g.values[parent] if parent >= 0 else 1.0)]
        g.values.append(value)
        g.ranks.append((*(g.ranks[parent] if parent >= 0 else ()), rank))
        if row is not None:
            g.tree.logq_rows = [*(g.tree.logq_rows or []), row]
        g.draft_tokens.append(self._own(token))

    def _chosen_tree(self, g: Growth) -> Tree:
        """The tree that goes to the target."""
        if (plan := g.plan) is not None:
            g.tree.kinds = [ranks[-1] for ranks in g.ranks]
            return select(g.tree, sorted(range(len(g.tree)), key=lambda n: plan.place[g.ranks[n]]))
        if g.samples:  # order of drawing decides what stays, never a token
            return select(g.tree, list(range(min(len(g.tree), g.view.budget))))
        tree = select(g.tree, best_nodes(g.values, g.tree.parents, g.view.budget))
        return tree if max(depths(tree.parents), default=0) >= self.config.min_draft_tokens else Tree()


def frontier_shape(g: Growth) -> tuple[list[int], list[int]]:
    """The frontier joins what is expanded: the depth of each of its nodes, and the parents of all that is expanded."""
    depth = depths(g.tree.parents)
    g.expanded += g.frontier
    place = {n: i for i, n in enumerate(g.expanded)}
    return [depth[n] for n in g.frontier], [place.get(g.tree.parents[n], -1) for n in g.expanded]


def unpack(growths: Sequence[Growth], logits: torch.Tensor) -> None:
    """Rows of logits, in the order of the frontiers, back to their growths."""
    start = 0
    for g in growths:
        g.logits = logits[start : start + len(g.frontier)]
        start += len(g.frontier)
