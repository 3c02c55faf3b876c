"""Which part of a draft stays. Pure functions over one request's tree; a chain is the tree with one child per node.

**The walk** (default). Row 0 is the target's view after the request's last token, row i+1 after node i. `choices[r]`
is the target's own token in row r: argmax of log p + g, with noise g that depends on seed, position and token only.
Start at the root; while a child holds the target's token, go there; the first token that no child holds is the bonus.
Every token that leaves the walk is the target's own choice for its place, so the text cannot depend on the draft.

**Rejection** (Leviathan et al. 2023, Chen et al. 2023; trees as in SpecInfer, sampled without replacement). At a node
with target distribution p, the children c1, c2, ... were drawn from q one after the other without replacement. Accept
c1 with probability min(1, p(c1)/q(c1)). Otherwise the token must come from the residual p' ∝ max(p - q, 0), and the
next child was drawn from q' ∝ q without c1: the same question again with p', q'. When no child is left, draw from what
p has become. Each round preserves p: P(x) = q(x)·min(1, p(x)/q(x)) + (1 - Σ min(p, q)) · p'(x) = p(x). A drafter that
does not know q proposes c with certainty: q is 1 at c, so c is accepted with probability p(c) and p' is p without c.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from headstart.core import Tree, Verdict
from headstart.tree import children


class Coins(Protocol):
    """Where randomness comes from: `noise.Chance` in the engine, an enumerator in the tests."""

    def coin(self, probability: float) -> bool: ...
    def draw(self, weights: torch.Tensor) -> int: ...


def walk(tree: Tree, choices: Sequence[int]) -> Verdict:
    """Follow the target's tokens down the tree. `choices` has one token per row, root first."""
    below = children(tree.parents)
    node = -1
    accepted: list[int] = []
    while True:
        token = choices[node + 1]
        match = next((c for c in below.get(node, ()) if tree.tokens[c] == token), None)
        if match is None:
            return Verdict(accepted, token)
        accepted.append(match)
        node = match


def reject(tree: Tree, logp: torch.Tensor, logq: torch.Tensor | None, chance: Coins) -> Verdict:
    """Rejection sampling down the tree. logp (1+N, V) float64, root first; logq (Q, V) or None: certain drafts."""
    below = children(tree.parents)
    node = -1
    accepted: list[int] = []
    while True:
        p = logp[node + 1].exp()
        child, p = _try_children(tree, below.get(node, ()), p, logq, chance)
        if child is None:
            return Verdict(accepted, chance.draw(p))
        accepted.append(child)
        node = child


def _try_children(
    tree: Tree, candidates: Sequence[int], p: torch.Tensor, logq: torch.Tensor | None, chance: Coins
) -> tuple[int | None, torch.Tensor]:
    """The first child that is accepted, or None and the residual of p."""
    if logq is None or tree.logq_rows is None or not candidates:
        return _try_certain(tree, candidates, p, chance)
    q = logq[tree.logq_rows[candidates[0]]].double().exp().to(p.device)
    for child in candidates:
        token = tree.tokens[child]
        if q[token] <= 0:  # not drawn from q after all: accepting it could only bias the text
            continue
        if chance.coin(min(1.0, float(p[token] / q[token]))):
            return child, p
        p = _residual(p, q)
        q = q.clone()
        q[token] = 0.0
        q = q / q.sum() if float(q.sum()) > 0 else q
    return None, p


def _try_certain(
    tree: Tree, candidates: Sequence[int], p: torch.Tensor, chance: Coins
) -> tuple[int | None, torch.Tensor]:
    for child in candidates:
        token = tree.tokens[child]
        if chance.coin(float(p[token])):
            return child, p
        certain = torch.zeros_like(p)
        certain[token] = 1.0
        p = _residual(p, certain)
    return None, p


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What is left of p once q had its chance; p itself where nothing is left (p = q: a rejection cannot happen)."""
    rest = (p - q).clamp_min(0.0)
    total = rest.sum()
    return rest / total if float(total) > 0 else p
