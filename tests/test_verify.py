"""Exactness by enumeration: every branch of draft and verdict with its exact weight, on vocabularies of 3 to 5.

A verifier is right when the law of what it emits, continued by the target itself to a fixed length, is the product of the
target's conditionals. Each check is shown to be able to fail: verifiers that are wrong in one place miss by more than 1e-3.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest
import torch

from headstart import verify
from headstart.core import Tree, Verdict
from headstart.models.vocab import SAME, TOKEN, VocabMap
from headstart.noise import Chance
from headstart.tree import children, path

Text = tuple[int, ...]
Law = dict[Text, float]
T = TypeVar("T")


# ------------------------------------------------------------------ enumeration
class Enumerator:
    """Coins that follow a given prefix of decisions, then take the first possible branch, and keep the weight."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self.prefix = prefix
        self.trail: list[int] = []
        self.open: list[list[int]] = []  # for each decision, the branches that were not taken
        self.weight = 1.0

    def coin(self, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        return self._decide([probability, 1.0 - probability]) == 0

    def draw(self, weights: torch.Tensor) -> int:
        return self._decide((weights.double() / weights.double().sum()).tolist())

    def _decide(self, chances: list[float]) -> int:
        possible = [i for i, c in enumerate(chances) if c > 0]
        known = len(self.trail) < len(self.prefix)
        choice = self.prefix[len(self.trail)] if known else possible[0]
        self.open.append([] if known else possible[1:])
        self.trail.append(choice)
        self.weight *= chances[choice]
        return choice


def branches(program: Callable[[Enumerator], T]) -> Iterator[tuple[T, float]]:
    """Every outcome of a program that flips coins, with its probability."""
    todo: list[list[int]] = [[]]
    while todo:
        coins = Enumerator(todo.pop())
        result = program(coins)
        for i, others in enumerate(coins.open):
            todo += [[*coins.trail[:i], other] for other in others]
        yield result, coins.weight


def test_the_enumerator_covers_every_branch_once():
    def program(coins: Enumerator) -> tuple[int, ...]:
        if coins.coin(0.25):
            return (9,)
        first = coins.draw(torch.tensor([1.0, 0.0, 3.0]))
        return (first, coins.draw(torch.tensor([0.5, 0.5]))) if first else (first,)

    law = dict(branches(program))
    assert law == pytest.approx({(9,): 0.25, (0,): 0.1875, (2, 0): 0.28125, (2, 1): 0.28125}, abs=1e-15)


# ------------------------------------------------------------------ languages
class Language:
    """A random conditional distribution for each prefix; some tokens are impossible."""

    def __init__(self, size: int, seed: int, zeros: float = 0.3, banned: Sequence[int] = ()) -> None:
        self.size, self.seed, self.zeros, self.banned = size, seed, zeros, list(banned)
        self._known: dict[Text, np.ndarray] = {}

    def __call__(self, prefix: Text) -> np.ndarray:
        if prefix not in self._known:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            weights = rng.gamma(0.7, size=self.size) + 1e-3
            alive = rng.random(self.size) >= self.zeros
            alive[self.banned] = False
            if not alive.any():
                alive[next(i for i in range(self.size) if i not in self.banned)] = True
            weights = np.where(alive, weights, 0.0)
            self._known[prefix] = weights / weights.sum()
        return self._known[prefix]

    def row(self, prefix: Text) -> torch.Tensor:
        return torch.from_numpy(self(prefix).copy()).log()

    def continuations(self, prefix: Text, length: int) -> Iterator[tuple[Text, float]]:
        """Every text of `length` tokens that begins with `prefix`, and the chance of its rest."""
        if len(prefix) >= length:
            yield prefix[:length], 1.0
            return
        for token, p in enumerate(self(prefix).tolist()):
            if p:
                for text, rest in self.continuations((*prefix, token), length):
                    yield text, p * rest

    def law(self, length: int) -> Law:
        return dict(self.continuations((), length))


def completed(target: Language, outcomes: Iterator[tuple[list[int], float]], length: int) -> Law:
    """The law of what was emitted, continued by the target."""
    terms: dict[Text, list[float]] = defaultdict(list)
    for tokens, weight in outcomes:
        for text, rest in target.continuations(tuple(tokens), length):
            terms[text].append(weight * rest)
    return {text: math.fsum(parts) for text, parts in terms.items()}


def distance(a: Law, b: Law) -> float:
    return max(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in {*a, *b})


def target_rows(target: Language, tree: Tree) -> torch.Tensor:
    """(1+N, V) log p: root first, then after each node."""
    paths = [(), *(tuple(tree.tokens[i] for i in path(tree.parents, n)) for n in range(len(tree)))]
    return torch.stack([target.row(p) for p in paths])


# ------------------------------------------------------------------ the walk
TREES = {
    "no draft": Tree(),
    "one token": Tree([1], [-1]),
    "chain of 3": Tree.chain([0, 2, 1]),
    "chain of equal tokens": Tree.chain([2, 2, 2]),
    "two children": Tree([0, 2], [-1, -1]),
    "every child": Tree([2, 0, 1], [-1, -1, -1]),
    "two levels": Tree([0, 1, 2, 0], [-1, -1, 0, 1]),
    "bushy": Tree([1, 2, 0, 1, 1], [-1, -1, 0, 0, 2]),
    "duplicate siblings": Tree([1, 1, 2, 0], [-1, -1, 0, 1]),
    "duplicates below": Tree([0, 2, 2, 1], [-1, 0, 0, 2]),
}
Walk = Callable[[Tree, Sequence[int]], Verdict]


def walk_law(target: Language, tree: Tree, length: int, walk: Walk) -> Law:
    """All functions from rows to tokens, each with its probability under independent rows."""
    rows = target_rows(target, tree).exp().tolist()

    def outcomes() -> Iterator[tuple[list[int], float]]:
        for choices in itertools.product(range(target.size), repeat=len(rows)):
            weight = math.prod(row[c] for row, c in zip(rows, choices, strict=True))
            if weight:
                yield walk(tree, choices).tokens(tree), weight

    return completed(target, outcomes(), length)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("size", [3, 4])
def test_walk_is_exact(name: str, size: int):
    for seed in range(3):
        target = Language(size, seed)
        assert distance(walk_law(target, TREES[name], 4, verify.walk), target.law(4)) < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_walk_is_exact_on_random_trees(seed: int):
    rng = np.random.default_rng(seed)
    size, count = 3 + seed % 3, 4
    tree = Tree(rng.integers(0, size, count).tolist(), [int(rng.integers(-1, i)) for i in range(count)])
    target = Language(size, seed + 100)
    assert distance(walk_law(target, tree, count + 1, verify.walk), target.law(count + 1)) < 1e-12


def test_walk_takes_the_path_of_the_targets_tokens():
    tree = Tree([5, 6, 7, 8], [-1, -1, 1, 2])
    assert verify.walk(tree, [6, 0, 7, 8, 3]) == Verdict([1, 2, 3], 3)
    assert verify.walk(tree, [5, 9, 0, 0, 0]) == Verdict([0], 9)
    assert verify.walk(tree, [4, 0, 0, 0, 0]) == Verdict([], 4)
    assert verify.walk(Tree(), [4]) == Verdict([], 4)


def walk_with_the_parents_row(tree: Tree, choices: Sequence[int]) -> Verdict:
    """Wrong: the token behind a node comes from the row of its parent."""
    shifted = [choices[0], *(choices[p + 1] for p in tree.parents)]
    return verify.walk(tree, shifted)


def walk_that_insists_on_a_child(tree: Tree, choices: Sequence[int]) -> Verdict:
    """Wrong: where no child holds the target's token, the first child is taken."""
    below, node, accepted = children(tree.parents), -1, []
    while below.get(node):
        match = [c for c in below[node] if tree.tokens[c] == choices[node + 1]]
        node = (match or below[node])[0]
        accepted.append(node)
    return Verdict(accepted, choices[node + 1])


@pytest.mark.parametrize("wrong", [walk_with_the_parents_row, walk_that_insists_on_a_child])
def test_the_check_catches_a_wrong_walk(wrong: Walk):
    target = Language(3, 1, zeros=0.0)
    assert distance(walk_law(target, TREES["two levels"], 3, wrong), target.law(3)) > 1e-3


# ------------------------------------------------------------------ rejection
Reject = Callable[[Tree, torch.Tensor, torch.Tensor | None, verify.Coins], Verdict]
Shape = tuple[tuple[int, int], ...]  # (parent's number, how many children), parents first
CHAIN_2: Shape = ((-1, 1), (0, 1))
CHAIN_3: Shape = ((-1, 1), (0, 1), (1, 1))
PAIR: Shape = ((-1, 2),)
TRIPLE: Shape = ((-1, 3),)
TWO_BY_TWO: Shape = ((-1, 2), (0, 2), (1, 2))
THREE_LOPSIDED: Shape = ((-1, 3), (0, 2), (2, 1))


def drawn_tree(shape: Shape, logq_of: Callable[[Text], torch.Tensor], coins: Enumerator) -> tuple[Tree, torch.Tensor]:
    """Children drawn from q one after the other, without replacement; fewer where q has fewer tokens."""
    tree, rows = Tree(logq_rows=[]), []
    numbers = {-1: -1}  # the shape's number of a node -> its number in the tree, where it was drawn
    count = 0
    for parent, width in shape:
        here, count = range(count, count + width), count + width
        if parent not in numbers:
            continue
        node = numbers[parent]
        logq = logq_of(tuple(tree.tokens[i] for i in path(tree.parents, node)))
        rows.append(logq)
        q = logq.double().exp()
        for number in here:
            if float(q.sum()) <= 0:
                break
            token = coins.draw(q)
            q[token] = 0.0
            tree.tokens.append(token)
            tree.parents.append(node)
            tree.logq_rows.append(len(rows) - 1)
            numbers[number] = len(tree) - 1
    return tree, torch.stack(rows)


def reject_law(
    target: Language,
    logq_of: Callable[[Text], torch.Tensor],
    shape: Shape,
    length: int,
    reject: Reject = verify.reject,
    tell_q: bool = True,
) -> Law:
    """Draws of the draft times coins of the verdict."""

    def program(coins: Enumerator) -> list[int]:
        tree, logq = drawn_tree(shape, logq_of, coins)
        return reject(tree, target_rows(target, tree), logq if tell_q else None, coins).tokens(tree)

    return completed(target, branches(program), length)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("shape", "size"), [(CHAIN_2, 3), (CHAIN_2, 5), (CHAIN_3, 3)])
def test_chain_rejection_is_exact(shape: Shape, size: int, seed: int):
    target, drafter = Language(size, seed), Language(size, seed + 50)
    assert distance(reject_law(target, drafter.row, shape, 4), target.law(4)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("shape", "size"), [(PAIR, 3), (PAIR, 5), (TRIPLE, 4), (TRIPLE, 5), (TWO_BY_TWO, 3), (THREE_LOPSIDED, 3)]
)
def test_tree_rejection_is_exact(shape: Shape, size: int, seed: int):
    target, drafter = Language(size, seed + 10), Language(size, seed + 60)
    assert distance(reject_law(target, drafter.row, shape, 3), target.law(3)) < 1e-12


@pytest.mark.parametrize("shape", [CHAIN_2, PAIR, TRIPLE, TWO_BY_TWO])
def test_rejection_is_exact_without_zeros(shape: Shape):
    target, drafter = Language(3, 7, zeros=0.0), Language(3, 8, zeros=0.0)
    assert distance(reject_law(target, drafter.row, shape, 3), target.law(3)) < 1e-12


@pytest.mark.parametrize("shape", [CHAIN_3, PAIR, TRIPLE, TWO_BY_TWO])
def test_rejection_is_exact_when_q_is_disjoint_from_p(shape: Shape):
    target, drafter = Language(5, 3, 0.0, banned=[0, 1, 4]), Language(5, 4, 0.0, banned=[2, 3])
    assert distance(reject_law(target, drafter.row, shape, 4), target.law(4)) < 1e-12


@pytest.mark.parametrize("shape", [CHAIN_3, TRIPLE, THREE_LOPSIDED])
def test_rejection_is_exact_when_q_is_p(shape: Shape):
    target = Language(3, 5)
    assert distance(reject_law(target, target.row, shape, 4), target.law(4)) < 1e-12


def test_a_perfect_drafter_is_always_accepted():
    target = Language(4, 6)

    def program(coins: Enumerator) -> int:
        tree, logq = drawn_tree(CHAIN_3, target.row, coins)
        return len(verify.reject(tree, target_rows(target, tree), logq, coins).accepted)

    law: dict[int, float] = defaultdict(float)
    for accepted, weight in branches(program):
        law[accepted] += weight
    assert law[3] == pytest.approx(1.0, abs=1e-12)


def test_one_drafted_token_is_accepted_with_the_overlap_of_p_and_q():
    target, drafter = Language(4, 11), Language(4, 12)

    def program(coins: Enumerator) -> bool:
        tree, logq = drawn_tree(((-1, 1),), drafter.row, coins)
        return bool(verify.reject(tree, target_rows(target, tree), logq, coins).accepted)

    taken = math.fsum(weight for accepted, weight in branches(program) if accepted)
    assert taken == pytest.approx(float(np.minimum(target(()), drafter(())).sum()), abs=1e-12)


# ------------------------------------------------------------------ certain drafts
def certain_law(target: Language, tree: Tree, length: int, reject: Reject = verify.reject) -> Law:
    logp = target_rows(target, tree)
    return completed(
        target, ((v.tokens(tree), w) for v, w in branches(lambda coins: reject(tree, logp, None, coins))), length
    )


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("size", [3, 5])
def test_certain_drafts_are_exact(name: str, size: int):
    for seed in range(3):
        target = Language(size, seed + 20)
        assert distance(certain_law(target, TREES[name], 4), target.law(4)) < 1e-12


@pytest.mark.parametrize("shape", [CHAIN_2, PAIR, TWO_BY_TWO])
def test_drawn_drafts_are_exact_when_q_is_not_told(shape: Shape):
    target, drafter = Language(3, 31), Language(3, 32)
    assert distance(reject_law(target, drafter.row, shape, 3, tell_q=False), target.law(3)) < 1e-12


def test_a_tree_that_was_not_drawn_is_certain_next_to_one_that_was():
    """In one batch some requests know q and some do not: rows of others must not be used."""
    target = Language(3, 33)
    tree = Tree([1, 2], [-1, -1])
    others = Language(3, 34).row(())[None]

    def program(coins: Enumerator) -> list[int]:
        return verify.reject(tree, target_rows(target, tree), others, coins).tokens(tree)

    assert distance(completed(target, branches(program), 2), target.law(2)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_a_second_sibling_with_the_same_token_changes_nothing(seed: int):
    """A draft with q told, in which a drafter repeats a child: the repetition is passed over."""
    target, drafter = Language(4, seed + 40), Language(4, seed + 45)

    def program(coins: Enumerator) -> list[int]:
        tree, logq = drawn_tree(PAIR, drafter.row, coins)
        tree.tokens.insert(1, tree.tokens[0])
        tree.parents.append(-1)
        tree.logq_rows.append(0)
        return verify.reject(tree, target_rows(target, tree), logq, coins).tokens(tree)

    assert distance(completed(target, branches(program), 2), target.law(2)) < 1e-12


# ------------------------------------------------------------------ another vocabulary
def lifted(drafter: Language, vocab: VocabMap, to_draft: dict[int, int]) -> Callable[[Text], torch.Tensor]:
    """log q over the target's vocabulary: shared tokens only, renormalised. Unshared context falls back to token 0."""

    def logq(prefix: Text) -> torch.Tensor:
        own = torch.from_numpy(drafter(tuple(to_draft.get(t, 0) for t in prefix)).copy()).log()
        return vocab.lift(own[None]).log_softmax(-1)[0]

    return logq


@pytest.mark.parametrize("shape", [CHAIN_2, CHAIN_3, PAIR, TRIPLE, TWO_BY_TWO])
@pytest.mark.parametrize("seed", range(2))
def test_another_vocabulary_is_exact(shape: Shape, seed: int):
    """Five target tokens, six draft tokens, three shared under other numbers."""
    to_draft = {0: 4, 2: 1, 3: 5}
    shared = torch.tensor(list(to_draft)), torch.tensor(list(to_draft.values()))
    vocab = VocabMap(TOKEN, 0.6, 5, to_draft, *shared)
    target, drafter = Language(5, seed + 70), Language(6, seed + 80, zeros=0.0)
    logq = lifted(drafter, vocab, to_draft)
    assert logq(()).exp().sum() == pytest.approx(1.0, abs=1e-15)
    assert logq(())[[1, 4]].tolist() == [-math.inf, -math.inf]
    assert distance(reject_law(target, logq, shape, 3), target.law(3)) < 1e-12


@pytest.mark.parametrize("width", [3, 6])
def test_a_shorter_or_longer_table_of_the_same_vocabulary_is_exact(width: int):
    vocab = VocabMap(SAME, 1.0, 4)
    target, drafter = Language(4, 90), Language(width, 91, zeros=0.0)
    logq = lifted(drafter, vocab, {t: t for t in range(width)})
    assert logq(()).shape == (4,)
    assert distance(reject_law(target, logq, TWO_BY_TWO if width == 3 else PAIR, 3), target.law(3)) < 1e-12


# ------------------------------------------------------------------ verifiers that are wrong in one place
def broken(residual: bool = True, ratio: bool = True, renormalise: bool = True, remove: bool = True) -> Reject:
    """verify.reject written out again, with one thing left out."""

    def reject(tree: Tree, logp: torch.Tensor, logq: torch.Tensor | None, coins: verify.Coins) -> Verdict:
        assert logq is not None and tree.logq_rows is not None
        below, node, accepted = children(tree.parents), -1, []
        while True:
            p, found = logp[node + 1].exp(), None
            q = logq[tree.logq_rows[below[node][0]]].exp() if node in below else None
            for child in below.get(node, ()):
                token = tree.tokens[child]
                chance = float(p[token] / q[token]) if ratio else float(p[token])
                if coins.coin(min(1.0, chance)):
                    found = child
                    break
                if residual:
                    rest = (p - q).clamp_min(0)
                    p = rest / rest.sum() if float(rest.sum()) > 1e-9 else p
                if remove:
                    q = q.clone()
                    q[token] = 0
                    q = q / q.sum() if renormalise and float(q.sum()) > 0 else q
            if found is None:
                return Verdict(accepted, coins.draw(p))
            accepted.append(found)
            node = found

    return reject


@pytest.mark.parametrize("shape", [CHAIN_2, TRIPLE, TWO_BY_TWO])
def test_the_written_out_verifier_is_right_when_nothing_is_left_out(shape: Shape):
    target, drafter = Language(3, 1, zeros=0.0), Language(3, 2, zeros=0.0)
    assert distance(reject_law(target, drafter.row, shape, 3, broken()), target.law(3)) < 1e-12


@pytest.mark.parametrize(
    ("left_out", "shape"),
    [
        ("residual", CHAIN_2),
        ("ratio", CHAIN_2),
        ("residual", PAIR),
        ("renormalise", PAIR),
        ("remove", PAIR),
        ("ratio", TRIPLE),
    ],
)
def test_the_check_catches_a_wrong_rejection(left_out: str, shape: Shape):
    target, drafter = Language(4, 1, zeros=0.0), Language(4, 2, zeros=0.0)
    wrong = broken(**{left_out: False})
    assert distance(reject_law(target, drafter.row, shape, 3, wrong), target.law(3)) > 1e-3


def test_the_check_catches_children_drawn_otherwise_than_told():
    """Draws from another q than the one handed over must show."""
    target, drafter, told = Language(3, 1, zeros=0.0), Language(3, 2, zeros=0.0), Language(3, 9, zeros=0.0)

    def program(coins: Enumerator) -> list[int]:
        tree, _ = drawn_tree(PAIR, drafter.row, coins)
        return verify.reject(tree, target_rows(target, tree), told.row(())[None], coins).tokens(tree)

    assert distance(completed(target, branches(program), 2), target.law(2)) > 1e-3


def test_the_check_catches_certainty_that_is_not_taken_away():
    """Certain drafts without the residual: a rejected token would come back as the bonus."""

    def wrong(tree: Tree, logp: torch.Tensor, logq: torch.Tensor | None, coins: verify.Coins) -> Verdict:
        p = logp[0].exp()
        if coins.coin(float(p[tree.tokens[0]])):
            return Verdict([0], coins.draw(logp[1].exp()))
        return Verdict([], coins.draw(p))

    target = Language(3, 21, zeros=0.0)
    assert distance(certain_law(target, TREES["one token"], 2, wrong), target.law(2)) > 1e-3


# ------------------------------------------------------------------ with the engine's own coins
def test_rejection_with_the_engines_coins_has_the_targets_frequencies():
    """The enumerator stands in for `Chance`; the two agree where it counts."""
    target, drafter = Language(4, 13, zeros=0.0), Language(4, 14, zeros=0.0)
    count, seen = 4000, np.zeros(4)
    for position in range(count):
        tree, logq = drawn_tree(PAIR, drafter.row, Chance(5, position))
        verdict = verify.reject(tree, target_rows(target, tree), logq, Chance(6, position))
        seen[verdict.tokens(tree)[0]] += 1
    p = target(())
    assert np.all(np.abs(seen - count * p) < 5 * np.sqrt(count * p * (1 - p)))
