"""What whole drafts brought: by drafter, shape and temperature for all requests, and how each request differs from that.

Nothing but counts of accepted tokens is needed, so it works where nobody has seen the drafts. Steps only write these counts
down (`Guest.logs`); they are digested when something is to be decided.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.drafters import WEIGHTLESS
from headstart.policy import Wishes
from headstart.policy.periods import Mode

FIRST = {  # tokens by depth that a draft brings, until some have been seen
    "ngram": (0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.03),
    "suffix": (0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.03),
    "draft_model": (0.65, 0.45, 0.32, 0.23, 0.16),
    "head": (0.62, 0.4, 0.26, 0.17, 0.11),
}
COOL = (1.0, 0.95, 0.85, 0.7, 0.3)  # how much less likely the next token is right, by heat, until some have been seen
DEEPEST = 8  # tokens of a draft
SUREST = 0.98  # that a token is thought to be right,
WIDER = 1.35  # tries for each token that a tree is worth, where a chain has one, until both have been seen,
UNSEEN = 1.1  # and until one of them has been,
AT_LEAST, SOME = 1.1, 8  # and at least so many, where so many drafts of chains were seen
NARROWEST, WIDEST = 1.0, 2.5  # what that may be for a drafter,
WIDENS, MOST_WIDENS = 0.02, 0.1  # how fast it is learned, by drafts, and how far at a time,
FRESH = 20  # from drafts so many steps behind some of the other shape, at most: later, the text may have changed
PRIOR, PRIOR_SEEN = 6.0, 100  # drafts that this counts for, and after how many it hardly does any more
FADES = 0.01  # how fast what drafts brought is forgotten, by steps,
OWN_FADES = 0.04  # and of one request, by drafts,
COPIES_FADE = 0.12  # where they are copied from the text: that ends all at once
RELIEF = 0.998  # what is left of a request's own past after a step in which it has no draft: texts change
OWN_PRIOR = 6.0  # drafts that "it is like the others" counts for
COUNTED = 32  # drafts of a request that speak for all
TRUST_FADES = 0.002  # how fast it is forgotten how far requests differ as they seem to,
TRUST_PRIOR = 10.0  # and for how many drafts the first guess counts: as they seem to
NEW_TRIES = 6  # as many drafts as a trial makes:
NEW = 1.15  # a shape of which fewer were seen is taken to be so much better
WANES, LEFT = 0.01, 4.0  # how fast drafts count for less while none are seen, and for how many at least,
IDLE = 32  # steps without any that are told at once,
RETURNS = 0.04  # and how fast drafts are then taken to be as usual, by requests that have come
USUAL_FADES, USUAL_PRIOR = 0.0005, 6.0  # how fast that changes, by drafts, and for how many the first guess counts,
KEPT = 60.0  # and one that was tried out or kept from the last time
HARDER = 0.85  # times as likely is each next token right as it was when that was tried out: real texts may be harder
Tally = list[int]  # how many drafts brought 0, 1, ... tokens
NOTHING: Tally = [0] * (DEEPEST + 1)
Drafts = tuple[str, bool, int]  # of this drafter, whether they branch, and heat
Chances = dict[tuple[Mode, int], list[float]]  # by mode and heat, down to each depth


@dataclass
class Own:
    """What one request is to one drafter: by depth, how often drafts were right, of how often they are in general."""

    expected: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)
    came: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)
    counted: list[int] = field(default_factory=lambda: [0, 0])  # of them for all, by whether they branched
    left: float = 1.0  # of all that, since it was asked last
    fades: float = OWN_FADES

    def add(self, general: Sequence[float], reached: Sequence[int]) -> None:
        """So many drafts as deep as `general` brought at least 0, 1, ... tokens."""
        count = reached[0]
        left, self.left = self.left * (1 - self.fades) ** count, 1.0
        for k, chance in enumerate(general):
            self.expected[k] = left * self.expected[k] + count * chance
            self.came[k] = left * self.came[k] + reached[k + 1]

    def fade(self, steps: int) -> None:
        """It was not asked for so long."""
        self.left = max(1e-6, RELIEF**steps * self.left)

    def worths(self, general: Sequence[float], trust: float = 1.0) -> list[float]:
        """Tokens that a draft for this request should bring, down to depth 1, 2, ... Where nothing is known of one, drafts are
        as likely right as one level above. `trust` is how much of what sets it apart from the others is believed."""
        out, total, times, prior = [], 0.0, 1.0, OWN_PRIOR / self.left
        for chance, expected, came in zip(general, self.expected, self.came, strict=False):
            if expected > 0.0:
                before = prior * chance
                times = 1 + trust * ((came + before) / (expected + before) - 1)
            total += chance * times if chance * times < 1 else 1.0
            out.append(total)
        return out

    def for_all(self, wide: bool, count: int) -> float:
        """The share of so many more drafts that speak for all requests. The first ones of each do: later ones are of those that
        it paid for."""
        room = max(0, COUNTED - self.counted[wide])
        self.counted[wide] += count
        return min(1.0, room / count)


@dataclass
class Trust:
    """How far requests go on to differ from the others as they did: a regression of what drafts brought, beyond what they
    bring in general, on what was thought of that. Whoever picks the best of many guesses picks lucky ones, too."""

    thought: float = TRUST_PRIOR
    came: float = TRUST_PRIOR

    def add(self, thought: float, came: float, count: int) -> None:
        left = (1 - TRUST_FADES) ** count
        self.thought = left * self.thought + count * thought * thought
        self.came = left * self.came + count * thought * came

    def value(self) -> float:
        return min(1.0, max(0.0, self.came / self.thought))


@dataclass
class Usual:
    """How often drafts are right over many texts, to depth 1, 2, ..."""

    first: Sequence[float] = ()  # as was thought at first,
    prior: float = USUAL_PRIOR  # which counts for so many drafts
    tried: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)
    right: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)

    def add(self, reached: Sequence[float]) -> None:
        left = (1 - USUAL_FADES) ** reached[0]
        for k, (tried, right) in enumerate(itertools.pairwise(reached)):
            self.tried[k] = left * self.tried[k] + tried
            self.right[k] = left * self.right[k] + right

    def by_depth(self) -> list[float]:
        return _chances(self.tried, self.right, self.first, self.prior)

    @property
    def is_founded(self) -> bool:
        """Drafts were tried out, or it was kept from the last time."""
        return self.prior == KEPT


@dataclass
class Survival:
    """How often drafts that were right so far were right at depth 1, 2, ...: sums that fade with every step. Only drafts that
    went so deep tell about a depth."""

    before: Sequence[float]  # how often they are right to each depth, as was thought
    seen: int = 0  # drafts, of which not all speak for others
    heard: int = 0  # after how many steps some were seen last,
    aged: int = 0  # and until when it is told that there were none,
    came: int = 0  # and how many requests had come by then
    tried: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)
    right: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)
    usual: Usual = field(default_factory=Usual)

    def __post_init__(self) -> None:
        self.usual.first = self.usual.first or self.before

    @property
    def tries(self) -> float:
        return self.tried[0]

    def fade(self, steps: int) -> None:
        left = (1 - FADES) ** steps
        self.tried, self.right = [left * x for x in self.tried], [left * x for x in self.right]

    def wane(self, steps: int, requests: int = 0) -> None:
        """None was seen in these steps, in which so many requests have come. What is thought is given up sooner, and goes back
        to what is usual: these may be other texts."""
        left = min(1.0, max((1 - WANES) ** steps, LEFT / max(LEFT, self.tries)))
        own = self.by_depth(len(self.before))
        if requests:
            back = 1 - (1 - RETURNS) ** requests
            own = [a + back * (b - a) for a, b in zip(own, self.usual.by_depth(), strict=False)]
        self._think(own)
        self.tried, self.right = [left * x for x in self.tried], [left * x for x in self.right]

    def follow(self, chances: Sequence[float], drafts: float) -> None:
        """Other drafts, so many, tell that it should be like this by now."""
        share = drafts / (drafts + self.tries)
        own = self.by_depth(len(self.before))
        self._think([a + share * (b - a) for a, b in zip(own, chances, strict=False)])

    def _think(self, chances: list[float]) -> None:
        """So it is, as surely as before."""
        self.before = chances
        for k, (above, chance) in enumerate(itertools.pairwise([1.0, *chances])):
            self.right[k] = self.tried[k] * chance / max(above, 1e-9)

    def age(self, now: int, drafts: int, came: int = 0) -> None:
        """There are new ones, in so many of the last steps; so many requests have come in all."""
        if (idle := now - drafts - self.aged) > 0:
            self.wane(idle)
        self.fade(drafts)
        self.heard, self.aged, self.came = now, now, came

    def wait(self, now: int, came: int) -> bool:
        """There are none. Was that so for long enough to think differently?"""
        idle = now - self.aged
        if idle < IDLE or not self.seen:
            return False
        self.wane(idle, came - self.came)
        self.aged, self.came = now, came
        return True

    def add(self, reached: Sequence[float]) -> None:
        """So many drafts were right for at least 0, 1, ... tokens."""
        for k, (tried, right) in enumerate(itertools.pairwise(reached)):
            self.tried[k] += tried
            self.right[k] += right
        self.usual.add(reached)

    def by_depth(self, depth: int) -> list[float]:
        return _chances(self.tried, self.right, self.before[:depth], PRIOR * max(0.2, 1 - self.seen / PRIOR_SEEN))


@dataclass(eq=False)
class Guest:
    """One request, as a policy knows it."""

    heat: int  # see `heat_of`
    welcome: bool  # to drafts
    owns: dict[str, Own] = field(default_factory=dict)  # by drafter
    # what drafts brought that nobody digested yet, by their way
    logs: defaultdict[int, Tally] = field(default_factory=lambda: defaultdict(NOTHING.copy))
    mode: Mode | None = None  # how it drafts now,
    wishes: Wishes = field(default_factory=dict)  # as drafters are told
    decided: bool = False  # whether anybody has thought about it

    def of(self, drafter: str) -> Own:
        own = self.owns.get(drafter)
        if own is None:
            own = self.owns[drafter] = Own(fades=COPIES_FADE if drafter in WEIGHTLESS else OWN_FADES)
        return own

    def known(self, drafter: str) -> float:
        """How much was seen of its drafts for this request, lately."""
        own = self.owns.get(drafter)
        return own.left * own.expected[0] if own is not None else 0.0


class Outcomes:
    """What is known of drafts in general."""

    def __init__(self) -> None:
        self._survival: dict[Drafts, Survival] = {}
        self._widths: dict[str, float] = {}  # tries for each token that a tree is worth, by drafter
        self._general: defaultdict[str, Chances] = defaultdict(dict)  # what follows from it, until more is heard,
        self._guessed: set[Drafts] = set()  # those that others were asked about, until more is heard
        self._worths: defaultdict[Mode, dict[Guest, list[float]]] = defaultdict(dict)  # and what drafts should bring
        self._steps = 0
        self.came = 0  # requests, so far
        self._trust: dict[str, Trust] = {}  # by drafter

    def kept(self) -> list[dict[str, Any]]:
        """What drafts bring, as JSON can say it."""
        return [
            {"drafter": name, "tree": wide, "heat": heat, "seen": known.seen, "chances": known.usual.by_depth()}
            for (name, wide, heat), known in self._survival.items()
            if known.seen >= NEW_TRIES or known.usual.is_founded
        ]

    @classmethod
    def recall(cls, kept: Iterable[Mapping[str, Any]]) -> Outcomes:
        """It is the best guess, until drafts are seen again."""
        out = cls()
        for own in kept:
            name, chances = str(own["drafter"]), [float(c) for c in own["chances"]]
            falls = all(0 <= c <= above for above, c in zip([1.0, *chances], chances, strict=False))
            if not falls or len(chances) != len(_first(name)):
                raise ValueError("no chances")
            out._begin((name, bool(own["tree"]), int(own["heat"])), chances, int(own["seen"]))
        return out

    def _begin(self, drafts: Drafts, chances: Sequence[float], seen: int) -> None:
        """The best guess, until drafts are seen."""
        known = self._survival[drafts] = Survival(chances, seen=min(seen, PRIOR_SEEN), usual=Usual(chances, KEPT))
        known.add([LEFT * c for c in (1.0, *chances)])
        name, _, heat = drafts
        chain, trees = (self._survival.get((name, wide, heat)) for wide in (False, True))
        if not heat and chain is not None and trees is not None and 0 < chain.before[0] < 1 and trees.before[0] < 1:
            width = math.log(1 - trees.before[0]) / math.log(1 - chain.before[0])
            self._widths[name] = min(WIDEST, max(NARROWEST, width))

    def knows(self, mode: Mode) -> bool:
        """What such drafts bring where nothing is drawn at random."""
        known = self._survival.get((mode.drafter, mode.branches, 0))
        return known is not None and known.usual.is_founded

    def expect(self, mode: Mode, tally: Tally) -> None:
        """Drafts were tried out, and so many brought 0, 1, ... tokens: others will bring about as much."""
        reached = _reached(tally, mode.depth)
        if reached[0] < NEW_TRIES:
            return
        chances = _cooler([n / reached[0] for n in reached[1:]], HARDER)
        each = chances[-1] / max(chances[-2], 1e-9) if len(chances) > 1 else chances[-1]  # deeper, as the last one
        while len(chances) < len(_first(mode.drafter)):
            chances.append(each * chances[-1])
        self._begin((mode.drafter, mode.branches, 0), chances[: len(_first(mode.drafter))], 0)

    def digest(self, guests: Iterable[Guest], ways: Sequence[Mode], steps: int) -> None:
        """So many steps are over: read their logs."""
        self._steps += steps
        self._worths.clear()
        logs: dict[tuple[int, int], list[Guest]] = {}  # those that have some, by way and heat
        for guest in guests:
            for way, tally in guest.logs.items():
                if any(tally):
                    logs.setdefault((way, guest.heat), []).append(guest)
        heard: dict[Drafts, float] = {}  # and how many of them speak for all
        for (way, heat), own in logs.items():
            known, mode = self._of(ways[way], heat), ways[way]
            reached, drafts = [_reached(g.logs[way], mode.depth) for g in own], (mode.drafter, mode.branches, heat)
            if drafts not in heard:
                known.age(self._steps, max(r[0] for r in reached), self.came)
            heard[drafts] = heard.get(drafts, 0.0) + self._hear(known, mode, own, reached)
            for guest in own:
                guest.logs[way][:] = NOTHING  # steps that repeat the last one go on writing here
        for drafts, count in heard.items():
            if count and _other(drafts) not in heard:
                self._tell_other(drafts, count)
        missed = {drafts[0] for drafts, known in self._survival.items() if known.wait(self._steps, self.came)}
        told = missed | {ways[way].drafter for way, _ in logs}
        for drafter in told.union(WEIGHTLESS) if told.intersection(WEIGHTLESS) else told:
            self._general[drafter].clear()
            self._guessed = {key for key in self._guessed if key[0] != drafter}

    def _hear(self, known: Survival, mode: Mode, guests: Sequence[Guest], reached: Sequence[Sequence[int]]) -> float:
        """Of drafts of one mode for requests of one heat, so many brought at least 0, 1, ... tokens. Returns how many of them
        speak for all."""
        general, trust = self.general(mode, guests[0].heat), self._trust.setdefault(mode.drafter, Trust())
        usual, for_all = sum(general), [0.0] * (mode.depth + 1)
        for guest, brought in zip(guests, reached, strict=True):
            own, count = guest.of(mode.drafter), brought[0]
            if own.expected[0] > 0.0:
                trust.add(own.worths(general)[-1] - usual, sum(brought) / count - 1 - usual, count)
            own.add(general, brought)
            if share := own.for_all(mode.branches, count):
                for_all = [x + share * n for x, n in zip(for_all, brought, strict=True)]
            known.seen += count
        if for_all[0]:
            self._compare((mode.drafter, mode.branches, guests[0].heat), for_all)
        known.add(for_all)
        return for_all[0]

    def _compare(self, drafts: Drafts, brought: Sequence[float]) -> None:
        """Drafts of one shape, with what those of the other let expect that were seen lately: it tells what trees are worth."""
        other, width = self._survival.get(_other(drafts)), self._width(drafts[0])
        if other is None or other.tries < SOME or self._steps - other.heard > FRESH:
            return
        count, branches = brought[0], drafts[1]
        thought = sum(_tried(other.by_depth(len(brought) - 1), width if branches else 1 / width))
        more = min(1.0, max(-1.0, (sum(brought[1:]) / count - thought) / max(thought, 0.2)))
        moves = min(MOST_WIDENS, 1 - (1 - WIDENS) ** count)
        times = math.exp(moves * (more if branches else -more))
        self._widths[drafts[0]] = min(WIDEST, max(NARROWEST, width * times))

    def _tell_other(self, drafts: Drafts, count: float) -> None:
        """What drafts of one shape bring tells what those of the other would, of which none were seen."""
        known, other, width = self._survival[drafts], self._survival.get(_other(drafts)), self._width(drafts[0])
        if other is not None and other.tries and known.tries >= SOME:
            other.follow(_tried(known.by_depth(DEEPEST), 1 / width if drafts[1] else width), count)

    def _width(self, drafter: str) -> float:
        return self._widths.get(drafter, WIDER)

    def general(self, mode: Mode, heat: int) -> list[float]:
        """The chance that such a draft is right to depth 1, 2, ..."""
        found = self._general[mode.drafter].get((mode, heat))
        if found is None:
            known = self._of(mode, heat)
            found = known.by_depth(mode.depth)
            chain = self._survival.get((mode.drafter, False, heat))
            if mode.branches and chain is not None and chain.tries >= SOME:  # a tree has the chain in it
                times = AT_LEAST if known.tries < SOME else 1.0
                least = _tried(chain.by_depth(mode.depth), times)
                found = [max(own, other) for own, other in zip(found, least, strict=True)]
            self._general[mode.drafter][mode, heat] = found
        return found

    def brings(self, mode: Mode, heat: int) -> float:
        """Tokens of a draft, in general."""
        return sum(self.general(mode, heat))

    def worths(self, guests: Sequence[Guest], mode: Mode) -> list[list[float]]:
        """Tokens that a draft for each of these requests should bring, down to each depth."""
        known = self._worths[mode]
        if new := [guest for guest in guests if guest not in known]:
            known.update(zip(new, self._weigh(new, mode), strict=True))
        return [known[guest] for guest in guests]

    def _weigh(self, guests: Sequence[Guest], mode: Mode) -> list[list[float]]:
        drafter, trust, out = mode.drafter, self.trust(mode.drafter), []
        general = {heat: self.general(mode, heat) for heat in {guest.heat for guest in guests}}
        sums = {heat: list(itertools.accumulate(chances)) for heat, chances in general.items()}
        for guest in guests:
            own = guest.owns.get(drafter)
            out.append(sums[guest.heat] if own is None else own.worths(general[guest.heat], trust))
        return out

    def rest(self, guests: Iterable[Guest], steps: int) -> None:
        """They had no drafts in so many steps."""
        for guest in guests:
            for own in guest.owns.values():
                own.fade(steps)
        self._worths.clear()

    def trust(self, drafter: str) -> float:
        """How much of what sets a request apart is believed."""
        known = self._trust.get(drafter)
        return known.value() if known is not None else 1.0

    def is_new(self, mode: Mode, heat: int) -> bool:
        known = self._survival.get((mode.drafter, mode.branches, heat))
        return known is None or known.seen < NEW_TRIES

    def _of(self, mode: Mode, heat: int) -> Survival:
        """Where such drafts were hardly ever seen, what they bring usually is the best guess, or others of the same drafter."""
        key = mode.drafter, mode.branches, heat
        known = self._survival.get(key)
        if known is None:
            known = self._survival[key] = Survival(())
        if known.tries < 1 and key not in self._guessed:
            if known.usual.is_founded:
                known.before = known.usual.by_depth()
            else:
                known.before = known.usual.first = self._guess(*key)
            self._guessed.add(key)
        return known

    def _guess(self, name: str, wide: bool, heat: int) -> list[float]:
        width, cool = self._width(name), COOL[min(heat, len(COOL) - 1)]
        other = width if wide else 1 / width
        near = [((name, not wide, heat), other, 1.0), ((name, wide, 0), 1.0, cool)]
        near += [((n, wide, heat), 1.0, 1.0) for n in WEIGHTLESS if name in WEIGHTLESS]  # all copy from the text
        for key, times, each in near:
            known = self._survival.get(key)
            if known is not None and known.tries >= 1:
                return _cooler(_tried(known.by_depth(DEEPEST), times), each)
        return _cooler(_tried(_first(name), UNSEEN if wide else 1.0), cool)


def _first(drafter: str) -> Sequence[float]:
    """What its drafts bring, until some have been seen."""
    return FIRST.get(drafter, FIRST["head"])


def _chances(tried: Sequence[float], right: Sequence[float], thought: Sequence[float], prior: float) -> list[float]:
    """To be right to depth 1, 2, ..., where what is thought counts for so many tries at each. Where one token is likelier than
    was thought, so is the next, as far as it was not tried itself."""
    out, so_far, above, times = [], 1.0, 1.0, 1.0
    for n, came, chance in zip(tried, right, thought, strict=False):
        each = min(SUREST, chance / above)
        now = (came + prior * times * each / (1 + (times - 1) * each)) / (n + prior)
        so_far *= now
        out.append(so_far)
        above = max(chance, 1e-9)
        if each > 0.0 and 0.0 < now < 1.0:
            times = now * (1 - each) / (each * (1 - now))
    return out


def _other(drafts: Drafts) -> Drafts:
    """The same drafter's chains instead of trees, or trees instead of chains."""
    name, branches, heat = drafts
    return name, not branches, heat


def _tried(chances: Sequence[float], times: float) -> list[float]:
    """The chances down to each depth, where each token is tried so many times instead of once."""
    out, so_far = [], 1.0
    for above, chance in zip([1.0, *chances], chances, strict=False):
        so_far *= 1 - (1 - min(SUREST, chance / max(above, 1e-9))) ** times
        out.append(so_far)
    return out


def _cooler(chances: Sequence[float], each: float) -> list[float]:
    """Where each token is right so much less often."""
    return [each ** (k + 1) * chance for k, chance in enumerate(chances)]


def _reached(tally: Tally, depth: int) -> list[int]:
    """How many brought at least 0, 1, ... tokens, down to this depth."""
    return list(itertools.accumulate(tally[depth::-1]))[::-1]
