"""As much as pays, decided before anyone has seen the drafts: for devices that draft by themselves.

Such a device is given its next step before the host knows what the last one brought, so a policy cannot look at drafts, and a
step of a millisecond leaves no time to think. So there are a few *modes*, each one drafter and a size, and what is known about
them is what steps really took (`periods`) and how many tokens drafts really brought, in general and, as a factor, for each
request. The mode and the requests with which the engine makes most tokens per second are chosen every few steps.

A drafter that reads along has to be asked in every step: it loses a text for which it is not. So whoever it does not pay for is
*dismissed*, and goes on with what needs no reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headstart import sampling
from headstart.config import HEADS, SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.policy import Choices, Load, Proposals, StepTimes, Wish, Wishes
from headstart.policy.explain import Explanation, Tried
from headstart.policy.fixed import FixedPolicy
from headstart.policy.periods import Mode, Periods, modes_of
from headstart.policy.shares import Share

EVERY = 16  # steps for which a decision holds, unless requests come or go
TRIES = 4  # drafts of a request before it is dismissed
LEAST = 0.02  # a mode should bring so much more than none: its chances are guesses
PROBES = 0.005  # share of the time that trying what does not seem to pay may take,
SAVED = 3  # and for how many trials it is saved up
PROBE_STEPS = 3  # that a trial takes
FIRST = {  # tokens by depth that a draft brings, until some have been seen
    "ngram": (0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.03),
    "suffix": (0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.03),
    "draft_model": (0.65, 0.45, 0.32, 0.23, 0.16),
    "head": (0.62, 0.4, 0.26, 0.17, 0.11),
}
DEEPEST = 8  # tokens of a draft
NEW, NEW_TRIES = 1.15, 20  # how much better a shape is taken to be of which so few drafts were seen,
OLD, OLD_STEPS = 1.05, 300  # and one of which none was seen for so many steps
WIDER = 1.25  # times as many for a tree as for a chain of its depth, until both have been seen
PRIOR = 6.0  # drafts that this counts for
FADES, OWN_FADES = (
    0.02,
    0.12,
)  # how fast what drafts brought is forgotten, by steps for all and by drafts for one request
RELIEF = 0.9  # what is left of a request's own past after a decision that gives it no draft: texts change
HOPES, HOPE = 12, 1.15  # drafts until which a request is given the benefit of the doubt, and how much
COUNTED = 8  # drafts of a request that speak for all
OWN_PRIOR, OWN_TRIES = (
    3.0,
    16,
)  # drafts that the thought "it is like the others" counts for, and for how many hardly any more


@dataclass
class Own:
    """What one request is to one drafter: by depth, how often drafts were right, of how often they are in general."""

    expected: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)
    came: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)
    tries: int = 0
    counted: dict[bool, int] = field(
        default_factory=lambda: {False: 0, True: 0}
    )  # of them for all, by whether they branched

    def add(self, general: Sequence[float], accepted: int) -> None:
        """One draft, as deep as `general`."""
        self.tries += 1
        expected, came = self.expected, self.came
        for k, chance in enumerate(general):
            expected[k] += chance - OWN_FADES * expected[k]
            came[k] += (accepted > k) - OWN_FADES * came[k]

    def fade(self) -> None:
        """It was not asked for a while."""
        self.expected = [RELIEF * x for x in self.expected]
        self.came = [RELIEF * x for x in self.came]

    def worth(self, general: Sequence[float]) -> float:
        """Tokens of a draft as deep as `general`; while little is known, with some hope. Where nothing is known of a depth, it
        is as one level above."""
        out, factor = 0.0, 1.0
        prior = OWN_PRIOR * max(0.15, 1 - self.tries / OWN_TRIES)
        for k, chance in enumerate(general):
            if self.expected[k] > 0.0:
                factor = (self.came[k] + prior * chance) / (self.expected[k] + prior * chance)
            out += min(1.0, factor * chance)
        return out * (HOPE if self.tries < HOPES else 1.0)

    def counts(self, wide: bool) -> bool:
        """Does this draft speak for all requests? The first ones of each do: later ones are of those that it paid for."""
        self.counted[wide] += 1
        return self.counted[wide] <= COUNTED


@dataclass
class Survival:
    """How often drafts were right to depth 1, 2, ...: sums that fade with every step."""

    before: Sequence[float]
    tries: float = 0.0
    seen: int = 0  # drafts, of which not all speak for others
    age: int = 0  # steps since the last of them
    reached: list[float] = field(default_factory=lambda: [0.0] * DEEPEST)

    def add(self, accepted: Sequence[int]) -> None:
        """One step's drafts brought so many tokens."""
        self.tries = (1 - FADES) * self.tries + len(accepted)
        self.reached = [(1 - FADES) * r + sum(count > k for count in accepted) for k, r in enumerate(self.reached)]

    def by_depth(self, depth: int) -> list[float]:
        return [(r + PRIOR * b) / (self.tries + PRIOR) for r, b in zip(self.reached, self.before[:depth], strict=False)]


class AheadPolicy:
    cuts = False

    def __init__(self, config: SpeculativeConfig, choices: Choices) -> None:
        self.fixed, self.choices, self.config = FixedPolicy(config, choices), choices, config
        self.periods = Periods()
        self.ordered: Mode | None = None  # what a rehearsal is to do,
        self.rehearses = False  # while it lasts
        self.plain_steps = 0
        self.yields = Share(0.03)  # tokens that came, of those that plain steps would have brought in the same time
        self._survival: dict[tuple[str, bool, int], Survival] = {}  # by drafter, whether it branches, and temperature
        self._generals: dict[tuple[Mode, int], list[float]] = {}  # what is taken from that, until the next decision
        self._own: dict[tuple[str, str], Own] = {}  # by request and drafter
        self._dismissed: set[str] = set()
        self._decided: list[str] = []  # the requests that the decision is about
        self._modes: dict[str, Mode] = {}  # of those that draft
        self._wishes: dict[str, Wishes] = {}
        self._steps_left = 0
        self._purse = 0.0
        self._asked: dict[str, int] = {}  # for people: steps in which a drafter drafted,
        self._verified: dict[str, int] = {}  # and nodes
        self._last = 1
        self._shares = [0.0, 0.0]  # seconds of deciding, and of all; they fade

    def order(self, mode: Mode | None) -> None:
        """Of a rehearsal: all draft this way from now on."""
        self.ordered, self._steps_left = mode, 0

    def forget_periods(self) -> None:
        """Nothing is known, so nobody drafts."""
        self.periods = Periods()

    # ------------------------------------------------------------------ what is there
    def modes(self, names: Sequence[str]) -> list[Mode]:
        """Of these drafters."""
        return modes_of(names, self.config.num_speculative_tokens, self.config.nodes)

    def _names(self, request: Request) -> Sequence[str]:
        """Who may serve it: nobody where the host chooses its tokens, since that takes longer than drafts save."""
        how = request.speculation.verification or self.config.verification
        if not sampling.can_ask(request) or (how == "rejection" and not request.params.greedy):
            return ()
        return self.choices(request)

    # ------------------------------------------------------------------ what drafts bring
    def _brings(self, mode: Mode, heat: int) -> float:
        """Tokens of a draft, in general."""
        return sum(self._general(mode, heat))

    def _general(self, mode: Mode, heat: int) -> list[float]:
        """The chance that such a draft is right to depth 1, 2, ..., as it was when it was decided."""
        if (mode, heat) not in self._generals:
            self._generals[mode, heat] = self._survival_of(mode, heat).by_depth(mode.depth)
        return self._generals[mode, heat]

    def _survival_of(self, mode: Mode, heat: int) -> Survival:
        """Where such drafts were never seen, others of the same drafter are the best guess."""
        wide, name = mode.nodes > mode.depth, mode.drafter
        known = self._survival.get((name, wide, heat))
        if known is not None and known.tries >= 1:
            return known
        near = next((s for s in self._near(name, wide, heat) if s.tries >= 1), None)
        if near is not None:
            times = 1.0 if near is self._survival.get((name, wide, 0)) else WIDER if wide else 1 / WIDER
            before = [min(0.98, times * chance) for chance in near.by_depth(DEEPEST)]
        else:
            times = (WIDER if wide else 1.0) * 0.8 ** min(heat, 2)
            before = [times * chance for chance in FIRST.get(name, FIRST["head"])]
        if known is None:
            known = self._survival[name, wide, heat] = Survival(before)
        known.before = before
        return known

    def _near(self, name: str, wide: bool, heat: int) -> list[Survival]:
        keys = ((name, not wide, heat), (name, wide, 0))
        return [self._survival[key] for key in keys if key in self._survival]

    def _worth(self, request: Request, mode: Mode) -> float:
        """Tokens that a draft for this request should bring."""
        own, heat = self._own.get((request.id, mode.drafter)), _heat(request)
        return self._brings(mode, heat) if own is None else own.worth(self._general(mode, heat))

    # ------------------------------------------------------------------ reading along
    def enlist(self, request: Request, load: Load) -> bool:
        """Where a request like the others would be worth it now; and now and then, where time for it has been saved up."""
        heads = self.modes([n for n in self._names(request) if n not in SOLE])
        if self.rehearses:
            return True
        heads = [m for m in heads if self.periods.knows(m)]
        if not heads:
            return False
        company = max(1, load.num_running)
        plain = self.periods.of(None, company)
        for mode in heads:
            gain = 1 + self._worth(request, mode)
            if gain * plain > (1 + LEAST) * self.periods.of(mode, company):
                return True
        cost = (TRIES + 1) * min(self.periods.extra(m, 1, company) for m in heads)
        return self._pays(cost)

    def _pays(self, cost: float) -> bool:
        """Is there so much in the purse? Then it is spent."""
        self._purse = min(self._purse, SAVED * cost)
        if self._purse < cost or not cost:
            return False
        self._purse -= cost
        return True

    def dismisses(self, request: Request) -> bool:
        return request.id in self._dismissed

    # ------------------------------------------------------------------ whom to ask
    def ask(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Wishes]:
        if any(proposals) or not (self.periods.known or self.rehearses):
            return [{} for _ in requests]
        ids = [r.id for r in requests]
        if self._steps_left <= 0 or ids != self._decided:
            self._decide(requests, load)
            self._decided = ids
        return [self._wishes.get(id) or {} for id in ids]

    def _decide(self, requests: Sequence[Request], load: Load) -> None:
        """Who drafts in the next steps, and how."""
        self._steps_left, self._modes, self._generals = EVERY, {}, {}
        most = self.fixed.most(requests, load)
        able = [i for i, n in enumerate(most) if n and load.room > 0]
        if self.rehearses:
            if self.ordered is not None:
                self._modes = {
                    requests[i].id: self.ordered for i in able if self.ordered.drafter in self._names(requests[i])
                }
        else:
            names = {i: self._names(requests[i]) for i in able}
            readers = {i: [n for n in names[i] if n not in SOLE] for i in able}
            self._choose_readers(requests, {i: n for i, n in readers.items() if n}, load)
            others = {i: own for i in able if not readers[i] and (own := [x for x in names[i] if x in SOLE])}
            self._choose_others(requests, others, load)
        self._wishes = {}
        for request, nodes in zip(requests, most, strict=True):
            mode = self._modes.get(request.id)
            if mode is not None:
                self._wishes[request.id] = {mode.drafter: Wish(min(mode.nodes, nodes), mode.depth)}
            else:
                for name in self.choices(request):
                    if (request.id, name) in self._own:
                        self._own[request.id, name].fade()

    def _choose_readers(self, requests: Sequence[Request], names: dict[int, list[str]], load: Load) -> None:
        """Those that a head reads draft with it or are dismissed."""
        best = self._best(requests, names, load)
        drafted, new = set(best[2]), False
        fallback = self._cheapest(names, load)
        for i, own in names.items():
            request = requests[i]
            mode = best[1] or fallback
            tried = max((self._own[request.id, n].tries for n in own if (request.id, n) in self._own), default=0)
            if mode is not None and (i in drafted or tried < TRIES):
                self._modes[request.id] = mode
                new = new or tried < TRIES
            else:
                self._dismissed.add(request.id)
        if new:  # soon more is known
            self._steps_left = TRIES

    def _choose_others(self, requests: Sequence[Request], names: dict[int, list[str]], load: Load) -> None:
        """The others draft where that pays, or to find out whether it does."""
        if self._modes:  # one that drafts on the host would make those wait that draft on the device
            names = {i: own for i, n in names.items() if (own := [x for x in n if x in ON_DEVICE])}
        _, mode, members = self._best(requests, names, load)
        if mode is None and (mode := self._cheapest(names, load)) is not None:
            members = self._trial(requests, mode, [i for i, own in names.items() if mode.drafter in own])
        for i in members:
            assert mode is not None
            self._modes[requests[i].id] = mode

    def _trial(self, requests: Sequence[Request], mode: Mode, members: list[int]) -> list[int]:
        """Those that have waited longest for it, where the time has been saved up."""
        count = max(1, len(members) // 8)
        if not members or not self._pays(PROBE_STEPS * self.periods.extra(mode, count, len(requests))):
            return []
        self._steps_left = PROBE_STEPS
        owns = [(self._own.setdefault((requests[i].id, mode.drafter), Own()), i) for i in members]
        return [i for own, i in sorted(owns, key=lambda o: o[0].expected[0])[:count]]

    def _best(
        self, requests: Sequence[Request], names: dict[int, list[str]], load: Load
    ) -> tuple[float, Mode | None, list[int]]:
        """Tokens per second in the mode that makes most of them, and the requests that draft in it. No mode: plain steps do."""
        company, rows = len(requests), load.room
        plain = self.periods.of(None, company)
        found: tuple[float, Mode | None, list[int]] = ((1 + LEAST) * company / plain, None, [])
        for mode in self._known_modes(names):
            members = [i for i, own in names.items() if mode.drafter in own]
            if mode.nodes > rows:
                continue
            curious = self._curiosity(mode, requests[members[0]])
            worth = np.array([self._worth(requests[i], mode) for i in members])
            order = np.argsort(-worth, kind="stable")
            tokens = company + worth[order].cumsum()
            counts = _counts(len(members))
            speed = [curious * tokens[n - 1] / (plain + self.periods.extra(mode, n, company)) for n in counts]
            best = int(np.argmax(speed))
            if speed[best] > found[0]:
                found = speed[best], mode, [members[k] for k in order[: counts[best]]]
        return found

    def _curiosity(self, mode: Mode, request: Request) -> float:
        """Shapes of which few drafts were seen, or none for long, are taken for better than they are thought to be."""
        known = self._survival.get((mode.drafter, mode.nodes > mode.depth, _heat(request)))
        if known is None or known.seen < NEW_TRIES:
            return NEW
        return OLD if known.age > OLD_STEPS else 1.0

    def _known_modes(self, names: dict[int, list[str]]) -> list[Mode]:
        return [m for m in self.modes(sorted({n for own in names.values() for n in own})) if self.periods.knows(m)]

    def _cheapest(self, names: dict[int, list[str]], load: Load) -> Mode | None:
        """To be tried where none pays."""
        modes = [m for m in self._known_modes(names) if m.nodes <= load.room]
        return min(modes, key=lambda m: self.periods.extra(m, 1, 1), default=None)

    def is_quiet(self, request: Request) -> bool:
        return request.id not in self._modes

    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        return self.fixed.choose(requests, proposals, load)

    # ------------------------------------------------------------------ after the step
    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        if self.rehearses or not self.periods.known:
            return
        self._steps_left -= 1
        self._purse += PROBES * times.period
        for known in self._survival.values():
            known.age += 1
        mode, count = self._hear(times, requests, verdicts)
        if times.num_prefill_tokens or not requests:
            return
        self.periods.learn(mode, count, len(requests), times.period)
        self.plain_steps += not count
        self._last = len(requests)
        plain = self.periods.of(None, len(requests))
        self.yields.add(len(requests) * times.period / plain, times.produced)
        self._shares = [0.99 * a + b for a, b in zip(self._shares, (times.policy, times.period), strict=True)]

    def _hear(
        self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]
    ) -> tuple[Mode | None, int]:
        """What drafts brought, by mode and request. Returns the mode that most were drafted in, and for how many."""
        groups: dict[tuple[Mode, int], list[int]] = {}
        counts: dict[Mode, int] = {}
        for request, verdict, asked, size in zip(requests, verdicts, times.asked, times.drafted, strict=True):
            for name, wish in asked.items():
                if not wish.nodes or (not size and name not in SOLE):
                    continue  # it could not be asked
                mode = Mode(name, wish.nodes, wish.depth)
                counts[mode] = counts.get(mode, 0) + 1
                heat = _heat(request)
                own = self._own.setdefault((request.id, name), Own())
                own.add(self._general(mode, heat), len(verdict.accepted))
                known = self._survival_of(mode, heat)
                known.seen, known.age = known.seen + 1, 0
                if own.counts(mode.nodes > mode.depth):
                    groups.setdefault((mode, heat), []).append(len(verdict.accepted))
                self._verified[name] = self._verified.get(name, 0) + size
        for (mode, heat), got in groups.items():
            self._survival_of(mode, heat).add(got)
        for name in {mode.drafter for mode in counts}:
            self._asked[name] = self._asked.get(name, 0) + 1
        measured = {m: n for m, n in counts.items() if self.periods.knows(m)}
        most = max(measured, key=lambda m: measured[m], default=None)
        return most, measured[most] if most is not None else 0

    def release(self, request: Request) -> None:
        self._dismissed.discard(request.id)
        for key in [k for k in self._own if k[0] == request.id]:
            del self._own[key]

    # ------------------------------------------------------------------ why
    def plain_seconds(self, company: int, context: float = 0.0) -> float:
        return self.periods.of(None, company) if self.periods.known else 0.0

    def explain(self) -> Explanation:
        if not self.periods.known:
            return Explanation("adaptive")
        company = self._last
        plain = self.periods.of(None, company)
        gain = self.yields.value(weight=0.0) if self.yields.expected else 1.0
        deciding, whole = self._shares
        return Explanation(
            policy="adaptive",
            speedup_estimate=gain,
            plain_steps=self.plain_steps,
            running=company,
            tokens_per_second=gain * company / plain,
            plain_milliseconds=1e3 * plain,
            deciding=deciding / whole if whole else 0.0,
            drafters={name: self._tried(name, company, plain) for name in self._asked},
        )

    def _tried(self, name: str, company: int, plain: float) -> Tried:
        """The mode of this drafter that looks best for one more request like the others."""
        modes = [m for m in self.modes([name]) if self.periods.knows(m)]
        net = [(self._brings(m, 0) - self.periods.extra(m, company, company) / plain, m) for m in modes]
        _, best = max(net, key=lambda x: x[0])
        extra = self.periods.extra(best, company, company)
        return Tried(
            self._asked[name], 0, self._verified.get(name, 0), None, 1e3 * extra / best.nodes / company, 0.0,
            brings=self._brings(best, 0), needs=extra / plain, size=str(best),
        )  # fmt: skip


SOLE = ("ngram", "suffix", "draft_model")  # those that need no reading along
ON_DEVICE = ("ngram", *HEADS)


def _heat(request: Request) -> int:
    """Requests of about the same temperature: what is drawn at random is harder to foresee."""
    return 0 if request.params.greedy else 1 + int(min(2.0, request.params.temperature) * 2)


def _counts(most: int) -> list[int]:
    """Numbers of requests that are looked at: all small ones, some of the large."""
    return sorted({*range(1, min(most, 8) + 1), *range(8, most + 1, 8), most} - {0})
