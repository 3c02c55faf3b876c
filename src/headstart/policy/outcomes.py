"""What drafts bring: how likely their tokens are right, by drafter, and how each request differs from the others.

A drafter is two chances: that the first token of a draft is right, and that a token behind right ones is. Chains of any length,
and trees, follow from these. They are counted for all requests, usually and lately, and each request has odds of its own beside
that, which fade: texts change. Nothing but counts of accepted tokens is needed, so it works where nobody has seen the drafts.
Steps only write these counts down (`Guest.logs`); they are digested when something is to be decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headstart.drafters import WEIGHTLESS
from headstart.policy import Wishes
from headstart.policy.periods import Mode

FIRST = {"ngram": (0.15, 0.65), "suffix": (0.15, 0.65), "draft_model": (0.62, 0.68)}  # until some have been seen,
HEAD = (0.6, 0.65)  # and those of heads
COOL = (1.0, 0.95, 0.85, 0.7, 0.3)  # how much less likely they are, by heat, until some have been seen
DEEPEST = 8  # tokens of a draft
SUREST = 0.98  # that a token is thought to be right
WIDER = 1.35  # tries for each token that a tree is worth, where a chain has one, until both have been tried out,
NARROWEST, WIDEST = 1.0, 2.5  # and what that may be
HARDER = 0.85  # times as likely is each token right as it was when that was tried out: real texts may be harder
USUAL_FADES = 0.0005  # how fast it is forgotten what drafts bring usually, by tries of first tokens,
USUAL_PRIOR, KEPT = 6.0, 60.0  # and for how many tries the first guess counts; one that was tried out, or kept
FADES = 0.01  # how fast it is forgotten what they brought lately, by steps with drafts,
RETURNS = 0.04  # and by requests that come: these may have other texts
PRIOR = 8.0  # tries that what is usual counts for
OWN_PRIOR, COPIES_PRIOR = 4.0, 1.5  # and that "it is like the others" does, of one request: copies are all or nothing
OWN_FADES, COPIES_FADE = 0.04, 0.12  # how fast its own past is forgotten, by drafts: what is copied ends all at once
RELIEF = 0.998  # what is left of that after a step in which it has no draft
SPEAKS = 32  # drafts of a request that speak for all: later ones are of those that it paid for
TRUST, TRUST_FADES = 10.0, 0.002  # drafts for which requests are taken to differ as they seem to; how fast that fades
MODEL, MODEL_FADES = 200.0, 0.003  # tokens for which what follows for a mode is taken as it is; how fast that fades
NEW = 6  # drafts of a way to draft, of which fewer tell nothing
Tally = list[int]  # how many drafts brought 0, 1, ... tokens
NOTHING: Tally = [0] * (DEEPEST + 1)


class Chances(NamedTuple):
    """That the first token of a draft is right, and that a later one is where those before it are."""

    first: float
    later: float

    def tokens(self, depth: int) -> float:
        """That a draft brings."""
        return self.first * (1 - self.later**depth) / (1 - self.later) if self.later < 1 else self.first * depth

    def tried(self, times: float) -> Chances:
        """Where each token is tried so many times instead of once."""
        return self if times == 1 else Chances(1 - (1 - self.first) ** times, 1 - (1 - self.later) ** times)

    def at(self, odds: float) -> Chances:
        """Where both are so many times as likely, in odds."""
        if odds == 1:
            return self
        first, later = odds * self.first, odds * self.later
        return Chances(first / (1 - self.first + first), later / (1 - self.later + later))

    def scaled(self, times: float) -> Chances:
        return Chances(times * self.first, times * self.later)


class Tries(NamedTuple):
    """Of first tokens and of later ones: how often they were tried, and right."""

    first: float
    first_right: float
    later: float
    later_right: float

    @staticmethod
    def of(tally: Tally, depth: int) -> Tries:
        drafts = sum(tally)
        reached = first_right = drafts - tally[0]
        later = later_right = 0
        for brought in tally[1:depth]:
            later += reached
            reached -= brought
            later_right += reached
        return Tries(drafts, first_right, later, later_right)

    @property
    def right(self) -> float:
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
class Own:
    """What one request is to one drafter: of so many tokens that were tried, how many should have been right, and were."""

    prior: float
    fades: float
    tried: float = 0.0
    expected: float = 0.0
    right: float = 0.0
    drafts: int = 0  # in all

    @staticmethod
    def of(drafter: str) -> Own:
        return Own(COPIES_PRIOR, COPIES_FADE) if drafter in WEIGHTLESS else Own(OWN_PRIOR, OWN_FADES)

    def odds(self, usual: float, deviations: float = 0.0) -> float:
        """Times those of the others, where their first tokens are right so often; so many deviations above what is likely."""
        if not self.tried and not deviations:
            return 1.0
        chance = min(0.995, max(0.005, self.expected / self.tried if self.tried else usual))
        seen = self.tried + self.prior
        own = (self.right + self.prior * chance) / seen
        own = min(SUREST, own + deviations * _deviation(own, seen))
        return own * (1 - chance) / ((1 - own) * chance)

    def add(self, tries: Tries, usual: Chances) -> None:
        """`usual`: as was to be expected of the others."""
        self.fade((1 - self.fades) ** tries.first)
        self.tried += tries.first + tries.later
        self.expected += tries.first * usual.first + tries.later * usual.later
        self.right += tries.right
        self.drafts += int(tries.first)

    def fade(self, left: float) -> None:
        self.tried, self.expected, self.right = left * self.tried, left * self.expected, left * self.right


@dataclass
class Trust:
    """How far requests go on to differ from the others as they did: a regression of what drafts brought, beyond what they
    bring in general, on what was thought of that. Whoever picks the best of many guesses picks lucky ones, too."""

    thought: float = TRUST
    came: float = TRUST

    def add(self, thought: float, came: float, drafts: float) -> None:
        left = (1 - TRUST_FADES) ** drafts
        self.thought = left * self.thought + drafts * thought * thought
        self.came = left * self.came + drafts * thought * came

    def value(self) -> float:
        return min(1.0, max(0.0, self.came / self.thought))


@dataclass(eq=False)
class Guest:
    """One request, as a policy knows it."""

    heat: int  # see `heat_of`
    welcome: bool  # to drafts
    owns: dict[str, Own] = field(default_factory=dict)  # by drafter
    logs: dict[int, Tally] = field(default_factory=dict)  # what drafts brought that nobody digested yet, by their way
    mode: Mode | None = None  # how it drafts now,
    wishes: Wishes = field(default_factory=dict)  # as drafters are told
    decided: bool = False  # whether anybody has thought about it

    def of(self, drafter: str) -> Own:
        if drafter not in self.owns:
            self.owns[drafter] = Own.of(drafter)
        return self.owns[drafter]

    def log(self, way: int) -> Tally:
        """Where it is written down what its drafts bring."""
        if way not in self.logs:
            self.logs[way] = NOTHING.copy()
        return self.logs[way]


class Outcomes:
    """What is known of drafts in general."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], Record] = {}
        self._widths: dict[str, float] = {}  # tries for each token that a tree is worth, by drafter
        self._tried: dict[tuple[str, bool], Chances] = {}  # out, by whether drafts branched
        self._trust: dict[str, Trust] = {}
        self._models: dict[Mode, list[float]] = {}  # tokens that were to come with a mode, and came
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
            out._records[str(own["drafter"]), int(own["heat"])] = Record(Chances(first, later), KEPT)
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
    def digest(self, guests: Iterable[Guest], ways: Sequence[Mode], steps: int) -> None:
        """So many steps are over: read their logs."""
        for model in self._models.values():
            model[:] = ((1 - MODEL_FADES) ** steps * n for n in model)
        heard: set[tuple[str, int]] = set()
        for guest in guests:
            for way, tally in guest.logs.items():
                if not any(tally):
                    continue
                key = ways[way].drafter, guest.heat
                if key not in heard:
                    self._record(*key).fade(steps)
                    heard.add(key)
                self._hear(guest, ways[way], Tries.of(tally, ways[way].depth))
                tally[:] = NOTHING  # steps that repeat the last one go on writing here

    def _hear(self, guest: Guest, mode: Mode, tries: Tries) -> None:
        """Of its drafts."""
        record, own = self._record(mode.drafter, guest.heat), guest.of(mode.drafter)
        chain = record.now()
        usual = chain.tried(self._width(mode))
        general, thought = usual.tokens(mode.depth), usual.at(own.odds(usual.first)).tokens(mode.depth)
        trust = self._trust.setdefault(mode.drafter, Trust())
        if own.tried:
            trust.add(thought - general, tries.right / tries.first - general, tries.first)
        model = self._models.setdefault(mode, [0.0, 0.0])
        model[0] += (general + trust.value() * (thought - general)) * tries.first
        model[1] += tries.right
        share = min(1.0, max(0, SPEAKS - own.drafts) / tries.first)
        own.add(tries, usual)
        if share:
            first, later = chain.first / max(usual.first, 1e-9), chain.later / max(usual.later, 1e-9)
            as_chain = Tries(tries.first, first * tries.first_right, tries.later, later * tries.later_right)
            record.add(as_chain.faded(share))

    def rest(self, guests: Iterable[Guest], steps: int) -> None:
        """They had no drafts in so many steps."""
        left = RELIEF**steps
        for guest in guests:
            for own in guest.owns.values():
                own.fade(left)

    # ------------------------------------------------------------------ foretelling
    def brings(self, mode: Mode, heat: int, deviations: float = 0.0) -> float:
        """Tokens of a draft for a request like the others; so many deviations off what is most likely."""
        return self._tokens(mode, self._usual(mode, heat, deviations))

    def worths(self, guests: Sequence[Guest], mode: Mode, deviations: float = 0.0) -> list[float]:
        """The same for each of these. Above what is likely: as it may be for one that is not like the others; below: as it may
        be if all are less good than is thought."""
        usual = {heat: self._usual(mode, heat, min(0.0, deviations)) for heat in {g.heat for g in guests}}
        general = {heat: self._tokens(mode, chances) for heat, chances in usual.items()}
        more = max(0.0, deviations)
        trust = 1.0 if more else self._trust.get(mode.drafter, Trust()).value()
        out = []
        for guest in guests:
            chances, worth, own = usual[guest.heat], general[guest.heat], guest.owns.get(mode.drafter)
            if own is None and more:
                own = guest.of(mode.drafter)
            if own is not None:
                thought = self._tokens(mode, chances.at(own.odds(chances.first, more)))
                worth += trust * (thought - worth)
            out.append(worth)
        return out

    def _tokens(self, mode: Mode, chances: Chances) -> float:
        expected, came = self._models.get(mode, (0.0, 0.0))
        return min(float(mode.depth), (came + MODEL) / (expected + MODEL) * chances.tokens(mode.depth))

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
