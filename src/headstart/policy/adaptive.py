"""As much as pays: what a node is likely to bring, against what its row costs on this machine.

A token is worth the time in which the engine makes one: its *rate*, tokens per second as they really come, is the exchange
rate between chances and seconds. A node is verified where its chance to be reached and right is more than its row's seconds at
that rate, and a drafter that costs something is asked where the nodes that it may bring are. Nothing is a common answer.

Drafters that need no weights are asked first, since they cost next to nothing, and say at once how good their drafts are. Only
then is it decided for whom a draft model or a head is worth its time. All that is proposed for a request becomes one tree.
Drafts that are not verified still teach (`beliefs`). Whoever has not paid for some steps is asked again after a while, so that
asking in vain takes at most a small share of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart import tree
from headstart.config import SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.drafters import WEIGHTLESS
from headstart.policy import Choices, Load, Proposals, StepTimes, Wish, Wishes
from headstart.policy.beliefs import Beliefs
from headstart.policy.costs import Costs, Errands
from headstart.policy.explain import Explanation, Tried
from headstart.policy.fixed import FixedPolicy
from headstart.policy.shares import Share, heat_of

PROBES = 0.003  # share of the time that asking drafters with weights in vain may take,
FREE_PROBES = 0.0015  # and asking one without
SAVED = 3  # questions in vain for which time may be saved up
PROOFS = 0.002  # share of the time for rows that do not seem to pay, lest their price stays wrong,
UNPROVED = 16.0  # steps, that may be saved up for that,
PROVED = 2  # how many at once,
IDLE = 64  # and after how many steps without any even those for which nobody would draft
PROBE_DEPTH = 2  # tokens that a model drafts when it is only asked how good it has become
LEAST = 0.02  # a draft for a request should bring at least so much of a token, after costs: chances are guesses
MARGIN, ROW_MARGIN = 1.15, 1.05  # the time of a drafter, and of rows, should come back so many times
USE = 0.05  # share of the tokens that a drafter should bring, or it is not worth reading along
REST = 3  # steps
GLANCE = 1.3  # times what asking costs, that it is taken to bring where it brought the others nothing: a few questions
REPRICE, NEAR = 8, 32  # steps, and tokens of context, for which a price holds
STRANGERS = 4  # requests that are read before it is known what drafters take
SCOUTS = 8  # of so many requests that are not worth reading along, one is followed all the same,
RARELY = 64  # and of so many, where that was in vain
PLAIN_EVERY = 128  # steps with drafts after which a plain one is taken, to know what drafts bring,
PLAIN_SOON = 8  # and where it is not known what their rows cost
REACH = 32  # rows that are looked at for the cheapest way to add some
COUNTS = np.arange(1, 1 + REACH)
DEEPEST = 8  # tokens that a model is asked for at once


@dataclass
class Mean:
    """A mean that forgets."""

    value: float = 0.0
    seen: int = 0

    def add(self, value: float) -> None:
        self.seen += 1
        self.value += (value - self.value) / min(self.seen, 20)


@dataclass
class Pace:
    """How many steps ago a drafter was asked for a request, and what that brings."""

    asked: int = 0
    worth: float = 0.05  # tokens that asking brings, after what rows cost; a mean that forgets

    def add(self, gained: float, moves: float = 0.06) -> None:
        self.asked = 0
        self.worth += moves * (gained - self.worth)


@dataclass
class Book:
    """What became of one drafter's work, over all requests."""

    asked: int = 0
    proposed: int = 0
    verified: int = 0


@dataclass
class Found:
    """What is known of one request's next tokens in this step."""

    tree: Tree = field(default_factory=Tree)
    chances: list[float] = field(default_factory=list)  # that each node is reached and right

    def by_depth(self, deepest: int) -> np.ndarray:
        """(deepest,) that the text goes along with some node at depth 1, 2, ..."""
        out = np.zeros(deepest)
        for chance, depth in zip(self.chances, tree.depths(self.tree.parents), strict=True):
            if depth <= deepest:
                out[depth - 1] += chance
        return out


@dataclass
class Answer:
    """For whom a drafter with weights is worth its time, and how deep."""

    requests: list[str]
    name: str
    depth: int
    hopes: dict[int, float]  # tokens that it may add, for each of them that it is asked for

    def holds(self, requests: Sequence[Request], proposals: Sequence[Proposals]) -> bool:
        """For the next step too: the same requests, and nobody else has anything to say for those that it is asked for."""
        spoken = any(len(draft) for i in self.hopes if i < len(proposals) for draft in proposals[i].values())
        same = not spoken and self.requests == [r.id for r in requests]
        return same and all(_left(requests[i]) > 1 for i in self.hopes)


class AdaptivePolicy:
    cuts, quiet = True, False

    def __init__(self, config: SpeculativeConfig, choices: Choices) -> None:
        self.fixed, self.choices = FixedPolicy(config, choices), choices
        self.costs, self.errands, self.beliefs = Costs(), Errands(), Beliefs()
        self.yields = Share(0.03)  # tokens that came, of those that plain steps would have brought in the same time
        self.word = Share(0.02)  # nodes that were accepted, of those that chances promised of what was verified
        self._promised = 0.0  # by those of this step
        self._deepest = min(DEEPEST, config.num_speculative_tokens)
        self._branches = config.nodes // max(1, config.num_speculative_tokens)
        self._around = {False: Mean(), True: Mean()}  # seconds beside forward and drafters: nobody was asked, some were
        self._paces: dict[tuple[str, str], Pace] = {}
        self._usual: dict[tuple[str, int], Pace] = {}  # the same over all requests, by heat
        # what drafts promise of what was hoped, by request ("": all) and drafter; and what is hoped in this step
        self._hopes: dict[tuple[str, str], Share] = {}
        self._hoped: dict[tuple[str, str], float] = {}
        self.books: dict[str, Book] = {}
        self.plain_steps = 0
        self._since_plain = 0
        self._drafted = 0  # rows of drafts in the last step that had some
        self._last = (1, 0.0)  # requests and context of the last step
        self._shares = [0.0, 0.0]  # seconds of deciding, and of all; they fade
        self._asking: dict[str, float] = {}  # tokens that asking costs, in this step
        self._strangers = 0  # requests that came before anything was known of what drafters take
        self._came = 0  # requests that were not worth reading along, since the last that was followed,
        self._scouts = SCOUTS  # and of how many one is
        self._use: dict[tuple[str, int], float] = {}  # share of tokens that drafters with weights brought, by heat
        self._prices: dict[tuple[int, ...], tuple[float, float]] = {}
        self._age = 0  # steps since they were told
        self._rest = 0  # steps for which no drafter with weights is thought about, since
        self._answer: Answer | None = None  # this holds
        self._bill = 0.0  # of this step's question in vain
        self._purse = 0.0  # seconds saved up for questions in vain,
        self._proofs = 0.0  # and for rows,
        self._idle = 0  # steps since some were verified
        self._proves = False  # in this step, though nobody would draft,
        self._proved = 0  # and how many it would have had without
        self._least = 0.0  # the chance that a node needs in this step,
        self._first = 0.0  # and the first one, where no others come with it
        self._claimed: dict[tuple[str, str], list[float]] = {}  # chances of this step's proposals

    # ------------------------------------------------------------------ what is kept
    def kept(self) -> dict[str, Any]:
        return {**self.costs.to_dict(), "drafters": self.errands.to_dict()}

    def recall(self, kept: Mapping[str, Any]) -> None:
        self.costs, self.errands = Costs.from_dict(kept), Errands.from_dict(kept["drafters"])

    # ------------------------------------------------------------------ what time is worth
    def plain_seconds(self, company: int, context: float = 0.0) -> float:
        """Of a step without drafts."""
        return self.costs.of(company, context) + self._around[False].value

    @property
    def _gain(self) -> float:
        """Over plain decoding."""
        return self.yields.value(weight=0.0) if self.yields.expected else 1.0

    def rate(self, company: int, context: float = 0.0) -> float:
        """Tokens per second at which this engine works now."""
        return max(1.0, self._gain) * company / self.plain_seconds(company, context)

    def _rate(self, company: int, load: Load) -> float:
        """What a second is worth in this step: it is taken from all that run, those too that still read their prompts."""
        return self.rate(max(company, load.num_running), load.context)

    def _price(self, company: int, load: Load) -> float:
        """The chance below which no node is worth a row, however many others come with it."""
        return self._both_prices(company, load)[0]

    def _both_prices(self, company: int, load: Load) -> tuple[float, float]:
        """That of a node among many, and of one alone. They change slowly, so they are not told anew in every step."""
        key = company, load.num_running, load.num_prefill_tokens, int(load.context) // NEAR
        if key not in self._prices:
            seconds = self.costs.span(company + load.num_prefill_tokens, 1 + REACH, load.context)
            least = float(((seconds[1:] - seconds[0]) / COUNTS).min())
            first = self.costs.of(company + 1, load.context) - self.costs.of(company, load.context)
            rate = self._rate(company, load)
            self._prices[key] = max(0.0, rate * least), rate * first
        return self._prices[key]

    # ------------------------------------------------------------------ who may be asked
    def enlist(self, request: Request, load: Load) -> bool:
        """Not where a request like the others would not be worth it; but for some, so that it is noticed when that changes."""
        names = [n for n in self.choices(request) if n not in WEIGHTLESS]
        self._rest = 0
        if not all(self.errands.knows(n) for n in names):
            self._strangers += 1
            return self._strangers <= STRANGERS
        if names and not self._is_worth_reading(request, names, load):
            self._came = (self._came + 1) % self._scouts
            return not self._came
        return True

    def _is_worth_reading(self, request: Request, names: Sequence[str], load: Load) -> bool:
        if all(self._use.get((n, heat_of(request)), 1.0) < USE for n in names):
            return False
        company = max(1, load.num_running)
        self._least = self._price(company, load)
        for name in names:
            more = self._net(request, name, Found()) * self._truth(request, name)
            worth = self._balance(name, more.cumsum()[None, :] * np.arange(1, company + 1)[:, None], company, load)
            if worth.max() > LEAST:
                return True
        return False

    def rests(self, request: Request) -> bool:
        return False

    # ------------------------------------------------------------------ whom to ask
    def ask(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Wishes]:
        nobody: list[Wishes] = [{} for _ in requests]
        if any(name not in WEIGHTLESS for own in proposals for name in own):
            return nobody
        most = self.fixed.most(requests, load)
        if not any(proposals):
            self._claimed, self._hoped, self._bill = {}, {}, 0.0
            self._least, self._first = self._both_prices(len(requests), load)
            self._proves = self._idle >= IDLE and self._doubts(len(requests), load)
            if self._proves:  # so no node is left out because it cannot pay
                self._least = 0.0
            if self._wants_plain(len(requests) + load.num_prefill_tokens):
                return nobody
            self._asking = {name: self._price_of_asking(name, load) for name in WEIGHTLESS}
            due = {name for name in WEIGHTLESS if self._is_due(name, requests, load)}
            wishes = [self._free(r, n, load, due) if n else {} for r, n in zip(requests, most, strict=True)]
            if any(wishes):
                return wishes
        return self._dear(requests, proposals, most, load) or nobody

    def _wants_plain(self, rows: int) -> bool:
        """Is a step without drafts due, of so many rows? What drafts bring is told against such steps, and where it is not
        known what their rows cost, one tells what comes before them."""
        if self._since_plain < PLAIN_SOON or self._since_plain >= PLAIN_EVERY:
            return self._since_plain >= PLAIN_EVERY
        return not self.costs.is_sure(rows, self._drafted)

    def _doubts(self, rows: int, load: Load) -> bool:
        """Shall a row or two more be verified that do not seem to pay? Else nobody would notice that they cost less than was
        thought."""
        if load.num_prefill_tokens or self.costs.is_sure(rows, PROVED):
            return False
        cost = self.costs.of(rows + PROVED, load.context) - self.costs.of(rows, load.context)
        return self._proofs >= cost

    def _is_due(self, name: str, requests: Sequence[Request], load: Load) -> bool:
        """Has one of those that a drafter has not paid for waited long enough? Then it is asked for all: that costs less."""
        least, cost = self._interval(name, 1, max(1, load.num_running), load), self._asking[name]
        paces = (self._paces.get((r.id, name)) for r in requests)
        return any(pace is not None and pace.worth <= cost and pace.asked + 1 >= least for pace in paces)

    def _free(self, request: Request, most: int, load: Load, due: set[str]) -> Wishes:
        """Drafters without weights that are worth the time of asking, or are to be asked again."""
        nodes = min(most, load.room)
        wishes: Wishes = {}
        for name in self.choices(request) if nodes > 0 else ():
            if name in WEIGHTLESS:
                pace = self._paces.get((request.id, name)) or self._like_others(request, name)
                if pace is None or pace.worth > self._asking[name]:
                    wishes[name] = Wish(nodes, nodes)
                elif name in due or self._proves:
                    wishes[name] = Wish(min(nodes, PROBE_DEPTH), min(nodes, PROBE_DEPTH))
        return wishes

    def _like_others(self, request: Request, name: str) -> Pace | None:
        """For a request that a drafter was not asked about yet, what asking brings the others tells more than hope; but a few
        questions are asked where one more row costs less than a token is worth: else only large drafts can pay."""
        usual = self._usual.get((name, heat_of(request)))
        if usual is None:
            return None
        worth = usual.worth if self._first > 1 else max(usual.worth, GLANCE * self._asking.get(name, 0.0))
        return Pace(worth=worth) if worth < Pace.worth else None

    def _price_of_asking(self, name: str, load: Load) -> float:
        """Tokens that the time is worth in which a drafter without weights answers for one request."""
        company = max(1, load.num_running)
        return self._rate(company, load) * (self.errands.of(name, 1, company) + self._extra) / company

    def _interval(self, name: str, levels: int, rows: int, load: Load) -> float:
        """Steps between two questions in vain, so that they take little of the time."""
        step = self.plain_seconds(max(1, load.num_running), load.context)
        return (self.errands.of(name, levels, rows) + self._extra) / (FREE_PROBES * step)

    @property
    def _extra(self) -> float:
        """Seconds that a step takes longer where somebody is asked, beside the drafters' own."""
        return max(0.0, self._around[True].value - self._around[False].value)

    def _dear(
        self, requests: Sequence[Request], proposals: Sequence[Proposals], most: Sequence[int], load: Load
    ) -> list[Wishes] | None:
        """The drafter with weights that is worth most now, for whom and how deep; or one that should be heard again. A clear
        answer holds for some steps."""
        if self._rest:
            self._rest -= 1
            if not self._answer or self._answer.holds(requests, proposals):
                return self._wish(self._answer, requests, most)
        found = self._find(requests, proposals)
        able: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            for name in self.choices(request):
                if most[i] and load.room > 0 and _left(request) > 1 and name not in WEIGHTLESS:
                    able.setdefault(name, []).append(i)
        best: tuple[float, str, list[int], int] = (0.0, "", [], 0)
        for name, members in able.items():
            best = max(best, self._worth(name, members, requests, found, load), key=lambda b: b[0])
        worth, name, members, depth = best
        pays, joined = worth > LEAST * len(members), list[int]()
        if pays:
            depth += depth < self._deepest and not self.beliefs.is_tried(name, depth + 1)
            joined = [i for i in self._passengers(name, able[name], requests, load) if i not in members]
        else:
            name, members, depth = self._probe(able, requests)
        ids = [r.id for r in requests]
        hopes = {i: float(self._net(requests[i], name, found[i])[:depth].sum()) for i in (*members, *joined)}
        answer = Answer(ids, name, depth, hopes) if members else None
        is_clear = self.beliefs.is_tried(name, depth) if pays else worth <= 0 and not members
        self._rest, self._answer = REST if is_clear else 0, answer
        if joined:  # they are asked for once
            self._answer = Answer(ids, name, depth, {i: hopes[i] for i in members})
        return self._wish(answer, requests, most)

    def _wish(self, answer: Answer | None, requests: Sequence[Request], most: Sequence[int]) -> list[Wishes] | None:
        if answer is None:
            return None
        wishes: list[Wishes] = [{} for _ in requests]
        for i, hope in answer.hopes.items():
            self._hoped[requests[i].id, answer.name] = hope
            wishes[i] = {answer.name: Wish(min(answer.depth * self._branches, most[i]), answer.depth)}
        return wishes

    def _worth(
        self, name: str, members: list[int], requests: Sequence[Request], found: Sequence[Found], load: Load
    ) -> tuple[float, str, list[int], int]:
        """Tokens that a drafter would bring, less its time and that of its rows; for how many requests, and how deep."""
        more = np.array([self._net(requests[i], name, found[i]) * self._truth(requests[i], name) for i in members])
        if not more.any():
            return 0.0, name, [], 0
        order = np.argsort(-more.sum(1))
        worth = self._balance(name, more[order].cumsum(0).cumsum(1), len(requests), load)
        m, d = np.unravel_index(int(worth.argmax()), worth.shape)
        return float(worth[m, d]), name, [members[i] for i in order[: m + 1]], int(d) + 1

    def _balance(self, name: str, tokens: np.ndarray, company: int, load: Load) -> np.ndarray:
        """Tokens (for 1, 2, ... requests, to depth 1, 2, ...) less the time of the drafter, and of rows that cost more than the
        cheapest ones, which are paid already."""
        count, depth = np.arange(1, len(tokens) + 1)[:, None], np.arange(1, tokens.shape[1] + 1)[None, :]
        rate, before = self._rate(company, load), company + load.num_prefill_tokens
        rows = self.costs.at(before + count * depth, load.context) - self.costs.of(before, load.context)
        dear = np.maximum(0.0, rate * rows - self._least * count * depth)
        return tokens - dear - rate * MARGIN * self.errands.at(name, depth, count * depth)

    def _net(self, request: Request, name: str, found: Found) -> np.ndarray:
        """(depth,) tokens that a drafter may add to what is known, less what their rows cost at least."""
        own = np.array(self.beliefs.outlook(request, name, self._deepest, self._least))
        if own[0] and len(found.tree):
            own -= found.by_depth(self._deepest)
        return np.maximum(0.0, own - self._least)

    def _truth(self, request: Request, name: str) -> float:
        """How much of such a hope comes true."""
        general = self._hopes.get(("", name))
        before = 1.0 if general is None else general.value()
        own = self._hopes.get((request.id, name))
        return before if own is None else own.value(before)

    def _passengers(self, name: str, able: list[int], requests: Sequence[Request], load: Load) -> list[int]:
        """Requests that a drafter was not asked for lately, when it is asked for others anyway."""
        least = self._interval(name, 0, 2 * len(able), load)
        paces = [(i, self._paces.get((requests[i].id, name))) for i in able]
        return [i for i, pace in paces if pace is None or pace.asked + 1 >= least]

    def _probe(self, able: dict[str, list[int]], requests: Sequence[Request]) -> tuple[str, list[int], int]:
        """A drafter that was not worth asking is heard again where the time for it has been saved up: about requests that it
        was not asked for yet, else about all."""
        for name, members in able.items():
            members = [i for i in members if (requests[i].id, name) not in self._paces] or members
            cost = self.errands.of(name, PROBE_DEPTH, PROBE_DEPTH * len(members))
            self._purse = min(self._purse, SAVED * cost) if cost else self._purse
            if self._purse >= cost:
                self._bill = cost
                return name, members, PROBE_DEPTH
        return "", [], 0

    def holds(self) -> bool:
        return False

    def is_quiet(self, request: Request) -> bool:
        paces = [self._paces.get((request.id, name)) for name in self.choices(request)]
        least = max(self._asking.values(), default=0.0)
        return all(pace is not None and pace.worth <= least for pace in paces)

    # ------------------------------------------------------------------ what to verify
    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        """Of all that was proposed, the nodes that are worth their rows."""
        if not any(proposals):
            return self._choose_nothing(requests)
        found = self._find(requests, proposals)
        kept = [list(range(len(f.tree))) if f.tree.logq_rows is not None else [] for f in found]
        free = [
            (i, f) for i, f in enumerate(found) if f.tree.logq_rows is None
        ]  # of what was drawn, nothing is left out
        nodes = sorted((-chance, i, n) for i, f in free for n, chance in enumerate(f.chances))
        most = self.fixed.most(requests, load)
        count = self._count([-c for c, _, _ in nodes], len(requests), load) if nodes else 0
        more = len(nodes) > count and not any(kept) and self._doubts(len(requests) + count, load)
        if self._proves and not nodes:  # some time passes before it is tried again
            self._proofs *= 0.9
        self._proved = len(requests) + count if more else 0
        count += PROVED * more
        for _, i, node in nodes[:count]:
            if len(kept[i]) < most[i]:
                kept[i].append(node)
        out = [tree.select(f.tree, sorted(own)) for f, own in zip(found, kept, strict=True)]
        for request, proposed, f, own in zip(requests, proposals, found, kept, strict=True):
            self._note(request, proposed, f, [] if more and self._proves else own)
        self._book(proposals, out)
        self._promised = sum(f.chances[n] for f, own in zip(found, kept, strict=True) for n in own)
        self._purse, self._bill = self._purse - self._bill, 0.0
        return out

    def _choose_nothing(self, requests: Sequence[Request]) -> list[Tree]:
        """Nobody was asked."""
        if self._proves:  # some time passes before it is tried again
            self._proofs *= 0.9
        self._proved, self._promised = 0, 0.0
        for request in requests:
            self._note(request, {}, Found(), [])
        return [Tree() for _ in requests]

    def _book(self, proposals: Sequence[Proposals], chosen: Sequence[Tree]) -> None:
        for own in proposals:
            for name, draft in own.items():
                self.books.setdefault(name, Book()).proposed += len(draft)
        for name in {name for own in proposals for name in own}:
            self.books[name].asked += 1
        for t in chosen:
            for name in t.origins or ():
                self.books[name].verified += 1

    def _count(self, chances: list[float], company: int, load: Load) -> int:
        """How many nodes, likeliest first, are worth most after what their rows cost."""
        before = company + load.num_prefill_tokens
        seconds = self.costs.span(before + 1, len(chances), load.context) - self.costs.of(before, load.context)
        worth = min(1.0, self.word.value()) * np.cumsum(chances) - ROW_MARGIN * self._rate(company, load) * seconds
        best = int(worth.argmax())
        return best + 1 if worth[best] > LEAST else 0

    def _note(self, request: Request, proposals: Proposals, found: Found, kept: list[int]) -> None:
        """What asking has brought, drafter by drafter; and what was hoped of it."""
        origins = found.tree.origins or ()
        for name in self.choices(request):
            if name in proposals:
                gained = sum(found.chances[n] - self._least for n in kept if origins[n] == name)
                self._paces.setdefault((request.id, name), self._like_others(request, name) or Pace()).add(gained)
                self._usual.setdefault((name, heat_of(request)), Pace()).add(gained, 0.01)
                if (hoped := self._hoped.get((request.id, name))) is not None:
                    for key in ((request.id, name), ("", name)):
                        self._hopes.setdefault(key, Share(0.1)).add(hoped, gained)
            elif (known := self._paces.get((request.id, name))) is not None:
                known.asked += 1

    def _find(self, requests: Sequence[Request], proposals: Sequence[Proposals]) -> list[Found]:
        """One tree for each request of what was proposed, with chances; without nodes that could not pay."""
        return [self._merge(r, own) if own else Found() for r, own in zip(requests, proposals, strict=True)]

    def _merge(self, request: Request, proposals: Proposals) -> Found:
        """What was drawn stands alone, and whole: what was drawn must not decide whether it is verified."""
        drafts = [(name, draft) for name, draft in proposals.items() if len(draft)]
        drawn = [(name, draft) for name, draft in drafts if draft.logq_rows is not None][:1]
        least = 0.0 if drawn else self._least
        parts = [(draft, self._claim(request, name, draft, least)) for name, draft in drawn or drafts]
        parts = [(draft, chances) for draft, chances in parts if drawn or max(chances) > 0]
        return Found(*tree.merge(parts, least)) if parts else Found()

    def _claim(self, request: Request, name: str, draft: Tree, least: float) -> list[float]:
        """Chances of its nodes; a draft is claimed once in a step."""
        if (request.id, name) not in self._claimed:
            self._claimed[request.id, name] = self.beliefs.claim(request, name, draft, least)
        return self._claimed[request.id, name]

    # ------------------------------------------------------------------ after the step
    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        self.beliefs.hear_all(requests)
        self._purse += PROBES * times.period
        self._proofs = min(self._proofs + PROOFS * times.period, UNPROVED * times.period)
        self._age = (self._age + 1) % REPRICE
        if not self._age:
            self._prices.clear()
        for errand in times.errands:
            self.errands.learn(errand)
        if self._promised:  # what is chosen because it seems likely is likely to be overrated
            self.word.add(self._promised, times.produced - len(requests))
            self._promised = 0.0
        if self._proved:
            usual = self.costs.of(self._proved, times.reach / max(1, times.num_tokens))
            self._proofs, self._proved = max(0.0, self._proofs - max(0.0, times.target - usual)), 0
        self.costs.learn(times.num_tokens, times.target, times.reach, times.num_prefill_tokens)
        drafted = times.num_tokens - times.num_prefill_tokens - len(requests)
        if requests:
            self._drafted = drafted or self._drafted
            self._since_plain = self._since_plain + 1 if drafted else 0
        if times.num_prefill_tokens or not requests:
            return
        drafting = sum(e.seconds for e in times.errands)
        self._around[bool(times.errands)].add(max(0.0, times.period - times.target - drafting))
        plain = self.plain_seconds(len(requests), times.reach / max(1, times.num_tokens))
        self.yields.add(len(requests) * times.period / plain, times.produced)
        self._idle = 0 if drafted else self._idle + 1
        self.plain_steps += not drafted
        self._last = len(requests), times.reach / max(1, times.num_tokens)
        self._shares = [0.99 * a + b for a, b in zip(self._shares, (times.policy, times.period), strict=True)]

    # ------------------------------------------------------------------ why
    def explain(self) -> Explanation:
        company, context = self._last
        rate, (deciding, whole) = self.rate(company, context), self._shares
        row = self.costs.of(company + 1, context) - self.costs.of(company, context)
        return Explanation(
            policy="adaptive",
            speedup_estimate=self._gain,
            plain_steps=self.plain_steps,
            running=company,
            tokens_per_second=self._gain * company / self.plain_seconds(company, context),
            plain_milliseconds=1e3 * self.plain_seconds(company, context),
            row_milliseconds=1e3 * row,
            break_even=max(0.0, rate * row),
            deciding=deciding / whole if whole else 0.0,
            drafters={name: self._tried(name, book, rate, row, company) for name, book in self.books.items()},
        )

    def _tried(self, name: str, book: Book, rate: float, row: float, company: int) -> Tried:
        own = self.errands.of(name, 1, company) / company
        right = self.beliefs.first(name)
        return Tried(book.asked, book.proposed, book.verified, right, 1e3 * own, max(0.0, rate * (row + own)))

    def catch_up(self, busy: Callable[[], bool]) -> None:
        """Nothing was put aside for later: where it decides, the host is the device."""

    def release(self, request: Request) -> None:
        for name in self.choices(request) if request.stats.tokens else ():
            if name not in WEIGHTLESS:  # it read along; was it of use?
                use = request.stats.by_drafter.get(name, [0, 0])[1] / request.stats.tokens
                kind = name, heat_of(request)
                before = self._use.get(kind, 1.0)
                self._use[kind] = before + 0.3 * (use - before)
                self._scouts = SCOUTS if use >= USE else min(2 * self._scouts, RARELY)
        for kept in (self._paces, self._hopes):
            for key in [k for k in kept if k[0] == request.id]:
                del kept[key]
        self.beliefs.forget(request)


def _left(request: Request) -> int:
    """Tokens that it may still have."""
    return request.params.max_tokens - request.num_output
