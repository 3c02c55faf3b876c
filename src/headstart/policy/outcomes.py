"""What drafts bring: how likely their tokens are right, by drafter, and how each request differs from the others.

A drafter is two chances: that the first token of a draft is right, and that a token behind right ones is. Chains of any length,
and trees, follow from these. They are counted for all requests, usually and lately, and each request has odds of its own beside
that, which fade: texts change. Nothing but counts of accepted tokens is needed, so it works where nobody has seen the drafts.
Steps only write these counts down (`Guest.logs`); they are digested when something is to be decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headstart.policy.guests import NOTHING, SUREST, Guest, Owns, Tally
from headstart.policy.periods import Mode

FIRST = {"ngram": (0.15, 0.65), "suffix": (0.15, 0.65), "draft_model": (0.62, 0.68)}  # until some have been seen,
HEAD = (0.6, 0.65)  # and those of heads
COOL = (1.0, 0.95, 0.85, 0.7, 0.3)  # how much less likely they are, by heat, until some have been seen
WIDER = 1.35  # tries for each token that a tree is worth, where a chain has one, until both have been tried out,
NARROWEST, WIDEST = 1.0, 2.5  # and what that may be
HARDER = 0.85  # times as likely is each token right as it was when that was tried out: real texts may be harder
USUAL_FADES = 0.0005  # how fast it is forgotten what drafts bring usually, by tries of first tokens,
USUAL_PRIOR, KEPT = 6.0, 60.0  # and for how many tries the first guess counts; one that was tried out, or kept
FADES = 0.01  # how fast it is forgotten what they brought lately, by steps with drafts,
RETURNS = 0.04  # and by requests that come: these may have other texts
PRIOR = 8.0  # tries that what is usual counts for
SPEAKS = 32  # drafts of a request that speak for all: later ones are of those that it paid for
TRUST, TRUST_FADES = 10.0, 0.002  # drafts for which requests are taken to differ as they seem to; how fast that fades
TOLD = 1e-3  # tokens beyond those in general, below which somebody is taken to be like the others
MODEL, MODEL_FADES = 200.0, 0.003  # tokens for which what follows for a mode is taken as it is; how fast that fades
SLACK = 0.4  # the share of what was expected that is often missing
SURPRISE = 5.0  # tokens missing beyond that, for each that drafts are deep: texts have turned,
FORGETS = 0.15  # and that much of what was known is left
NEW = 6  # drafts of a way to draft, of which fewer tell nothing
Number = Any  # one, or an array of them


class Chances(NamedTuple):
    """That the first token of a draft is right, and that a later one is where those before it are: below 1; or arrays."""

    first: Number
    later: Number

    def tokens(self, depth: Number) -> Number:
        """That a draft brings."""
        return self.first * (1 - self.later**depth) / (1 - self.later)

    def tried(self, times: float) -> Chances:
        """Where each token is tried so many times instead of once."""
        return self if times == 1 else Chances(1 - (1 - self.first) ** times, 1 - (1 - self.later) ** times)

    def at(self, odds: Number) -> Chances:
        """Where both are so many times as likely, in odds."""
        first, later = odds * self.first, odds * self.later
        return Chances(first / (1 - self.first + first), later / (1 - self.later + later))

    def scaled(self, times: float) -> Chances:
        return Chances(times * self.first, times * self.later)


class Tries(NamedTuple):
    """Of first tokens and of later ones: how often they were tried, and right; or arrays."""

    first: Number
    first_right: Number
    later: Number
    later_right: Number

    @staticmethod
    def of(tally: Tally, depth: int) -> Tries:
        return Tries(*(float(n[0]) for n in Tries.each([tally], depth)))

    @staticmethod
    def each(tallies: Sequence[Tally], depth: int) -> Tries:
        reached = np.array(tallies)[:, ::-1].cumsum(1)[:, ::-1]  # drafts that brought so many tokens, or more
        return Tries(reached[:, 0], reached[:, 1], reached[:, 1:depth].sum(1), reached[:, 2 : depth + 1].sum(1))

    @property
    def right(self) -> Number:
        return self.first_right + self.later_right

    def chances(self, thought: Chances, prior: float) -> Chances:
        """What is thought counts for so many tries of each."""
        first = (self.first_right + prior * thought.first) / (self.first + prior)
        later = (self.later_right + prior * thought.later) / (self.later + prior)
        return Chances(min(SUREST, first), min(SUREST, later))

    def faded(self, left: float) -> Tries:
        return Tries(*(left * n for n in self))

    def plus(self, more: Tries) -> Tries:
        return Tries(*(a + b for a, b in zip(self, more, strict=True)))


NONE = Tries(0, 0, 0, 0)


@dataclass
class Record:
    """What is known of one drafter at one heat: what its drafts bring usually, and lately. Trees count as their chains."""

    thought: Chances  # at first,
    prior: float = USUAL_PRIOR  # which counts for so many tries
    usual: Tries = NONE
    lately: Tries = NONE
    came: int = 0  # requests, when that was looked at last

    @property
    def is_founded(self) -> bool:
        """Drafts were tried out, or it was kept from the last time."""
        return self.prior == KEPT

    def usually(self) -> Chances:
        return self.usual.chances(self.thought, self.prior)

    def now(self, deviations: float = 0.0) -> Chances:
        """So many deviations off what is most likely."""
        chances = self.lately.chances(self.usually(), PRIOR)
        if not deviations:
            return chances
        first = chances.first + deviations * _deviation(chances.first, self.lately.first + PRIOR)
        return Chances(min(SUREST, max(0.0, first)), chances.later)

    def add(self, tries: Tries) -> None:
        self.lately = self.lately.plus(tries)
        self.usual = self.usual.faded((1 - USUAL_FADES) ** tries.first).plus(tries)

    def fade(self, steps: int) -> None:
        """In so many steps there were drafts."""
        self.lately = self.lately.faded((1 - FADES) ** steps)

    def return_to_usual(self, came: int) -> None:
        """So many requests have come in all."""
        if came > self.came:
            self.lately = self.lately.faded((1 - RETURNS) ** (came - self.came))
            self.came = came


@dataclass
class Trust:
    """How far requests go on to differ from the others as they did: a regression of what drafts brought, beyond what they
    bring in general, on what was thought of that. Whoever picks the best of many guesses picks lucky ones, too."""

    thought: float = TRUST
    came: float = TRUST

    def add(self, thought: np.ndarray, came: np.ndarray, drafts: np.ndarray) -> None:
        """Of each that had drafts: tokens of one, beyond those in general. Where nothing was thought, nothing is told."""
        left = (1 - TRUST_FADES) ** drafts[np.abs(thought) > TOLD].sum()
        self.thought = float(left * self.thought + drafts @ (thought * thought))
        self.came = float(left * self.came + drafts @ (thought * came))

    def value(self) -> float:
        return min(1.0, max(0.0, self.came / self.thought)) if self.thought > TOLD else 1.0


class Outcomes:
    """What is known of drafts in general."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], Record] = {}
        self._widths: dict[str, float] = {}  # tries for each token that a tree is worth, by drafter
        self._tried: dict[tuple[str, bool], Chances] = {}  # out, by whether drafts branched
        self._trust: dict[str, Trust] = {}
        self._models: dict[Mode, list[float]] = {}  # tokens that were to come with a mode, and came
        self._short: dict[tuple[str, int], float] = {}  # tokens that were missing lately, by drafter and heat
        self.owns = Owns()
        self.came = 0  # requests, so far

    # ------------------------------------------------------------------ kept
    def kept(self) -> dict[str, Any]:
        """What drafts usually bring, as JSON can say it."""
        known = {key: r for key, r in self._records.items() if r.is_founded or r.usual.first >= NEW}
        chances = [{"drafter": name, "heat": heat, "chances": [*r.usually()]} for (name, heat), r in known.items()]
        return {"chances": chances, "widths": dict(self._widths)}

    @classmethod
    def recall(cls, kept: Mapping[str, Any]) -> Outcomes:
        """It is the best guess, until drafts are seen again."""
        out = cls()
        for own in kept["chances"]:
            first, later = (float(c) for c in own["chances"])
            if not (0 <= first <= 1 and 0 <= later <= 1):
                raise ValueError("no chances")
            chances = Chances(min(SUREST, first), min(SUREST, later))
            out._records[str(own["drafter"]), int(own["heat"])] = Record(chances, KEPT)
        out._widths = {str(name): min(WIDEST, max(NARROWEST, float(w))) for name, w in kept["widths"].items()}
        return out

    def expect(self, mode: Mode, tally: Tally) -> None:
        """Drafts were tried out, and so many brought 0, 1, ... tokens: others will bring about as much."""
        tries = Tries.of(tally, mode.depth)
        if tries.first < NEW:
            return
        name, chances = mode.drafter, tries.chances(Chances(0.0, tries.first_right / tries.first), 1e-6)
        self._tried[name, mode.branches] = chances
        chain, tree = (self._tried.get((name, branches)) for branches in (False, True))
        if chain is not None and tree is not None and 0 < chain.first < 1 and 0 < tree.first < 1:
            width = math.log(1 - tree.first) / math.log(1 - chain.first)
            self._widths[name] = min(WIDEST, max(NARROWEST, width))
        usual = chain if chain is not None else chances.tried(1 / self._width(mode))
        self._records[name, 0] = Record(usual.scaled(HARDER), KEPT)

    def knows(self, mode: Mode) -> bool:
        """What such drafts bring where nothing is drawn at random."""
        known = self._records.get((mode.drafter, 0))
        return known is not None and known.is_founded

    # ------------------------------------------------------------------ learning
    def digest(self, guests: Sequence[Guest], ways: Sequence[Mode], steps: int) -> None:
        """So many steps are over: read their logs."""
        for model in self._models.values():
            model[:] = ((1 - MODEL_FADES) ** steps * n for n in model)
        logs: dict[tuple[int, int], list[tuple[int, Tally]]] = {}
        for guest in guests:
            for way, tally in guest.logs.items():
                if any(tally):
                    logs.setdefault((way, guest.heat), []).append((guest.seat, tally))
        for drafter, heat in {(ways[way].drafter, heat): None for way, heat in logs}:
            self._record(drafter, heat).fade(steps)
        for (way, heat), own in logs.items():
            self._hear(ways[way], heat, np.array([seat for seat, _ in own]), [tally for _, tally in own])
            for _, tally in own:
                tally[:] = NOTHING  # steps that repeat the last one go on writing here

    def _hear(self, mode: Mode, heat: int, seats: np.ndarray, tallies: Sequence[Tally]) -> None:
        """Of drafts in this mode, for each of those who sit there."""
        record, tries = self._record(mode.drafter, heat), Tries.each(tallies, mode.depth)
        chain = record.now()
        usual = chain.tried(self._width(mode))
        general, firsts = usual.tokens(mode.depth), np.full((1, len(seats)), usual.first)
        thought = usual.at(self.owns.odds([mode.drafter], seats, firsts)[0]).tokens(mode.depth)
        trust = self._trust.setdefault(mode.drafter, Trust())
        trust.add(thought - general, tries.right / tries.first - general, tries.first)
        model = self._models.setdefault(mode, [0.0, 0.0])
        due = float((general + trust.value() * (thought - general)) @ tries.first)
        came = float(tries.right.sum())
        model[0] += due
        model[1] += came
        self._watch(mode, heat, seats, due, came)
        shares = (SPEAKS - self.owns.drafts(mode.drafter, seats)).clip(0, tries.first) / tries.first
        expected = tries.first * usual.first + tries.later * usual.later
        self.owns.add(mode.drafter, seats, tries.first, (tries.first + tries.later, expected, tries.right))
        first, first_right, later, later_right = (float(shares @ n) for n in tries)
        first_right *= chain.first / max(usual.first, 1e-9)
        later_right *= chain.later / max(usual.later, 1e-9)
        record.add(Tries(first, first_right, later, later_right))

    def _watch(self, mode: Mode, heat: int, seats: np.ndarray, expected: float, came: float) -> None:
        """Whether texts turned: much less comes, again and again. Then little that was known of them counts, and what comes now
        speaks for all."""
        short = self._short.get((mode.drafter, heat), 0.0)
        short = max(0.0, short + (1 - SLACK) * expected - came)
        if short > SURPRISE * mode.depth:
            short = 0.0
            self.owns.doubt(mode.drafter, seats, FORGETS)
            record = self._record(mode.drafter, heat)
            record.lately = record.lately.faded(FORGETS)
        self._short[mode.drafter, heat] = short

    def rest(self, guests: Sequence[Guest], steps: int) -> None:
        """They had no drafts in so many steps."""
        self.owns.rest(np.array([g.seat for g in guests], int), steps)

    # ------------------------------------------------------------------ foretelling
    def brings(self, mode: Mode, heat: int, deviations: float = 0.0) -> float:
        """Tokens of a draft for a request like the others; so many deviations off what is most likely."""
        return float(self._tokens(mode, self._usual(mode, heat, deviations)))

    def foresee(self, guests: Sequence[Guest], modes: Sequence[Mode]) -> Foreseen:
        return Foreseen(self, guests, modes)

    def usual(self, modes: Sequence[Mode], heats: Sequence[int], deviations: float = 0.0) -> Chances:
        """(modes, heats)"""
        own = [[self._usual(m, heat, deviations) for heat in heats] for m in modes]
        return Chances(*np.array(own).transpose(2, 0, 1))

    def trusts(self, modes: Sequence[Mode]) -> np.ndarray:
        """(modes, 1)"""
        return np.array([[self._trust[m.drafter].value() if m.drafter in self._trust else 0.0] for m in modes])

    def factors(self, modes: Sequence[Mode]) -> np.ndarray:
        """(modes, 1)"""
        return np.array([[self._factor(m)] for m in modes])

    def _factor(self, mode: Mode) -> float:
        """How many times the tokens that follow for it come with this mode."""
        expected, came = self._models.get(mode, (0.0, 0.0))
        return (came + MODEL) / (expected + MODEL)

    def _tokens(self, mode: Mode, chances: Chances) -> float:
        return min(float(mode.depth), self._factor(mode) * chances.tokens(mode.depth))

    def _usual(self, mode: Mode, heat: int, deviations: float = 0.0) -> Chances:
        """Of requests like the others, in this mode."""
        return self._record(mode.drafter, heat).now(deviations).tried(self._width(mode))

    def _width(self, mode: Mode) -> float:
        return self._widths.get(mode.drafter, WIDER) if mode.branches else 1.0

    def _record(self, drafter: str, heat: int) -> Record:
        """As it is by now. Where nothing was seen at such a heat, what is drawn at random is harder to foresee."""
        key = drafter, heat
        if key not in self._records:
            cold = self._records.get((drafter, 0))
            thought = cold.usually() if cold is not None else Chances(*FIRST.get(drafter, HEAD))
            self._records[key] = Record(thought.scaled(COOL[min(heat, len(COOL) - 1)]), came=self.came)
        self._records[key].return_to_usual(self.came)
        return self._records[key]


def _deviation(chance: float, tries: float) -> float:
    """Of a chance that was told by so many tries."""
    return math.sqrt(max(0.0, chance * (1 - chance)) / (tries + 1))


class Foreseen:
    """Tokens that drafts bring these guests: (modes, guests)."""

    def __init__(self, outcomes: Outcomes, guests: Sequence[Guest], modes: Sequence[Mode]) -> None:
        self.outcomes, self.modes, self.heats = outcomes, modes, sorted({g.heat for g in guests})
        self._place = np.array([self.heats.index(g.heat) for g in guests])
        self._seats, self._names = np.array([g.seat for g in guests]), [m.drafter for m in modes]
        self._depths, self._factors = np.array([[m.depth] for m in modes]), outcomes.factors(modes)
        self._trusts, self._usual = outcomes.trusts(modes), self._spread(outcomes.usual(modes, self.heats))
        self._odds = outcomes.owns.odds(self._names, self._seats, self._usual.first)

    def _spread(self, chances: Chances) -> Chances:
        return Chances(*(own[:, self._place] for own in chances))

    def likely(self) -> np.ndarray:
        return self._tokens(self._usual)

    def low(self, deviations: float) -> np.ndarray:
        """As it may be if all are so much less good than is thought."""
        return self._tokens(self._spread(self.outcomes.usual(self.modes, self.heats, -deviations)))

    def hoped(self, deviations: float) -> np.ndarray:
        """As it may be for one that is not like the others."""
        odds = self.outcomes.owns.odds(self._names, self._seats, self._usual.first, deviations)
        return np.minimum(self._depths, self._factors * self._usual.at(odds).tokens(self._depths))

    def _tokens(self, usual: Chances) -> np.ndarray:
        general = usual.tokens(self._depths)
        own = usual.at(self._odds).tokens(self._depths)
        return np.minimum(self._depths, self._factors * (general + self._trusts * (own - general)))
