"""Trials of drafts that do not seem to pay: the time that is saved up for them, and what they really took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headstart.policy import StepTimes

PROBES = 0.005  # share of the time that trials may take,
SAVED = 3  # and for how many of them it is saved up
PROBE_STEPS = 3  # that a trial takes at most; where a head has to join, the first of them is without drafts;
PROBED = 6  # drafts that are enough;
BEHIND = 2  # steps behind it that still show what it took, whatever was thought,
DEAREST = 3.0  # and what one step may count for, in plain ones
HOPELESS = 2.0  # times what it takes that a trial costs at most of what brings less than half of what it would need,
AT_LEAST, WORST = 0.25, 3.0  # times what was thought, that a trial counts for
NEARLY = 0.8  # of what a trial costs, below which it is not looked at what it would cost now
BEARABLE, FORGIVEN = 0.9, 0.005  # plain steps that may be lost before caution sets in, and how many a step forgives;
CAUTION = 0.005  # times what plain steps bring, that each of them makes drafts have to bring more,
DEARER = 0.03  # how much more drafts are then taken to cost,
LESS = 0.5  # and how much less time trials get
CREDIT, HEAVY = 4.0, 6.0  # how much of a gain is held against later losses, and the most that is remembered of these
FIRST, BOTHER = 0.5, 0.3  # how much of it trials are thought to take at first, and how far one moves that


@dataclass
class Losses:
    """What everything has cost that was done beside plain decoding, less what it brought, in plain steps."""

    steps: float = 0.0

    def add(self, lost: float, steps: int) -> None:
        """In so many steps. They forgive some of it."""
        self.steps = min(HEAVY, max(-CREDIT, self.steps + lost - FORGIVEN * steps))

    @property
    def few(self) -> bool:
        """So there is room for what is not known to pay."""
        return self.steps < BEARABLE

    @property
    def won(self) -> bool:
        """More than that: drafts have brought more than everything cost."""
        return self.steps < 0

    @property
    def many(self) -> float:
        """Those beyond what is bearable."""
        return max(0.0, self.steps - BEARABLE)

    @property
    def caution(self) -> float:
        """How much more than else drafts have to bring, in times what plain steps do."""
        return CAUTION * self.many

    @property
    def dearer(self) -> float:
        """Times what drafts should cost, that they are taken to: what takes long has more to lose."""
        return 1 + DEARER * self.many

    @property
    def ease(self) -> float:
        """The share that is left of the time for what does not seem to pay."""
        return 1 / (1 + LESS * self.many)


@dataclass
class Bill:
    """What a trial was to take, what was paid for it, and what it took."""

    drafter: str
    paid: float
    thought: float
    gain: float  # times what plain steps bring, that would come else
    rarely: float  # times what it takes that it costs
    steps: int  # that tell,
    left: int  # and those that are still to be seen
    seconds: float = 0.0
    before: int = 0  # steps that still run as if there were no trial


class Trials:
    """Each drafter has a purse of its own."""

    def __init__(self) -> None:
        self.saved = 0.0  # seconds that nobody has got yet
        self.purses: dict[str, float] = {}
        self.bill: Bill | None = None  # of the last trial
        self.bother = FIRST  # how many times what was thought they take
        self._short: dict[str, tuple[float, int]] = {}  # the last price that a purse was too small for, and the company

    def share_out(self, weights: Mapping[str, int]) -> None:
        """What was saved up goes to these drafters."""
        for name, weight in weights.items():
            self.purses[name] = self.purses.get(name, 0.0) + self.saved * weight / sum(weights.values())
        self.saved = 0.0 if weights else self.saved

    def may_pay(self, drafters: Iterable[str], company: int, won: bool = False) -> bool:
        """Could there be time for a trial of one of these? Not before it is known what the last one took, and not where there
        was far too little lately, in about this company. Where more was won than lost, some are free."""
        return self.bill is None and (won or not all(self._is_short(name, company) for name in drafters))

    def _is_short(self, drafter: str, company: int) -> bool:
        price, before = self._short.get(drafter, (0.0, company))
        return abs(company - before) <= before // 4 and self.purses.get(drafter, 0.0) + self.saved < NEARLY * price

    def pay(
        self, drafter: str, thought: float, gain: float, count: int, needs: float, free: bool, company: int = 1
    ) -> bool:
        """Is there time for a trial that is thought to take so long, for so many requests of a company? Then it begins. Not
        before it is known what the last one took. `needs`: times what drafts bring that they would have to, for all."""
        if self.bill is not None:
            return False
        rarely = min(HOPELESS, max(1.0, needs / 2))
        price = rarely * self.bother * thought
        self.purses[drafter] = min(self.purses[drafter], SAVED * price)
        if not free and self.purses[drafter] < price:
            self._short[drafter] = price, company
            return False
        self._short.pop(drafter, None)
        paid = 0.0 if free else price
        self.purses[drafter] -= paid
        steps = steps_of(count) + BEHIND
        self.bill = Bill(drafter, paid, thought, gain, rarely, steps, steps)
        return True

    def watch(self, times: StepTimes, company: int, plain: float, prompts: bool) -> None:
        """A step of a trial is over, or one behind it, where a plain one of this company takes so long. `prompts`: it had some,
        or waited for some, so it does not tell; it is taken to have been as was thought."""
        bill = self.bill
        if bill is None:
            return
        if bill.before:
            bill.before -= 1
            return
        bill.left -= 1
        if company and not prompts:
            bill.seconds += min(times.period, DEAREST * plain) - plain * times.produced / (company * bill.gain)
        elif company:
            bill.seconds += bill.thought / bill.steps
        if not bill.left:
            self._settle(bill)

    def wait(self, steps: int) -> None:
        """A trial that has just begun shows only behind so many steps."""
        if self.bill is not None and self.bill.left == self.bill.steps:
            self.bill.before = steps

    def _settle(self, bill: Bill) -> None:
        """What a trial took beyond what was paid for it is owed: less is left for the next ones of that drafter. What it took
        less is given back, for the most part."""
        took = min(WORST, max(AT_LEAST, bill.seconds / bill.thought))
        self.purses[bill.drafter] += bill.paid - bill.rarely * took * bill.thought
        self.bother += BOTHER * (took - self.bother)
        self.bill = None


def steps_of(count: int) -> int:
    """Of a trial for so many requests."""
    return min(PROBE_STEPS, 1 + -(-PROBED // count))


def drafts_of(count: int) -> int:
    """That it tells about."""
    return count * (steps_of(count) - 1)
