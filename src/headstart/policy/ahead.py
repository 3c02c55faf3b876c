"""As much as pays, decided before anyone has seen the drafts: for devices that draft by themselves.

Such a device is given its next step before the host knows what the last one brought, so a policy cannot look at drafts, and
a step of a millisecond leaves no time to think. So there are a few *modes*, each one drafter and a size, and what is known
about them is what steps really took (`periods`) and how many tokens drafts really brought (`outcomes`). Every now and then,
while the device is at work, the mode and the requests are chosen with which the engine makes most tokens per second; and
sometimes, as far as the purse allows (`purse`), those with which it might.

A drafter that reads along has to be asked in every step, or it loses the text. So whoever it does not pay for is left alone by
it, and where it would pay again it joins, and has missed what came in between.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from headstart import sampling
from headstart.config import HEADS, SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.policy import Choices, Load, Proposals, StepTimes, Wish, Wishes
from headstart.policy.explain import Explanation, Tried
from headstart.policy.fixed import FixedPolicy
from headstart.policy.guests import NOTHING, Guest, Tally
from headstart.policy.outcomes import Outcomes
from headstart.policy.periods import Mode, Periods, is_wild, modes_of
from headstart.policy.purse import Purse
from headstart.policy.shares import Share, heat_of

EVERY, LONGEST = 16, 32  # steps for which a decision holds, at most; and one to wait until the purse bears something
UNDER_WAY = 2  # how many still run as before, since it is taken while the device is at work,
PATIENCE, HASTE = 32, 4  # steps for which what is due may wait for such a time; and where something is tried, or loses
LEARNS, PRIOR = 0.4, 8  # it holds until so much more is known of these drafts, where so many are known beforehand,
ENOUGH = 0.7  # or until so many plain steps are lost
LOW = 2.0  # deviations below what is likely, that drafts may turn out to be
FAR = 1.25  # times as many, or as few, as when it was decided: it is decided anew
STAY = 1.03  # times what a draft should bring counts for those that draft so already: to begin and to end takes time
BETTER = 1.01  # times as fast has to be what is tried, if it is as good as hoped
TRIED, TRIAL = 6, 3  # drafts that tell enough of a trial, and steps it takes at most; a head joins in the first
VAIN = 0.2  # of the time of drafts is taken to be lost in a trial, whatever they should bring
DEAREST = 3.0  # plain steps that one step may count for
FEW = 2  # steps that are read together, where somebody drafts,
MANY = 8  # and where nobody does
VAINLY, SOME = 24, 6  # prompts that are read in hope while no head drafts for such, and of how many one is read then
WIDEST = 64  # nodes of a draft, so that more room is all the same
HOST_MOST = 4  # requests up to which a drafter on the host is thought about: it makes the device wait for each of them
SOLE = ("ngram", "suffix", "draft_model")  # those that need no reading along
ON_DEVICE = ("ngram", *HEADS)
Able = Mapping[int, tuple[str, ...]]  # the numbers of requests, and the drafters that may serve them
Kind = tuple[Mode | None, int, int]  # of a step: how requests draft, how many of them, and of how many


class Way(NamedTuple):
    """How a company may go on."""

    speed: float  # tokens per second
    mode: Mode
    who: list[int]
    row: int  # of the mode, in an outlook


@dataclass(frozen=True)
class Plan:
    """What was decided."""

    chosen: Mapping[int, Mode]  # who drafts
    way: Mode | None = None  # the mode that pays, if one does: others of `chosen` are tried
    speed: float = 0.0  # tokens per second with it
    risk: float = 0.0  # plain steps that it may lose
    due: int = EVERY  # steps until the next decision,
    patience: int = PATIENCE  # and for how many that may wait for a time when the device is at work
    saves: bool = False  # something should pay, but the purse does not bear it yet


class Outlook:
    """What drafts may bring a company: by modes, and requests."""

    def __init__(self, outcomes: Outcomes, guests: Sequence[Guest], able: Able, modes: Sequence[Mode]) -> None:
        self.guests, self.modes = guests, modes
        self._foreseen = outcomes.foresee(guests, modes)
        names = [able.get(i, ()) for i in range(len(guests))]
        columns = {own: [m.drafter in own for m in modes] for own in set(names)}
        rows = {mode: k for k, mode in enumerate(modes)}
        drafting = np.array([rows.get(g.mode, -1) if g.mode is not None else -1 for g in guests])
        self.may = np.array([columns[own] for own in names]).T
        self.stays = np.arange(len(modes))[:, None] == drafting

    @functools.cached_property
    def likely(self) -> np.ndarray:
        return self._foreseen.likely()

    @functools.cached_property
    def low(self) -> np.ndarray:
        return self._foreseen.low(LOW)

    def hoped(self, deviations: float) -> np.ndarray:
        return self._foreseen.hoped(deviations)


@dataclass
class Stretch:
    """A step, and those that repeat it."""

    asked: Sequence[Wishes] | None = None
    kind: Kind | None = None  # None: some of them draft in another way, or a head could not be asked
    tallies: list[Tally] = field(default_factory=list)  # where it is written down what drafts bring, for each request
    modes: list[Mode | None] = field(default_factory=list)
    takes: float = 0.0  # plain steps that it should take longer
    behind: bool = False  # drafts have just ended
    last: float = 0.0  # seconds of its last step, if that is to be learned from when another one follows


class AheadPolicy:
    cuts = False

    def __init__(self, config: SpeculativeConfig, choices: Choices) -> None:
        self.fixed, self.choices, self.config = FixedPolicy(config, choices), choices, config
        self.periods, self.outcomes, self.purse = Periods(), Outcomes(), Purse()
        self.ordered: Sequence[Mode] = ()  # what a rehearsal is to do,
        self.rehearses = False  # while it lasts,
        self.tally: Tally = NOTHING.copy()  # and what drafts brought in it, since something was ordered
        self.plain_steps, self.decisions = 0, 0
        self.yields = Share(0.03)  # tokens that came, of those that plain steps would have brought in the same time
        self._guests: dict[str, Guest] = {}
        self._gone: list[Guest] = []  # whose last drafts may still tell something: they keep their seats until then
        self._ways: list[Mode] = []  # all that were ever chosen: logs have their numbers,
        self._numbers: dict[int, int] = {}  # by the identity of wishes,
        self._wishes: dict[Mode, Wishes] = {}  # which are the same for all who draft alike
        self._modes: dict[tuple[str, ...], list[Mode]] = {}  # of these drafters
        self._promising: dict[tuple[Any, ...], int] = {}  # heads, since more was heard
        self._in_vain: dict[int, int] = {}  # prompts that were read in hope since a head drafted, by heat
        self._way: Mode | None = None  # that was decided on
        self._steps, self._due, self._patience = 0, 0, PATIENCE  # since the last decision, and when the next is due
        self._undigested = 0  # steps since what drafts brought was taken in
        self._lost = 0.0  # plain steps, since the last decision,
        self._thinking: Iterator[None] | None = None  # a decision that is not taken yet
        self._company = 0  # at the last decision
        self._asked: Sequence[Request] = ()  # the last that were asked about,
        self._answers: list[Wishes] = []  # and what was wished for them,
        self._drafts = False  # if anything was
        self._decided = False  # something else is wished for, and nobody has asked since
        self._load = Load(1, 0, 0)  # of the last step that was asked about,
        self._room = WIDEST  # and of the last one that had room
        self._ran: Sequence[Request] = ()  # those of the last step that is over
        self._last = 1  # how many these were
        self._unread: list[tuple[StepTimes, Sequence[Request], Sequence[int] | None] | Request] = []  # requests: over
        self._stretch = Stretch()
        self._wild = False  # the last step with drafts took so long that it tells nothing
        self._prompts = False  # the last step had some: the next one waits for them
        self._told: dict[Kind, list[float]] = {}  # steps and seconds that were not learned yet
        self._books: dict[str, list[int]] = {}  # for people: drafter -> steps in which it drafted, nodes
        self._shares = [0.0, 0.0]  # seconds of deciding, and of all; they fade

    # ------------------------------------------------------------------ rehearsals
    def order(self, modes: Sequence[Mode]) -> None:
        """From now on each request drafts the first of these ways whose drafter may serve it."""
        self.ordered, self._due, self.tally = modes, 0, NOTHING.copy()

    def forget_periods(self) -> None:
        """Nothing is known, so nobody drafts."""
        self.periods = Periods()

    def kept(self) -> dict[str, Any]:
        self._digest()
        return {"periods": self.periods.kept(), "outcomes": self.outcomes.kept()}

    def recall(self, kept: Mapping[str, Any]) -> None:
        self.periods, self.outcomes = Periods.recall(kept["periods"]), Outcomes.recall(kept["outcomes"])

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
            guest = self._guests[request.id] = Guest(heat_of(request), welcome, self.outcomes.owns.sit())
            self.outcomes.came += 1
        return guest

    def enlist(self, request: Request, load: Load) -> bool:
        """Where a head may pay in such a company, if it is as good as it may be: prompts are read while they are computed,
        which takes next to nothing."""
        if self.rehearses:
            return True
        guest, names = self._guest(request), self.choices(request)
        like = names, guest.heat, max(1, load.num_running)
        if like not in self._promising:
            self._promising[like] = self._promise(*like) if self.periods.known else 0
        if not guest.welcome or not self._promising[like]:
            return False
        if self._promising[like] > 1:
            return True
        read = self._in_vain[guest.heat] = self._in_vain.get(guest.heat, 0) + 1
        return read <= VAINLY or read % SOME == 0

    def _promise(self, names: Sequence[str], heat: int, company: int) -> int:
        """2: a head should pay there; 1: it may, if it is as good as it may be."""
        heads = self._known_modes(n for n in names if n not in SOLE)
        takes = {m: self._takes(m, company, company) for m in heads}
        hopes = 0.0, max(1.0, self.purse.hope)
        return sum(any(self.outcomes.brings(m, heat, hope) > takes[m] for m in heads) for hope in hopes)

    def rests(self, request: Request) -> bool:
        mode = self._mode(request)
        return mode is None or mode.drafter in SOLE

    def is_quiet(self, request: Request) -> bool:
        return self._mode(request) is None

    def _mode(self, request: Request) -> Mode | None:
        """How it drafts; a newcomer that a head reads, as the others."""
        guest = self._guest(request)
        if guest.decided:
            return guest.mode
        way = self._way
        return way if way is not None and way.drafter not in SOLE and way.drafter in self.choices(request) else None

    # ------------------------------------------------------------------ whom to ask
    def ask(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Wishes]:
        if any(proposals) or not (self.periods.known or self.rehearses):
            return [{} for _ in requests]
        if not requests:
            return []
        self._load, decided = load, self._decided
        if self._is_overdue or (self.rehearses and requests != self._asked):
            self._finish(requests)
        elif requests == self._asked and not decided:
            return self._answers
        self._settle_in(requests, load)
        self._decided = False
        self._asked, self._answers = list(requests), [self._guest(r).wishes for r in requests]
        self._drafts = any(self._answers)
        return self._answers

    def _finish(self, requests: Sequence[Request]) -> None:
        """There was no time for it while the device was at work."""
        for _ in self._thinking or self._think(requests):
            pass
        self._thinking = None

    def _settle_in(self, requests: Sequence[Request], load: Load) -> None:
        """Newcomers draft as the others do, where that pays for one more, until it is decided for them."""
        new = [r for r in requests if not self._guest(r).decided]
        few, many = sorted((len(requests), self._company))
        if FAR * few < many:
            self._due = min(self._due, self._steps)
        if not new or load.room <= 0:
            return
        way, company = self._way, len(requests)
        count = sum([self._guest(r).mode == way for r in requests]) if way is not None else 0
        for request, nodes in zip(new, self.fixed.most(new, load), strict=True):
            guest = self._guest(request)
            joins = way is not None and guest.welcome and nodes > 0 and way.drafter in self.choices(request)
            if joins and way is not None and self._pays_for_one_more(way, guest.heat, count, company):
                self._set(guest, way, nodes)
                count += 1
            else:
                self._set(guest, None, nodes)

    def _pays_for_one_more(self, mode: Mode, heat: int, count: int, company: int) -> bool:
        before, with_it = self.periods.extras(mode, [max(1, count), count + 1], company)
        before = before if count else 0.0
        takes = company * (with_it - before)
        return self.outcomes.brings(mode, heat) * (self.periods.of(None, company) + with_it) > takes

    def _set(self, guest: Guest, mode: Mode | None, most: int) -> None:
        """It drafts like this, within what it may have."""
        guest.decided, guest.mode = True, mode
        if mode is None:
            guest.wishes = {}
            return
        if most < mode.nodes:
            guest.mode = mode = Mode(mode.drafter, most, min(mode.depth, most))
        if mode not in self._wishes:
            self._wishes[mode] = {mode.drafter: Wish(mode.nodes, mode.depth)}
            self._numbers[id(self._wishes[mode])] = len(self._ways)
            self._ways.append(mode)
        guest.wishes = self._wishes[mode]

    # ------------------------------------------------------------------ deciding
    def _think(self, requests: Sequence[Request]) -> Iterator[None]:
        """Who drafts in the next steps, and how; in pieces, none of which takes long."""
        load = self._load
        self._digest()
        if load.room <= 0 and not self.rehearses:  # prompts fill the step: who drafts, is decided later
            self._due = max(self._due, self._steps - self._patience + HASTE)
            return
        guests = [self._guest(r) for r in requests]  # while they are all there
        yield
        most = self.fixed.most(requests, load)
        able = {i: tuple(self.choices(r)) for i, r in enumerate(requests) if most[i] and guests[i].welcome}
        if self.rehearses:
            ways = {i: [m for m in self.ordered if m.drafter in names] for i, names in able.items()}
            plan = Plan({i: own[0] for i, own in ways.items() if own})
        else:
            room = load.room + load.num_prefill_tokens // len(requests)  # as it will be when prompts are over
            plan = yield from self._choose(guests, able, room)
        yield
        self.decisions += 1
        self.outcomes.rest([guest for i, guest in enumerate(guests) if i not in plan.chosen], self._steps)
        self._way, self._due, self._patience = plan.way, plan.due, plan.patience
        self._steps, self._lost, self._company = 0, 0.0, len(requests)
        before = [guest.wishes for guest in guests]
        for i, guest in enumerate(guests):
            self._set(guest, plan.chosen.get(i), most[i])
        self._decided = before != [guest.wishes for guest in guests]

    def _choose(self, guests: Sequence[Guest], able: Able, room: int) -> Generator[None, None, Plan]:
        """What makes most tokens per second, if it is not too much of a bet. And what might make more, if that can be found
        out: then it is tried, for as many as the purse allows, beside the others."""
        company = len(guests)
        modes = self._known_modes(sorted({name for names in able.values() for name in names}))
        modes = [m for m in modes if m.nodes <= min(room, WIDEST) and (company <= HOST_MOST or m.drafter in ON_DEVICE)]
        if not modes:
            return Plan({})
        outlook, plain = Outlook(self.outcomes, guests, able, modes), company / self.periods.of(None, company)
        yield
        worths = np.where(outlook.stays, STAY, 1.0) * outlook.likely
        yield
        ways = self._ways_to(outlook, worths, self.purse.least * plain)
        yield
        plan = self._best(outlook, ways)
        if plan.saves or not self.purse.hope:
            return plan
        yield
        worths = outlook.hoped(self.purse.hope)
        yield
        least = BETTER * max(plan.speed, self.purse.least * plain)
        waits = float(LONGEST)
        for way in self._ways_to(outlook, worths, least):
            if plan.way is not None and way.mode.drafter == plan.way.drafter:
                continue
            tried, wait = self._buy(way, outlook, max(1.0, plan.speed / plain), plan.risk)
            if tried:
                chosen = {**plan.chosen, **dict.fromkeys(tried, way.mode)}
                return replace(plan, chosen=chosen, due=steps_of(len(tried)), patience=HASTE)
            waits = min(waits, wait)
        return plan if plan.chosen else replace(plan, due=max(EVERY, int(waits)))

    def _best(self, outlook: Outlook, ways: Sequence[Way]) -> Plan:
        """The fastest that the purse bears. It holds until clearly more is known of these drafts."""
        company, waits = len(outlook.guests), float(LONGEST)
        for way in ways:
            seats = np.array([outlook.guests[i].seat for i in way.who])
            known = PRIOR + self.outcomes.owns.drafts(way.mode.drafter, seats).sum()
            holds = max(2, min(EVERY, int(LEARNS * known / len(way.who))))
            low = float(outlook.low[way.row, way.who].sum())
            steps = holds if way.mode == self._way else holds + UNDER_WAY
            risk = max(0.0, steps * (self._takes(way.mode, len(way.who), company) - low / company))
            if self.purse.bears(risk):
                patience = min(PATIENCE, 2 * holds)
                return Plan(dict.fromkeys(way.who, way.mode), way.mode, way.speed, risk, holds, patience)
            waits = min(waits, self.purse.recovers(risk))
        return Plan({}, saves=bool(ways), due=max(EVERY, int(waits)))

    def _buy(self, way: Way, outlook: Outlook, gain: float, risk: float) -> tuple[list[int], float]:
        """For whom the purse allows a trial, where the company else brings `gain` times what plain steps do, and may lose so
        much; or how many steps it takes until it allows one."""
        company, count, waits = len(outlook.guests), len(way.who), float(LONGEST)
        likely, low = (own[way.row, way.who].cumsum() for own in (outlook.likely, outlook.low))
        while count:
            steps, takes = steps_of(count), self._takes(way.mode, count, company)
            price = max(VAIN * takes, (1 + takes) * gain - 1 - float(likely[count - 1]) / company)
            loss = max(VAIN * takes, takes - float(low[count - 1]) / company)
            bet = steps * price, (steps + UNDER_WAY) * loss + risk
            if self.purse.buys(*bet):
                return way.who[:count], 0.0
            waits = min(waits, self.purse.waits(*bet))
            count //= 2
        return [], waits

    def _ways_to(self, outlook: Outlook, worths: np.ndarray, least: float) -> list[Way]:
        """The best ones with each mode that are faster than that, the fastest first: for whom it brings most."""
        company = len(outlook.guests)
        worths = np.where(outlook.may, worths, -np.inf)
        order = np.argsort(-worths, axis=1)
        tokens = company + np.take_along_axis(worths, order, axis=1).cumsum(axis=1)
        counts, plain = _counts(company), self.periods.of(None, company)
        extras = np.array([self.periods.extras(mode, counts, company) for mode in outlook.modes])
        speeds = tokens[:, [n - 1 for n in counts]] / (plain + extras)
        found, bests = [], zip(speeds.max(1).tolist(), speeds.argmax(1).tolist(), strict=True)
        for row, (speed, best) in enumerate(bests):
            if speed > least:
                found.append(Way(speed, outlook.modes[row], order[row, : counts[best]].tolist(), row))
        return sorted(found, key=lambda way: -way.speed)

    def _takes(self, mode: Mode, count: int, company: int) -> float:
        """Plain steps that a step takes longer."""
        return self.periods.extra(mode, count, company) / self.periods.of(None, company)

    @property
    def quiet(self) -> bool:
        return not self._drafts and self.holds()

    def holds(self) -> bool:
        return not self._decided and not self._is_overdue

    @property
    def _is_overdue(self) -> bool:
        """There was no time to decide while the device was at work. A rehearsal does not wait for any."""
        return self._steps >= self._due + (0 if self.rehearses else self._patience)

    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        return self.fixed.choose(requests, proposals, load)

    # ------------------------------------------------------------------ after the step
    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        """It is put aside until the device is at work."""
        if self.rehearses:
            for verdict, nodes in zip(verdicts, times.drafted, strict=False):
                self.tally[len(verdict.accepted)] += nodes > 0
            return
        if not self.periods.known:
            return
        self._steps += 1
        self._undigested += 1
        if self._load.room > 0:
            self._room = self._load.room
        elif not times.num_prefill_tokens:  # prompts filled the last step that was asked about, and are over
            self._load = replace(self._load, num_prefill_tokens=0, room=self._room)
        self._ran = requests
        brought = [len(v.accepted) for v in verdicts] if times.produced > len(verdicts) else None
        self._unread.append((times, requests, brought))
        if len(self._unread) >= PATIENCE:
            self._read()

    def catch_up(self, busy: Callable[[], bool]) -> None:
        """What is due is decided now, piece by piece while the device is at work: it shows in a few steps, and nobody waits."""
        if len(self._unread) >= (FEW if self._drafts else MANY):
            self._read()
        if self._thinking is None:
            due = self._steps >= self._due and not self._decided and not self.rehearses
            if not due or not self._ran or any(r.finish_reason is not None for r in self._ran):
                return
            self._thinking = self._think(self._ran)
        for _ in self._thinking:
            if not busy():
                return
        self._thinking = None
        self._due += UNDER_WAY if self._decided else 0

    def release(self, request: Request) -> None:
        self._unread.append(request)
        if not self.periods.known:
            self._digest()  # nobody else will

    def _digest(self) -> None:
        """All that is known of the last steps counts from now on."""
        self._read()
        self.outcomes.digest([*self._guests.values(), *self._gone], self._ways, self._undigested)
        self._undigested = 0
        for guest in self._gone:
            self.outcomes.owns.leave(guest.seat)
        self._gone.clear()
        self._promising.clear()
        for (mode, count, company), (steps, seconds) in self._told.items():
            self.periods.learn(mode, count, company, seconds / steps, int(steps))
        self._told.clear()

    def _read(self) -> None:
        """What happened since it was read last, in its order."""
        unread, self._unread = self._unread, []
        for event in unread:
            if not isinstance(event, Request):
                self._read_step(*event)
            elif (guest := self._guests.pop(event.id, None)) is not None:
                self._gone.append(guest)

    def _read_step(self, times: StepTimes, requests: Sequence[Request], brought: Sequence[int] | None) -> None:
        company, repeats = len(requests), times.asked is self._stretch.asked
        if not repeats:
            leaves = bool(self._stretch.tallies)  # drafts: then this step may be longer for it, though it be plain
            self._stretch = replace(self._begin(times, requests), behind=leaves)
        stretch, plain = self._stretch, self.periods.of(None, max(1, company))
        behind, self._prompts = self._prompts, times.num_prefill_tokens > 0
        for tally, count in zip(stretch.tallies, brought or itertools.repeat(0), strict=False):
            tally[count] += 1
        self._shares = [0.99 * self._shares[0] + times.policy, 0.99 * self._shares[1] + times.period]
        self.purse.earn(1)
        if not company:
            return
        seconds, waited, self._last = times.period - times.policy, self._prompts or behind, company
        if stretch.tallies or stretch.behind:
            stretch.behind = False
            usual, takes = 1 + stretch.takes, times.period / plain
            wild, self._wild = is_wild(takes, usual) and not self._wild, is_wild(takes, usual)
            # what waits for prompts should have been as was thought, since plain steps would have waited, too;
            # and so should one step that something held up
            self._book(times.produced / company - (usual if waited or wild else min(takes, DEAREST)))
            self._note(stretch, times.drafted)
        if self._prompts:
            stretch.last = 0.0
            return
        self.plain_steps += not stretch.tallies
        self.yields.add(company * times.period / plain, times.produced)
        self._time(stretch, seconds, repeats and not behind)

    def _book(self, won: float) -> None:
        """In plain steps. What loses is thought about anew."""
        self.purse.book(won)
        self._lost = max(0.0, self._lost - won)
        if self._lost > ENOUGH:
            self._due, self._patience = min(self._due, self._steps), HASTE

    def _time(self, stretch: Stretch, seconds: float, repeats: bool) -> None:
        """A step teaches how long its kind takes if those around it are like it."""
        if repeats and stretch.last and stretch.kind is not None:
            told = self._told.setdefault(stretch.kind, [0, 0.0])
            told[0] += 1
            told[1] += stretch.last
        known = repeats and stretch.kind is not None and not is_wild(seconds, self.periods.step(*stretch.kind))
        stretch.last = seconds if known else 0.0

    def _begin(self, times: StepTimes, requests: Sequence[Request]) -> Stretch:
        """A step that does not repeat the last one."""
        company = len(requests)
        if not any(times.asked):
            return Stretch(times.asked, (None, 0, company))
        modes: list[Mode | None] = []
        tallies = []
        for request, own, nodes in zip(requests, times.asked, times.drafted, strict=False):
            way, guest = self._numbers.get(id(own)), self._guests.get(request.id)
            mode = self._ways[way] if way is not None else None
            if mode is None or way is None or guest is None or not (nodes or mode.drafter in SOLE):
                modes.append(None)  # a head that gives no draft could not be asked
                tallies.append(NOTHING.copy())
                continue
            modes.append(mode)
            tallies.append(guest.log(way))
            if mode.drafter not in SOLE:
                self._in_vain[guest.heat] = 0
        some = {mode for mode in modes if mode is not None}
        wished = sum(map(bool, times.asked))
        alike = len(some) == 1 and wished == company - modes.count(None)
        takes = sum([self._takes(mode, modes.count(mode), company) for mode in some if self.periods.knows(mode)])
        return Stretch(times.asked, (some.pop(), wished, company) if alike else None, tallies, modes, takes)

    def _note(self, stretch: Stretch, drafted: Sequence[int]) -> None:
        """For people."""
        nodes: dict[str, int] = {}
        for mode, size in zip(stretch.modes, drafted, strict=False):
            if mode is not None:
                nodes[mode.drafter] = nodes.get(mode.drafter, 0) + size
        for name, size in nodes.items():
            book = self._books.setdefault(name, [0, 0])
            book[0], book[1] = book[0] + 1, book[1] + size

    # ------------------------------------------------------------------ why
    def plain_seconds(self, company: int, context: float = 0.0) -> float:
        return self.periods.of(None, company) if self.periods.known else 0.0

    def explain(self) -> Explanation:
        if not self.periods.known:
            return Explanation("adaptive")
        company, (deciding, whole) = self._last, self._shares
        plain = self.periods.of(None, company)
        gain = self.yields.value(weight=0.0) if self.yields.expected else 1.0
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


def steps_of(count: int) -> int:
    """Of a trial for so many requests."""
    return min(TRIAL, 1 + -(-TRIED // count))


@functools.lru_cache(256)
def _counts(most: int) -> list[int]:
    """Numbers of requests that are looked at: all small ones, some of the large."""
    return sorted({*range(1, min(most, 8) + 1), *range(8, most + 1, 8), most} - {0})
