"""As much as pays, decided before anyone has seen the drafts: for devices that draft by themselves.

Such a device is given its next step before the host knows what the last one brought, so a policy cannot look at drafts, and a
step of a millisecond leaves no time to think. So there are a few *modes*, each one drafter and a size, and what is known about
them is what steps really took (`periods`) and how many tokens drafts really brought (`outcomes`). Now and then, within a share
of the time, the mode and the requests are chosen with which the engine makes most tokens per second.

A drafter that reads along has to be asked in every step, or it loses the text. So whoever it does not pay for is left alone by
it, and where it would pay again it joins, and has missed what came in between.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, cast

from headstart import sampling
from headstart.config import HEADS, SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.drafters import WEIGHTLESS
from headstart.policy import Choices, Load, Proposals, StepTimes, Wish, Wishes
from headstart.policy.explain import Explanation, Tried
from headstart.policy.fixed import FixedPolicy
from headstart.policy.outcomes import NEW, NOTHING, Guest, Outcomes, Tally
from headstart.policy.periods import Bustle, Mode, Periods, is_wild, modes_of
from headstart.policy.readings import READING, Promise, Readings
from headstart.policy.shares import Share, about, heat_of
from headstart.policy.stretches import Kind, Passed, Seen, Stretch, Watch
from headstart.policy.trials import DEAREST, HOPELESS, PROBES, Losses, Trials, drafts_of, steps_of

EVERY = 16  # steps for which a decision holds,
UNDER_WAY = 2  # and how many still run as before where it is taken while the device is at work,
SOON = 4  # and where requests are new
LOSING, LOSES = 6, 0.97  # steps with drafts, and of what plain ones bring, below which it is thought about anew;
CLEARLY, LONG, MANY = 0.9, 16, 64  # and below which, over so many steps or drafts, the way itself is doubted,
DOUBTED, FORGIVEN = 0.9, 1.02  # how much less is then thought of them, and how fast that is forgotten, in EVERY steps
BEGINNING = 3  # steps behind a decision that tell nothing about coming and going: drafts begin or end
TURNOVER = 0.02  # how fast it is forgotten how often requests come and go, by steps,
QUIETLY = 0.5  # of the steps, up to which those in which they do tell nothing about drafts;
TURNS = 0.5  # and how much longer a step with drafts then takes until that was seen, in times of what reading a prompt takes
TOGETHER, QUIET = 8, 32  # steps that are learned from at once, at most; and where nobody drafts,
PASSED = 96  # and how many are passed over then: plain steps are all alike
LATEST = 2  # times as many are learned from though the device has to wait for that
LATELY = 2  # steps behind what was taken in that a decision goes without
SOONEST = 2  # steps behind which a decision may be thought about anew
LOOK, LOOKS = 3, 8  # drafts after which it is looked at what has just begun, and how often where it is hardly known
DECIDING = 0.0015  # share of the time that decisions may take: with many requests, they are taken less often
USUAL = 2e-4  # seconds of a decision, at first,
SHOWS = 0.2  # how fast it is learned how much of them the device waits for,
HIDDEN = 0.05  # and up to which share they are taken to cost nothing,
LONGER = 1.5  # and how many times the last one it may take: what takes much longer was held up by something else
TOKENS = 256.0  # behind which an answer ends by itself, until some have been seen,
ENDS = 0.05  # and how fast that is learned, by answers
BACK = 0.5  # of what reading prompts takes counts as lost, where it was not given up though something was lost already
FILLS = 0.1  # how fast it is learned, by steps behind which somebody comes, how often prompts fill them
LEAST = 0.02  # a mode should bring so much more than none: its chances are guesses
UNTRIED = 1.11  # times worse than they should be, n-grams are taken to be that were never tried: so trials come first
SURELY = 0.2  # of the time of drafts is taken to be lost in a trial, whatever they should bring,
LIKELY = 0.8  # times what drafts should bring that they may have to, to be tried for free though something was lost,
HOPED = 1.5  # times what is thought that another shape of what drafts may bring
RARELY = 300  # steps after which another drafter is tried where one pays
AROUND = 16  # for how many requests that are not new the host needs one more step to begin and to end a trial
STAY = 1.05  # times what a draft should bring counts for those that draft so already: to begin and to end takes time
HOST_MOST = 4  # requests up to which a drafter on the host is thought about: it makes the device wait for each of them
SOLE = ("ngram", "suffix", "draft_model")  # those that need no reading along
ON_DEVICE = ("ngram", *HEADS)
WIDEST = 64  # nodes of a draft, so that more room is all the same
Members = Mapping[int, Sequence[str]]  # the numbers of requests, and the drafters that may serve them
Step = tuple[
    StepTimes, Sequence[Request], Sequence[int] | None
]  # its times, for whom, what drafts brought; None: nothing
Shape = tuple[str, bool]  # a drafter, and whether its drafts branch
Newcomer = bool  # whether a head reads its prompt
Choice = tuple[float, Mode | None, list[int]]  # tokens per second, with which mode, for which requests


class AheadPolicy:
    cuts = False

    def __init__(self, config: SpeculativeConfig, choices: Choices) -> None:
        self.fixed, self.choices, self.config = FixedPolicy(config, choices), choices, config
        self.periods, self.outcomes, self._bustle = Periods(), Outcomes(), Bustle()
        self.clock = time.perf_counter  # what tells how long decisions take
        self.ordered: Sequence[Mode] = ()  # what a rehearsal is to do,
        self.rehearses = False  # while it lasts,
        self.tally: Tally = NOTHING.copy()  # and what drafts brought in it, since something was ordered
        self.plain_steps = 0
        self.yields = Share(0.03)  # tokens that came, of those that plain steps would have brought in the same time
        self._guests: dict[str, Guest] = {}
        self._plans: dict[str, Wishes] = {}  # of those that somebody has thought about: what is wished for them
        self._gone: list[Guest] = []  # whose last drafts still tell something
        self._ways: list[Mode] = []  # all that were ever chosen: logs have their numbers
        self._told: dict[int, int] = {}  # wishes, by identity, and the number of their mode
        self._wishes: dict[Mode, Wishes] = {}
        self._modes: dict[tuple[str, ...], list[Mode]] = {}  # of these drafters,
        self._fitting: dict[tuple[tuple[str, ...], int], list[list[Mode]]] = {}  # and those that have so much room
        # somebody drafts to find out whether it pays; or has just begun to, since that seems to pay, so that the next decision
        # will not wait for saved time
        self._trying = self._began = False
        self._hardly = 0  # decisions in a row for a way that is hardly known
        self._way: Mode | None = None  # that was decided on
        self._common: Mode | None = None  # that newcomers take until it is decided for them: those that a head reads
        self._steps, self._due = 0, 0  # since the last decision, and when the next is due,
        self._undigested = 0  # and since what drafts brought was taken in
        self._asked: list[Request] = []  # the last that were asked about,
        self._answers: list[Wishes] = []  # and what was wished for them,
        self._drafts = False  # if anything was
        self._ran: Sequence[Request] = ()  # those of the last step that is over: nobody is asked while nobody drafts
        self._company = 0  # at the last decision
        self._doubts: dict[tuple[str, int], float] = {}  # times what is thought of drafters that have lost, by company
        self._stretch, self._seen, self._watch = Stretch(), Seen(), Watch()
        self._fresh = True  # the next step that is read is the first behind a decision,
        self._beginning = 0  # and how many of the next ones are still about to begin
        self._turnover = Share(TURNOVER)  # of the steps, those in which requests came or went,
        self._there: Sequence[Request] = ()  # and who was there in the last one
        self._kind: Kind | None = None  # of the last step, where that is known,
        self._period = 0.0  # and how long it took, where that is to be learned if the next is of its kind
        self._time, self._cost = 1.0, USUAL  # seconds saved up for decisions, and those that one takes
        self._load = Load(1, 0, 0)  # of the last step that was asked about
        self._decided = False  # something else is wished for, while the device was at work, and nobody has asked since
        self._aside = self._shown = 0.0  # seconds of such a decision while this step ran, and the one before,
        self._shows = 0.0  # and what share of them the device waits for, lately
        self._readings = Readings()
        self._promises: dict[tuple[Any, ...], Promise] = {}  # until more is known,
        self._gains_of: dict[tuple[Any, ...], float] = {}  # and what it brings if so many draft like this
        self._trials, self._losses = Trials(), Losses()
        self._unread: list[Step | Newcomer | Request] = []  # what is still to be learned from; requests: they are over
        self._leaving = 0  # how many of those there are
        self._passing, self._passed = 0, Passed()  # how many steps are still to be passed over, and those that were
        self._prompts = False  # the last one that was had some
        self._books: dict[str, list[int]] = {}  # for people: drafter -> steps in which it drafted, nodes
        self._heard: dict[Shape, int] = {}  # the step in which such drafts were made last,
        self._now = 0  # of so many
        self._ends = Share(ENDS, TOKENS, 1.0)  # of the tokens of answers, those that one ended at by itself,
        self._usual_tokens = TOKENS / 2  # and how many the answers of newcomers should have
        self._filled = Share(FILLS)  # of steps behind which somebody came, those without room for drafts
        self._behind: Sequence[Request] = ()  # the last of them, by its requests
        self._last = 1
        self._shares = [0.0, 0.0]  # seconds of deciding, and of all; they fade

    # ------------------------------------------------------------------ rehearsals
    def order(self, modes: Sequence[Mode]) -> None:
        """From now on each request drafts the first of these ways whose drafter may serve it."""
        self.ordered, self._due, self.tally = modes, 0, NOTHING.copy()

    def forget_periods(self) -> None:
        """Nothing is known, so nobody drafts."""
        self.periods = Periods()
        self._fitting.clear()

    def kept(self) -> dict[str, Any]:
        self._read()
        self._digest(self._guests.values())
        return {"periods": self.periods.kept(), "outcomes": self.outcomes.kept()}

    def _digest(self, guests: Iterable[Guest]) -> None:
        """What drafts for these and for those who have gone brought so far counts from now on."""
        self.outcomes.digest(itertools.chain(guests, self._gone), self._ways, self._undigested)
        self._undigested = 0
        self._gone.clear()
        self._forget()

    def _forget(self) -> None:
        """What is foretold follows from what was known."""
        self._promises.clear()
        self._gains_of.clear()

    def recall(self, kept: Mapping[str, Any]) -> None:
        self.periods, self.outcomes = Periods.recall(kept["periods"]), Outcomes.recall(kept["outcomes"])
        self._fitting.clear()

    # ------------------------------------------------------------------ who is there
    def modes(self, names: Sequence[str]) -> list[Mode]:
        """Of these drafters."""
        return modes_of(names, self.config.num_speculative_tokens, self.config.nodes)

    def _known_modes(self, names: Iterable[str]) -> list[Mode]:
        key = tuple(names)
        if key not in self._modes:
            self._modes[key] = self.modes(key)
        return [m for m in self._modes[key] if self.periods.knows(m)]

    def _guest(self, request: Request) -> Guest:
        """No drafts for whom the host chooses tokens: that takes longer than drafts save."""
        guest = self._guests.get(request.id)
        if guest is None:
            how = request.speculation.verification or self.config.verification
            welcome = sampling.can_ask(request) and (how != "rejection" or request.params.greedy)
            guest = self._guests[request.id] = Guest(heat_of(request), welcome)
            self.outcomes.came += 1
        return guest

    def _served_by(self, request: Request, guest: Guest) -> Sequence[str]:
        return self.choices(request) if guest.welcome else ()

    def enlist(self, request: Request, load: Load) -> bool:
        """Where a request like the others would be worth reading its prompt, or where the time for that was saved up."""
        if self.rehearses:
            return True
        guest = self._guest(request)
        names = self._served_by(request, guest)
        company, least = max(1, load.num_running), self._least
        promise = self._promised(names, guest.heat, company)
        if promise.new and self._drafts:  # those before may have told by now
            self._read()
            self._digest(self._guests.values())
            promise = self._promised(names, guest.heat, company)
        tokens = self._tokens_of(request.limit - len(request.prompt) if request.limit else request.params.max_tokens)
        if guest.welcome:
            self._usual_tokens += ENDS * (tokens - self._usual_tokens)
        if promise.alone < least and tokens * promise.seconds > promise.cost:
            tokens = self._usual_tokens  # it pays for all of them or for nobody
        if promise.new and not self._losses.few:
            promise = promise._replace(gain=0.0)
        if self._ran is not self._behind:
            self._behind = self._ran
            self._filled.add(1, load.room <= 0)
        tokens *= 1 - self._filled.value(before=0.0)
        read = self._readings.pays(promise, least, tokens, guest.heat, self._common is not None)
        if not read and promise.mode is not None and self._trials.may_pay([promise.mode.drafter], company):
            read = self._readings.hopes(promise.cost, self._drafts)
        if read:
            first = promise.new or (self._common is None and self._losses.few)
            self._losses.add((1.0 if first else BACK) * promise.cost / promise.seconds / company, 0)
        if self.periods.known:
            self._unread.append(read)
        return read

    def _tokens_of(self, most: int) -> float:
        """An answer that may have so many: it ends by itself at each of them as often as others did."""
        ends = self._ends.value(weight=0.0)
        return -math.expm1(-ends * most) / ends if ends else most

    def _promised(self, names: Sequence[str], heat: int, company: int) -> Promise:
        """By heads, to a request like the others."""
        like = names, heat, company
        if (promise := self._promises.get(like)) is None:
            promise = self._promises[like] = self._promise(names, heat, company)
        return promise

    def _promise(self, names: Sequence[str], heat: int, company: int) -> Promise:
        heads = self._known_modes(n for n in names if n not in SOLE)
        if not heads:
            return Promise()
        plain = self.periods.of(None, company)
        cost = max(self.periods.reading(heads[0].drafter, company), self._readings.dearer(company))
        trusted = {name: self._trusted(name, company) for name in {m.drafter for m in heads}}
        gains = [self._gains(m, heat, (1, company), company, trusted[m.drafter]) for m in heads]
        (alone, gain), best = max(zip(gains, heads, strict=True), key=lambda own: own[0][1])
        new = all(self.outcomes.is_new(m, heat) for m in heads)
        return Promise(gain, plain / company, cost, new, best, alone)

    def _gains(self, mode: Mode, heat: int, counts: Sequence[int], company: int, trusted: float) -> list[float]:
        """Times what plain steps bring, if so many of the company draft like this, and are like the others."""
        plain, brings = self.periods.of(None, company), self.outcomes.brings(mode, heat) / company
        extras, dearer = self.periods.extras(mode, counts, company), self._losses.dearer
        return [
            (1 + brings * n) * plain / (plain + dearer * extra) * trusted
            for n, extra in zip(counts, extras, strict=True)
        ]

    def _gain_of(self, mode: Mode, heat: int, count: int, company: int) -> float:
        """The same for one number, as it was told since more was heard."""
        key = mode, heat, count, company
        if (gain := self._gains_of.get(key)) is None:
            gain = self._gains(mode, heat, [count], company, self._trusted(mode.drafter, company))[0]
            self._gains_of[key] = gain
        return gain

    def _trusted(self, drafter: str, company: int) -> float:
        """Of what its drafts should bring, so much is believed: it may have lost lately, and behind drafts the device waits for
        the host where requests come and go."""
        plain, busy = self.periods.of(None, company), self._turnover.value(before=0.0)
        guess = 1 + busy * TURNS * self.periods.host(company) / plain
        return self._doubts.get((drafter, about(company)), 1.0) / self._bustle.holds_up(drafter, company, guess)

    def rests(self, request: Request) -> bool:
        mode = self._mode(request)
        return mode is None or mode.drafter in SOLE

    def _mode(self, request: Request) -> Mode | None:
        """How it drafts; a newcomer, as the others that a head has read."""
        guest = self._guest(request)
        return guest.mode if guest.decided else self._at_first(request, guest, max(1, self._last))

    def _at_first(self, request: Request, guest: Guest, company: int) -> Mode | None:
        """How a newcomer drafts until it is decided for it: as the others that a head has read; where there are none, as
        heads promise, if that pays for one alone."""
        names, common = self.choices(request), self._common
        if common is not None:
            return common if common.drafter in names else None
        if not guest.welcome or self.rehearses:
            return None
        promise = self._promised(names, guest.heat, company)
        mode = promise.mode
        if mode is None or promise.new:
            return None
        return mode if promise.alone > self._least else None

    # ------------------------------------------------------------------ whom to ask
    def ask(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Wishes]:
        if any(proposals) or not (self.periods.known or self.rehearses):
            return [{} for _ in requests]
        if not requests:
            return []
        self._load, decided, self._decided = load, self._decided, False
        if decided or self.holds():
            if requests == self._asked:
                return self._answers
            plans = self._plans
            new = [r for r in requests if r.id not in plans]
            few, many = sorted((len(requests), self._company))
            turned = many > 2 * few or 2 * len(new) > len(requests)
            if new and load.room > 0 and not (turned or self._may_decide):
                self._settle_in(new, len(requests), load)
                new = []
            if not new:
                return self._answer(requests, [plans[r.id] for r in requests])
        return self._think(requests, load)

    def _think(self, requests: Sequence[Request], load: Load) -> list[Wishes]:
        self._read()
        guests = [self._guests.get(r.id) or self._guest(r) for r in requests]
        if load.room > 0:  # else prompts fill the step: who drafts, is decided later
            self._decide(requests, guests, load)
        return self._answer(requests, [g.wishes for g in guests])

    def _answer(self, requests: Sequence[Request], wishes: list[Wishes]) -> list[Wishes]:
        self._asked, self._answers, self._drafts = list(requests), wishes, any(wishes)
        if self._drafts:
            self._passing = 0
        return wishes

    def _settle_in(self, new: Sequence[Request], company: int, load: Load) -> None:
        """Newcomers that a head has read draft as the others do, until it is decided for them, or to find out if it pays."""
        guests, most = [self._guest(r) for r in new], self.fixed.most(new, load)
        able = {i: self.choices(r) for i, r in enumerate(new) if guests[i].welcome and most[i] and load.room > 0}
        heads = {i: own for i, names in able.items() if (own := [n for n in names if n not in SOLE])}
        chosen = {i: mode for i in heads if (mode := self._at_first(new[i], guests[i], company)) is not None}
        names = {n for own in heads.values() for n in own}
        if self._common is not None and not self._is_worth(self._common, [guests[i] for i in chosen], company):
            chosen = {}
        if not chosen and self._common is None and not self._trying and self._trials.may_pay(names, company):
            self._read()
            chosen = self._trial(guests, heads, company, load)
        for i, (request, nodes) in enumerate(zip(new, most, strict=True)):
            self._set(request, chosen.get(i), nodes)
        self._due = min(self._due, self._steps + SOON)

    def _is_worth(self, mode: Mode, more: Sequence[Guest], company: int) -> bool:
        """Does it pay if these draft like this, too? It was decided on in another company, perhaps."""
        drafting = [r for r in self._asked if mode.drafter in self._plans.get(r.id, ())]
        count = min(company, len(more) + len(drafting))
        return sum([self._gain_of(mode, guest.heat, count, company) for guest in more]) > len(more)

    def _set(self, request: Request, mode: Mode | None, most: int) -> None:
        """It drafts like this, within what it may have."""
        guest = self._guests[request.id]
        mode = mode if mode is None or most >= mode.nodes else _smaller(mode, most)
        guest.mode, guest.decided = mode, True
        if mode is None:
            guest.wishes = self._plans[request.id] = {}
            return
        if mode not in self._wishes:
            self._wishes[mode] = {mode.drafter: Wish(mode.nodes, mode.depth)}
            self._told[id(self._wishes[mode])] = len(self._ways)
            self._ways.append(mode)
        guest.wishes = self._plans[request.id] = self._wishes[mode]

    def _decide(self, requests: Sequence[Request], guests: Sequence[Guest], load: Load) -> None:
        """Who drafts in the next steps, and how."""
        began, trial, second, steps = self.clock(), self._trying, self._began, self._steps
        if self._undigested > LATELY or trial or second:
            self._take_in(guests)
        self._beginning = BEGINNING
        forgiven = FORGIVEN ** (self._steps / EVERY)
        self._doubts = {like: more for like, doubt in self._doubts.items() if (more := doubt * forgiven) < 1}
        self._steps, self._due, self._company, self._trying, self._fresh = 0, EVERY, len(requests), False, True
        most = self.fixed.most(requests, load)
        able = {i: self.choices(requests[i]) for i, n in enumerate(most) if n and load.room > 0 and guests[i].welcome}
        if self.rehearses:
            ways = {i: [m for m in self.ordered if m.drafter in names] for i, names in able.items()}
            chosen = {i: own[0] for i, own in ways.items() if own}
        else:
            before, chosen = self._way, self._choose(guests, able, load)
            if self._way != before:
                self._watch = Watch()
            self._began = self._begins(before, guests, chosen, second)
            if self._began and self._due == EVERY:
                self._due = max(SOONEST, -(-LOOK // max(1, len(chosen))))
        for i, (request, nodes) in enumerate(zip(requests, most, strict=True)):
            self._set(request, chosen.get(i), nodes)
        self.outcomes.rest([guest for guest in guests if guest.mode is None], steps)
        self._cost = min(self.clock() - began, LONGER * self._cost)
        if not self.rehearses and not trial:  # which has paid for it
            self._time = max(0.0, min(self._time, 2 * self._cost) - self._cost)

    def _take_in(self, guests: Iterable[Guest]) -> None:
        """All that is known of the last steps."""
        self._learn_seen()
        self._digest(guests)

    def _begins(self, before: Mode | None, guests: Sequence[Guest], chosen: Mapping[int, Mode], second: bool) -> bool:
        """Do requests draft in a way in which they did not before? Then it is looked at soon what that brings: once, or more
        often where it is hardly known."""
        if self._way is None:
            return False
        new = any(mode == self._way and self.outcomes.is_new(mode, guests[i].heat) for i, mode in chosen.items())
        self._hardly = self._hardly + 1 if new else 0
        return 0 < self._hardly <= LOOKS or (self._way != before and not second)

    def _choose(self, guests: Sequence[Guest], members: Members, load: Load) -> dict[int, Mode]:
        """Whoever it pays for drafts the way that pays most; then those whom that drafter may not serve. And now and then
        somebody drafts in another way, to find out what that brings."""
        members = self._served(members, len(guests))
        room = load.room + load.num_prefill_tokens // len(guests)  # prompts will be over
        _, mode, drafted = self._best(guests, members, room)
        self._way, self._common = mode, mode if mode is not None and mode.drafter not in SOLE else None
        if mode is None:
            return self._trial(guests, members, len(guests), load)
        chosen = dict.fromkeys(drafted, mode)
        if others := _some({i: names for i, names in members.items() if mode.drafter not in names}, ON_DEVICE):
            _, other, more = self._best(guests, others, room)  # one that drafts on the host would make the others wait
            chosen |= dict.fromkeys(more, other) if other is not None else {}
        return chosen | self._trial(guests, members, len(guests), load, RARELY)

    @staticmethod
    def _served(members: Members, company: int) -> Members:
        """By those who may be thought about in this company."""
        return members if company <= HOST_MOST else _some(members, ON_DEVICE)

    def _trial(
        self, guests: Sequence[Guest], members: Members, company: int, load: Load, rarely: int = 0
    ) -> dict[int, Mode]:
        """Of what was heard longest ago and can pay, in its cheapest way: for newcomers, whom a head need not join; for some
        of those that it was asked least for; or for all: whichever costs least for each draft. Not of what was heard within
        `rarely` steps."""
        names = {n for own in members.values() for n in own}
        if not self._trials.may_pay(names, company, self._losses.won):
            return {}
        shapes = [modes for modes in self._shapes(names, load.room) if self._may_try(modes[0], rarely)]
        self._trials.share_out(
            {own[0].drafter: 1 if own[0].drafter in SOLE else 2 for own in shapes}
        )  # heads promise more
        for modes in sorted(shapes, key=lambda own: (self._heard.get(_shape(own[0]), -1), own[0])):
            if chosen := self._try(modes, guests, members, company):
                self._due, self._trying = self._steps + steps_of(len(chosen)), True
                self._heard[_shape(modes[0])] = self._now
                return dict.fromkeys(chosen, modes[0])
        return {}

    def _may_try(self, mode: Mode, rarely: int) -> bool:
        """Trees only beside chains of the same drafter, which are cheaper to try."""
        shape = _shape(mode)
        if mode.branches and (self._way is None or self._way.drafter != mode.drafter):
            return False
        late = self._now - self._heard.get(shape, -rarely) >= rarely
        return late and (self._way is None or shape != _shape(self._way))

    def _try(self, modes: Sequence[Mode], guests: Sequence[Guest], members: Members, company: int) -> list[int]:
        """For whom the first of these is tried; nobody, where the time has not been saved up. Where nobody drafts, or more was
        won than lost, the first drafts of a shape are tried in any case: what brings several times as much should not wait for
        hundreds of steps."""
        (own, worths), mode, plain = self._worths(guests, members, modes), modes[0], self.periods.of(None, company)
        each = sum([tokens[mode.depth - 1] for tokens in worths]) / len(own)
        own = sorted(own, key=lambda i: guests[i].known(mode.drafter))
        new = [i for i in own if not guests[i].decided and mode.drafter not in SOLE]
        gain = 1.0 if self._way is None else max(1.0, self._gain)  # times what plain steps bring, as they draft now
        turns = self._turnover.value(before=0.0) * TURNS * self.periods.host(company)

        def costs(count: int) -> float:
            brings = plain * (each - (gain - 1)) * count / company
            around = plain if count == len(new) else (1 + company / AROUND) * plain
            extra = self.periods.extra(mode, count, company) + turns
            return around + steps_of(count) * max(SURELY * extra, extra - brings)

        needs = (self.periods.extra(mode, company, company) + turns) / plain  # tokens of each draft, for all of them
        if needs > mode.depth:
            return []  # it could not pay if all of it were right
        if self._way is not None and self._way.drafter == mode.drafter and 1 + HOPED * each < gain * (1 + needs):
            return []  # nor could another shape of what drafts now, if it brought so much more than is thought
        count = min({len(new) or 1, max(1, len(own) // 8), len(own)}, key=lambda n: costs(n) / drafts_of(n))
        likely = mode.drafter not in SOLE or needs < LIKELY * each  # those that were read are there to be tried
        untried = self._losses.few or (likely and _shape(mode) not in self._heard)
        new_to_all = untried and self.outcomes.is_new(mode, guests[own[0]].heat)
        free = (self._way is None or self._losses.won) and new_to_all and needs < HOPELESS * each
        price = costs(count) + self._cost
        if not self._trials.pay(mode.drafter, price, gain, count, needs / max(each, 1e-9), free, company):
            return []
        return new if count == len(new) else own[:count]

    @property
    def _least(self) -> float:
        """Times what plain steps bring, that drafts have to."""
        return 1 + LEAST + self._losses.caution

    def _best(self, guests: Sequence[Guest], members: Members, room: int) -> Choice:
        """What makes most tokens per second, and for whom. No mode: plain steps do."""
        company = len(guests)
        plain = self.periods.of(None, company)
        found: Choice = (self._least * company / plain, None, [])
        shapes = self._shapes(set().union(*members.values()), room)
        for modes in sorted(shapes, key=lambda modes: self._way not in modes):  # few others can be better than that
            own, worths = self._worths(guests, members, modes)
            heats, trusted = {guests[i].heat for i in own}, self._trusted(modes[0].drafter, company)
            for mode in modes:
                hoped = max([self._hoped(mode, heat) for heat in heats])
                if hoped * trusted * self._at_most(mode, worths, company) <= found[0]:
                    continue
                speed, best = self._speed(mode, worths, [guests[i].mode == mode for i in own], company)
                hoped = self._hoped(mode, guests[own[best[0]]].heat)
                if 2 * len(best) <= company:  # few of many are no way to find out: that is what trials are for
                    hoped = min(1.0, hoped)
                if hoped * trusted * speed > found[0]:
                    found = hoped * trusted * speed, mode, [own[k] for k in best]
        return found

    def _hoped(self, mode: Mode, heat: int) -> float:
        """Times what is thought of it, that it is taken to bring where hardly any such drafts were seen."""
        if not self.outcomes.is_new(mode, heat):
            return 1.0
        if mode.drafter in WEIGHTLESS:
            return 1 / UNTRIED
        return NEW if self._losses.few else 1.0

    def _worths(
        self, guests: Sequence[Guest], members: Members, modes: Sequence[Mode]
    ) -> tuple[list[int], list[list[float]]]:
        """Whom the drafter of these modes may serve, and the tokens that its drafts should bring them, down to each depth."""
        own = [i for i, names in members.items() if modes[0].drafter in names]
        return own, self.outcomes.worths([guests[i] for i in own], modes[-1])

    def _shapes(self, names: Iterable[str], room: int) -> list[list[Mode]]:
        """What is known of these drafters and fits: chains of one, or its trees, the deepest last."""
        key = tuple(sorted(names)), min(room, WIDEST)
        if key not in self._fitting:
            fitting = sorted(
                (m for m in self._known_modes(key[0]) if m.nodes <= room), key=lambda m: (_shape(m), m.depth)
            )
            self._fitting[key] = [list(own) for _, own in itertools.groupby(fitting, key=_shape)]
        return self._fitting[key]

    def _at_most(self, mode: Mode, worths: Sequence[list[float]], company: int) -> float:
        """Tokens per second that this mode cannot exceed, if all were like the best and drafts for few no dearer than for all:
        it takes a fraction of the time to find out."""
        each = STAY * max([own[mode.depth - 1] for own in worths])
        plain = self.periods.of(None, company)
        seconds = plain + len(worths) * self.periods.each(mode, company)
        return max(company / plain, (company + len(worths) * each) / seconds)

    def _speed(
        self, mode: Mode, worths: Sequence[list[float]], stay: Sequence[bool], company: int
    ) -> tuple[float, list[int]]:
        """Tokens per second with this mode, and for which of these it is: those whom it brings most."""
        at, plain = mode.depth - 1, self.periods.of(None, company)
        worth = [own[at] * STAY if stays else own[at] for own, stays in zip(worths, stay, strict=True)]
        order = sorted(range(len(worth)), key=worth.__getitem__, reverse=True)
        tokens = list(itertools.accumulate(map(worth.__getitem__, order), initial=float(company)))
        counts = _counts(len(order))
        extras = self.periods.extras(mode, counts, company)
        dearer = self._losses.dearer
        speeds = [tokens[n] / (plain + dearer * extra) for n, extra in zip(counts, extras, strict=True)]
        most = max(speeds)
        return most, order[: counts[speeds.index(most)]]

    @property
    def quiet(self) -> bool:
        return not self._drafts and self.holds()

    def holds(self) -> bool:
        return not self._decided and (self._steps < self._due or not self._may_decide)

    @property
    def _may_decide(self) -> bool:
        """The time for it was saved up, or it has to be."""
        soon = (self._trying or self._began) and self._steps >= self._due
        return soon or self._time >= self._cost or self.rehearses

    def is_quiet(self, request: Request) -> bool:
        return self._mode(request) is None

    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        return self.fixed.choose(requests, proposals, load)

    # ------------------------------------------------------------------ after the step
    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        """It is put aside until something depends on it: to read some steps together takes a fraction of the time."""
        if self.rehearses:
            for verdict, nodes in zip(verdicts, times.drafted, strict=False):
                self.tally[len(verdict.accepted)] += nodes > 0
            return
        if not self.periods.known:
            return
        self._steps += 1
        self._undigested += 1
        self._ran = requests
        self._time += DECIDING * times.period
        if self._shown:
            self._charge_aside(times.late)
        self._shown, self._aside = self._aside, 0.0
        if self._passing and not self._drafts:
            self._passing -= 1
            self._passed.add(times)
            self._last = len(requests) or self._last
            return
        brought = [len(v.accepted) for v in verdicts] if times.produced > len(verdicts) else None
        self._unread.append((times, requests, brought))
        self._read_many(LATEST)

    def catch_up(self, coming: Request | None = None) -> None:
        """And what is due is decided now, which costs nothing, for those who are there. That is prepared before: the device is
        less likely to wait for it."""
        self._read_many()
        if coming is not None and self.periods.known and not self.rehearses:
            self._foresee(coming)
        if self._may_decide_aside:
            self._decide_aside()
        elif self._steps >= self._due - 1 and self._undigested > LATELY and not self._hurries:
            self._prepare()

    def _prepare(self) -> None:
        """A decision is due with the next step: what is known is taken in for it, and what drafts should bring is found out."""
        known = [(r, guest) for r in self._ran if (guest := self._guests.get(r.id)) is not None]
        guests = [guest for _, guest in known]
        self._take_in(guests)
        members = self._served({i: self.choices(r) for i, (r, guest) in enumerate(known) if guest.welcome}, len(known))
        for modes in self._shapes(set().union(*members.values()), WIDEST):
            self._worths(guests, members, modes)

    @property
    def _hurries(self) -> bool:
        """What the very last step brings may change what comes next; or nobody looks at steps."""
        return self._trying or self._began or self._passing > 0

    def _decide_aside(self) -> None:
        same, saved = self._ran == self._asked, self._time
        before = self._answers if same else [self._plans.get(r.id, {}) for r in self._ran]
        wishes = self._think(self._ran, self._load)
        self._decided = wishes != before
        if self._decided:
            self._due += UNDER_WAY
            self._beginning += UNDER_WAY
            self._trials.wait(UNDER_WAY)
        else:
            self._answers = before  # so that the step goes on repeating the last one
        self._time, self._aside = saved, self._cost

    def _foresee(self, coming: Request) -> None:
        """It waits for a place, and will be asked about when one is free: what is to be known then is found out now."""
        guest, company = self._guest(coming), max(1, self._load.num_running)
        self._promised(self._served_by(coming, guest), guest.heat, company)
        if self._common is not None:
            self._gain_of(self._common, guest.heat, company, company)

    @property
    def _may_decide_aside(self) -> bool:
        """Not twice before somebody asks, nor where somebody is about to go."""
        if self._decided or self.rehearses or not self.periods.known or self._load.room <= 0:
            return False
        paid = self._shows < HIDDEN or self._time >= self._shows * self._cost
        due = self._steps >= self._due and (paid or self._may_decide)
        return due and bool(self._ran) and all(r.finish_reason is None for r in self._ran)

    def _charge_aside(self, late: float) -> None:
        """So long at most did the device wait for it, since it waited so long for all that the policy did beside that step."""
        waited = min(self._shown, late)
        self._shows += SHOWS * (waited / self._shown - self._shows)
        self._time = max(
            self._time - waited, -self._cost
        )  # one is owed at most, or nothing is decided for hundreds of steps

    def _read_many(self, times: int = 1) -> None:
        """Where there are so many times as many as are read together."""
        if len(self._unread) >= times * (TOGETHER if self._drafts else QUIET):
            self._read()
            self._passing = 0 if self._drafts or self._trials.bill is not None else PASSED

    def _pass_over(self) -> None:
        """Steps in which nobody drafted count, but nobody looks at them."""
        passed, self._passed, self._passing = self._passed, Passed(), 0
        self._save_up(passed.seconds)
        self._losses.add(passed.deciding / self.periods.of(None, max(1, self._last)), passed.steps)
        self._turnover.add(passed.steps, passed.steps - passed.plain, passed.steps)
        self._now += passed.steps
        self.plain_steps += passed.plain
        self._seen.seconds += passed.seconds
        self._seen.deciding += passed.deciding
        self._kind, self._fresh, self._prompts, self._readings.arrival = None, True, False, None
        self._unread = [event for event in self._unread if not isinstance(event, Newcomer)]  # with their prompts

    def _read(self) -> None:
        """What happened since it was read last, in its order."""
        if self._passed.steps:
            self._pass_over()
        unread, self._unread = self._unread, []
        for likeness, events in itertools.groupby(unread, _likeness):
            if likeness:
                self._read_steps(cast(list[Step], list(events)))
                continue
            for event in events:
                if isinstance(event, Newcomer):
                    self._readings.add(event)
                elif isinstance(event, Request):
                    self._part_with(event)

    def _save_up(self, seconds: float) -> None:
        """A share of the time that is over, for what does not seem to pay."""
        self._trials.saved += self._losses.ease * PROBES * seconds
        self._readings.saved += self._losses.ease * READING * seconds

    def _read_steps(self, steps: Sequence[Step]) -> None:
        """Steps that repeat one another."""
        times, requests, _ = steps[0]
        told, company, stretch = [step[0] for step in steps], len(requests), self._stretch
        periods, plain = [t.period for t in told], self.periods.of(None, company)
        seconds = sum(periods)
        self._save_up(seconds)
        self._now += len(steps)
        if times.asked is not stretch.asked:
            stretch = self._stretch = self._begin(times, requests)
        # the first of these waited for prompts, or for the host, since somebody came or went: so would a plain one have
        changed = requests != self._there and self._turnover.value(before=0.0) < QUIETLY
        waited = self._prompts or changed
        self._attend(told, company, plain)
        if stretch.drafts:
            stretch.note([step[2] for step in steps])
            self._seen.count(stretch, [t.drafted for t in told])
        self._turnover.add(len(steps), times.num_prefill_tokens > 0 or requests != self._there, len(steps))
        self._there = requests
        before, fresh, self._kind, self._fresh = self._kind, self._fresh, None, False
        beginning, self._beginning = self._beginning, max(0, self._beginning - len(steps))
        deciding = sum([t.policy for t in told])
        if times.num_prefill_tokens or not company:
            self._losses.add(deciding / plain if company else 0.0, len(steps))
            return
        self._kind, self._last = stretch.kind, company
        produced = sum([t.produced for t in told])
        took = [min(p, DEAREST * plain) for p in periods[waited:]]
        lost = sum(took) / plain - (produced - waited * times.produced) / company
        self._losses.add(lost if stretch.drafts else deciding / plain, len(steps))
        self._seen.add(len(steps), seconds, deciding, produced, company * seconds / plain)
        self.plain_steps += 0 if stretch.drafts else len(steps)
        if self._kind is not None and (not stretch.drafts or 2 * self._kind[1] > company):
            usual = self._usual(self._kind)
            self._bustle.add(self._drafter(self._kind), company, usual, periods[beginning:])
        if self._kind is not None and stretch.drafts:
            self._compare(self._kind, told[waited:], company / plain)
        # what was before is told now: nobody came on either side of it, and to launch what is new takes the host longer
        same = self._kind == before and not fresh
        settled = [self._period, *periods[:-1]] if same else periods[1:-1]
        self._period = periods[-1] if same or len(periods) > 1 else 0.0
        if self._kind is not None and settled:
            usual = self._usual(self._kind)
            if usable := [s for s in settled if s and not is_wild(s, usual)]:
                self._seen.tell(self._kind, usable)

    def _attend(self, told: Sequence[StepTimes], company: int, plain: float) -> None:
        """To a trial whose bill is open, and to newcomers."""
        for times in told if self._trials.bill is not None or self._readings.arrival is not None else ():
            prompts = times.num_prefill_tokens > 0
            self._trials.watch(times, company, plain, prompts or self._prompts)
            self._prompts = prompts
            if self._common is None and company and not self._stretch.drafts:
                self._readings.watch(times, plain, company)
            else:
                self._readings.arrival = None
        self._prompts = told[-1].num_prefill_tokens > 0

    def _compare(self, kind: Kind, told: Sequence[StepTimes], rate: float) -> None:
        """Steps with drafts, with plain ones that bring so many tokens a second."""
        usual = self._usual(kind)
        for times in told:
            if not is_wild(times.period, usual):
                self._watch.add(kind[1], times.produced, rate * (times.period - times.policy))
        if self._watch.steps >= LOSING:
            self._look_at(self._watch, kind)

    def _look_at(self, watch: Watch, kind: Kind) -> None:
        """If the last steps with drafts brought less than plain ones would have, it is thought about at once. The drafter is
        doubted if there were many, and not where only some drafted: that they are so few may be why."""
        _, count, company = kind
        drafter = self._drafter(kind)
        if watch.gain < LOSES:
            self._due, self._began = 0, True
        if watch.steps < LONG and watch.drafts < MANY:
            return
        self._watch = Watch()
        if watch.gain < CLEARLY and 2 * count > company and drafter is not None and not self._trying:
            like = drafter, about(company)
            self._doubts[like] = DOUBTED * self._doubts.get(like, 1.0)
            self._forget()

    def _begin(self, times: StepTimes, requests: Sequence[Request]) -> Stretch:
        """A step that does not repeat the last one."""
        stretch = Stretch(times.asked, len(requests), any(times.asked), (None, 0, len(requests)))
        if stretch.drafts:
            ways = list(map(self._told.get, map(id, times.asked)))
            if None in ways and any(asked for way, asked in zip(ways, times.asked, strict=True) if way is None):
                stretch.kind = None
            if 0 in times.drafted:  # a head that gives none could not be asked
                ways = [w if n or self._is_sole(w) else None for w, n in zip(ways, times.drafted, strict=True)]
            stretch.begin(ways, [self._guests.get(r.id) for r in requests])
            if self._trying and len(stretch.counts) > 1:
                stretch.kind = None  # what it takes is told by its bill
        return stretch

    def _is_sole(self, way: int | None) -> bool:
        return way is not None and self._ways[way].drafter in SOLE

    def _usual(self, kind: Kind) -> float:
        """Seconds of such a step, as was thought at the last decision."""
        usual = self._seen.usual
        if kind not in usual:
            usual[kind] = self.periods.step(*self._named(kind))
        return usual[kind]

    def _drafter(self, kind: Kind) -> str | None:
        return None if kind[0] is None else self._ways[kind[0]].drafter

    def _named(self, kind: Kind) -> tuple[Mode | None, int, int]:
        way, count, company = kind
        return (None if way is None else self._ways[way]), count, company

    def _learn_seen(self) -> None:
        """What steps took and brought since the last time."""
        self._read()
        seen, self._seen = self._seen, Seen()
        for way, (steps, nodes) in seen.drafts.items():
            book = self._books.setdefault(self._ways[way].drafter, [0, 0])
            book[0], book[1] = book[0] + steps, book[1] + nodes
            self._heard[_shape(self._ways[way])] = self._now
        for kind, (count, seconds) in seen.told.items():
            self.periods.learn(*self._named(kind), seconds / count, int(count))
        if seen.steps:
            left = 0.99**seen.steps
            self.yields.add(seen.expected, seen.produced, seen.steps)
            self._shares = [left * self._shares[0] + seen.deciding, left * self._shares[1] + seen.seconds]

    def release(self, request: Request) -> None:
        if request.finish_reason in ("stop", "length") and not self.rehearses:
            self._ends.add(request.num_output, request.finish_reason == "stop")
        self._plans.pop(request.id, None)
        self._unread.append(request)
        self._leaving += request.id in self._guests
        if not self.periods.known or self._leaving >= len(
            self._guests
        ):  # so that it is told, too, if nobody else comes
            self._learn_seen()

    def _part_with(self, request: Request) -> None:
        if (guest := self._guests.pop(request.id, None)) is not None:
            self._leaving -= 1
            if guest.logs:
                self._gone.append(guest)

    # ------------------------------------------------------------------ why
    def plain_seconds(self, company: int, context: float = 0.0) -> float:
        return self.periods.of(None, company) if self.periods.known else 0.0

    @property
    def _gain(self) -> float:
        """Over plain decoding, as it was measured."""
        return self.yields.value(weight=0.0) if self.yields.expected else 1.0

    def explain(self) -> Explanation:
        if not self.periods.known:
            return Explanation("adaptive")
        company, (deciding, whole) = self._last, self._shares
        plain = self.periods.of(None, company)
        gain = self._gain
        return Explanation(
            policy="adaptive",
            speedup_estimate=gain,
            plain_steps=self.plain_steps,
            running=company,
            tokens_per_second=gain * company / plain,
            plain_milliseconds=1e3 * plain,
            deciding=deciding / whole if whole else 0.0,
            drafters={name: self._tried(name, company, plain) for name in self._books},
        )

    def _tried(self, name: str, company: int, plain: float) -> Tried:
        """The mode of this drafter that looks best for requests like the others."""
        steps, nodes = self._books[name]
        extras = {m: self.periods.extra(m, company, company) for m in self._known_modes([name])}
        best = max(extras, key=lambda m: self.outcomes.brings(m, 0) - extras[m] / plain)
        return Tried(
            steps, 0, nodes, None, 1e3 * extras[best] / best.nodes / company, 0.0, size=str(best),
            brings=self.outcomes.brings(best, 0), needs=extras[best] / plain,
        )  # fmt: skip


def _likeness(event: Step | Newcomer | Request) -> int:
    """The same for steps that repeat one another, and for no others that come one behind the other; 0: no step."""
    if not isinstance(event, tuple):
        return 0
    return id(event) if event[0].num_prefill_tokens else id(event[0].asked)


def _shape(mode: Mode) -> Shape:
    return mode.drafter, mode.branches


def _smaller(mode: Mode, nodes: int) -> Mode:
    """The same within what one request may have."""
    return Mode(mode.drafter, nodes, min(mode.depth, nodes))


def _some(members: Members, names: Container[str]) -> Members:
    """Those that one of these drafters may serve."""
    return {i: some for i, own in members.items() if (some := [n for n in own if n in names])}


@functools.lru_cache(256)
def _counts(most: int) -> list[int]:
    """Numbers of requests that are looked at: all small ones, some of the large."""
    return sorted({*range(1, min(most, 8) + 1), *range(8, most + 1, 8), most} - {0})
