"""What drafters would say about a text, wherever they are asked."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from headstart.core import Tree
from headstart.drafters import WEIGHTLESS
from headstart.traffic import Arrival, Seen, Skill, Trace

DEEPEST = 16  # levels of a synthetic draft
WRONG = 1  # the token of the first drafter that is wrong; the next ones follow, and texts begin behind them
FIRST_TOKEN = 100
WIDER = 1.4  # tries for each token that a tree is worth: so it is with trees of 15 nodes and 5 levels


class Answers:
    """What each drafter says about one text, wherever it is asked: the same question has the same answer."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.source: Arrival = trace.requests[number]
        made_up = range(FIRST_TOKEN, FIRST_TOKEN + self.source.output)
        self.text: Sequence[int] = self.source.output_ids or made_up
        self.prompt = list(self.source.prompt_ids) or [0] * self.source.prompt
        self._places = {name: [s.position for s in seen] for name, seen in self.source.seen.items()}
        self._drawn = {
            name: Drawn(skill, self.source.output, name in WEIGHTLESS, (trace.seed, number, i))
            for i, (name, skill) in enumerate(sorted(self.source.skills.items()))
        }

    def choices(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these drafters that can answer."""
        real = WEIGHTLESS if self.source.is_recorded else ()
        return tuple(n for n in names if n in real or n in self._drawn or n in self._places)

    def propose(self, name: str, position: int, depth: int, wide: bool = False) -> Tree:
        """A chain of at most `depth` tokens, `position` tokens into the answer; or the path down a tree that goes furthest."""
        if name in self._drawn:
            right, grown = self._drawn[name].chain(position, depth, wide)
        else:
            right, grown = self._remember(name, position, depth)
        wrong = WRONG + sorted((*self._drawn, *self._places)).index(name)
        grown.tokens = [self.text[position + i] if i < right else wrong for i in range(len(grown))]
        return grown

    def _remember(self, name: str, position: int, depth: int) -> tuple[int, Tree]:
        """As the recorded draft that stood nearest; where all of it was right, the one nearest to its end goes on."""
        right, known = 0, 0
        sure: list[float] = []
        while known < depth and (seen := self._nearest(name, position + known)) is not None and seen.right:
            sure += seen.confidence[: len(seen.right)]
            right, known = right + sum(seen.right), known + len(seen.right)
            if not seen.right[-1]:
                known = depth
        out = Tree.chain([0] * min(depth, known))
        if out.tokens and sure:
            out.confidence = (sure + sure[-1:] * depth)[: len(out)]
        return right, out

    def _nearest(self, name: str, position: int) -> Seen | None:
        places = self._places.get(name) or []
        at = bisect.bisect_left(places, position)
        near = [i for i in (at, at - 1) if 0 <= i < len(places)]
        return self.source.seen[name][min(near, key=lambda i: abs(places[i] - position))] if near else None


class Drawn:
    """A skill as right and wrong at every place and depth of a text."""

    def __init__(self, skill: Skill, length: int, weightless: bool, seed: tuple[int, ...]) -> None:
        rng = np.random.default_rng(seed)
        found, luck, coins = rng.random(length), rng.random((length, DEEPEST)), rng.random((length, DEEPEST))
        usual = np.empty(length)
        for start, chance in skill.right:
            usual[int(start * length) :] = chance
        if weightless:  # how good a match is, is seen before, and holds for the whole draft
            luck[:] = luck[:, :1]
        chances = np.clip(usual[:, None] + skill.spread * (2 * luck - 1), 0.0, 0.995)
        self._found = (found < skill.found).tolist()
        either = 1 - (1 - chances) ** WIDER
        self._right: list[list[int]] = [np.cumprod(coins < c, 1).sum(1).tolist() for c in (chances, either)]
        self._kinds: list[int] | None = (1 + 4 * chances[:, 0]).astype(int).tolist() if weightless else None
        self._sure = None if weightless else (chances**skill.sure).round(4)

    def chain(self, position: int, depth: int, wide: bool = False) -> tuple[int, Tree]:
        """How many are right, in a tree where it is wide, and a chain whose tokens are still to be filled in."""
        depth = min(depth, DEEPEST) if self._found[position] else 0
        out = Tree.chain([0] * depth)
        if self._kinds is not None:
            out.kinds = [self._kinds[position]] * depth
        elif self._sure is not None and depth:
            out.confidence = self._sure[position, :depth].tolist()
        return self._right[wide][position], out
