"""One trace, one policy: the engine's step without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headstart import tree
from headstart.config import HEADS, SpeculativeConfig
from headstart.core import Request, RequestView, SamplingParams, Tree, Verdict, View
from headstart.drafters import WEIGHTLESS, Drafter, Surroundings, build
from headstart.policy import Errand, Load, StepTimes, Wishes
from headstart.policy.ahead import ON_DEVICE, AheadPolicy
from headstart.scheduler import Plan, Planned
from headstart.simulate.answers import DEEPEST, Answers
from headstart.simulate.entrants import Entrant, Noise, drafters_of
from headstart.simulate.machines import Machine
from headstart.traffic import Trace

NO_TOKEN = -1  # one that no text has


@dataclass(frozen=True)
class Setting:
    """How large the engine runs, and how much its steps vary."""

    max_num_seqs: int = 32
    max_batch_tokens: int = 512
    noise: float = 0.0


@dataclass
class Outcome:
    """What one policy made of one trace."""

    policy: str
    tokens: int = 0
    seconds: float = 0.0  # in which there was work
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    latency: float = 0.0  # seconds from a request's arrival to its end, on average
    times: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "target": 0.0, "around": 0.0})
    asked: dict[str, int] = field(default_factory=dict)  # how often each drafter was asked
    sooner: float = 1.0  # how many times shorter requests take than with plain decoding,
    less: float = 1.0  # and how many times shorter there is work

    @property
    def ratio(self) -> float:
        """To plain decoding. What is gained shows in requests that end sooner, or in less work: those that end sooner overlap
        less, and rows for one request delay the others. Who loses, loses both."""
        return max(self.sooner, self.less)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def wasted(self) -> float:
        """Share of what was drafted that was rejected."""
        return 1 - self.accepted / self.drafted if self.drafted else 0.0

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"ratio": self.ratio, "tokens_per_second": self.tokens_per_second, "wasted": self.wasted}


class Before(NamedTuple):
    """The last step."""

    there: Sequence[str] = ()  # requests,
    asked: Sequence[Wishes] = ()  # what drafters were asked for, for those that were ready,
    drafts: bool = False  # and if there were any


@dataclass
class Flight:
    """A step that runs, or has run, and that the policy was not told of yet."""

    times: StepTimes
    requests: Sequence[Request]
    verdicts: Sequence[Verdict]
    left: Sequence[Request]  # those that it has ended


class Replay:
    """One trace, one policy: continuous batching, pieces of prompts, drafts, verdicts; as the engine does it."""

    def __init__(
        self, trace: Trace, answers: Sequence[Answers], entrant: Entrant, machine: Machine, setting: Setting
    ) -> None:
        self.machine, self.setting = machine, setting
        names = drafters_of(trace) if entrant.drafters is None else entrant.drafters
        self._noise = Noise(setting.noise, trace.seed)
        self.coming = deque(enumerate(answers))
        self._answers: dict[str, Answers] = {}
        self._chosen: dict[str, tuple[str, ...]] = {}
        self._names, self._real = names, _real_drafters(trace, names)
        self.policy = entrant.make(lambda r: self._chosen[r.id], machine, self._noise)
        self._thoughts = 0  # decisions of this step,
        self._asking: list[Request] = []  # and for whom
        self._resting: set[str] = set()  # requests that heads have left alone: they have to join again
        self._asked: list[Wishes] = []  # what drafters were asked for at first, in this step,
        self._blind: list[int] = []  # and the rows that a device gives each draft of its own, whatever is found
        self._before, self._repeats = Before(), False  # the last step, and whether this one is like it
        self._plan = Plan()  # of the last step
        self._flight: Flight | None = None  # behind which the next step is launched, on a machine that drafts by itself
        self._left: list[Request] = []  # those that this step has ended
        self.clock, self.out = 0.0, Outcome(entrant.name)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def run(self) -> Outcome:
        count = len(self.coming)
        self.play()
        self.out.latency /= count
        return self.out

    def play(self) -> None:
        """Until all that were to come are over."""
        while self.coming or self.waiting or self.running:
            self._arrive()
            self._step()
        self._settle()

    def _arrive(self) -> None:
        if not self.waiting and not self.running:
            self._settle()
            self._before = Before()  # nothing of it is under way any more
            self.clock = max(self.clock, self.coming[0][1].source.arrival)
        while self.coming and self.coming[0][1].source.arrival <= self.clock:
            number, answers = self.coming.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=answers.source.output)
            request = Request(answers.prompt, params, 0, id=str(number))
            self._answers[request.id], self._chosen[request.id] = answers, answers.choices(self._names)
            self.waiting.append(request)

    def _enlist(self, request: Request) -> None:
        """It is next in line. Heads read along only where the policy says so."""
        company = min(len(self.running) + len(self.waiting), self.setting.max_num_seqs)
        room = self._plan.room(self.setting.max_batch_tokens)  # in the last step
        own, load = self._chosen[request.id], Load(company, 0, 0, len(request.prompt), room)
        if any(n in HEADS for n in own) and not self.policy.enlist(request, load):
            self._chosen[request.id] = tuple(n for n in own if n not in HEADS)

    def _next(self) -> Plan:
        plan, room = Plan(), self.setting.max_batch_tokens
        for request in self.running:
            room -= _add(plan, request, room)
        while self.waiting and len(self.running) < self.setting.max_num_seqs and room > 0:
            self._enlist(self.waiting[0])
            self.running.append(self.waiting.popleft())
            room -= _add(plan, self.running[-1], room)
        return plan

    def _step(self) -> None:
        plan = self._plan = self._next()
        trees, errands = self._draft(plan, self._load(plan))
        ready = plan.ready
        rows, reach = self._rows(plan, list(map(max, map(len, trees), self._blind)))
        target, drafting = self.machine.forward(plan, rows, reach), sum(e.seconds for e in errands)
        reading = self._reading(plan)
        deciding, changing = self._in_sight(plan, any(map(len, trees)))
        self._account(drafting + reading + changing, target, deciding, errands)
        self._left = []
        verdicts = [self._verdict(p.request, t) for p, t in zip(ready, trees, strict=True)]
        self._commit(plan, trees, verdicts)
        produced = len(verdicts) + sum(len(v.accepted) for v in verdicts)
        seen, prefill, sizes = self._measured(errands), plan.num_prefill_tokens, [len(t) for t in trees]
        drafting, target = sum(e.seconds for e in seen), self._noise(target)
        period = target + drafting + self._noise(self.machine.around) + self._noise(reading + changing) + deciding
        times = StepTimes(
            drafting, target, 0, 0, rows, prefill, period, reach, seen, produced, deciding, self._asked, sizes
        )
        if self._runs_behind:
            self._settle()  # the step before: this one was launched before it was over
        self._flight = Flight(times, [p.request for p in ready], verdicts, self._left)
        if not self._runs_behind:
            self._settle()

    @property
    def _runs_behind(self) -> bool:
        """Is a step launched before the policy knows what the last one brought?"""
        return self.machine.ahead and isinstance(self.policy, AheadPolicy)

    def _settle(self) -> None:
        """The policy is told of the step that is under way. Where the next one repeats it, there is time to think before."""
        if (flight := self._flight) is None:
            return
        self._flight = None
        if self._repeats:
            self.policy.catch_up(lambda: True)
        for request in flight.left:
            self.policy.release(request)
        self.policy.learn(flight.times, flight.requests, flight.verdicts)

    def _measured(self, errands: Sequence[Errand]) -> tuple[Errand, ...]:
        """What a clock would have shown. Noise troubles the policy alone: what is compared are true times."""
        return tuple(replace(e, seconds=self._noise(e.seconds)) for e in errands)

    @property
    def _thought(self) -> float:
        """Seconds of this step's decisions."""
        return self._thoughts * self.machine.decision(len(self._asking))

    def _reading(self, plan: Plan) -> float:
        """Seconds in which drafters read prompts: each those of all that come, at once."""
        seconds = 0.0
        for name, work in self.machine.reading.items():
            read = [p for p in plan.parts if p.piece > 1 and name in self._chosen[p.request.id]]
            if read:
                seconds += work.of(any(not p.request.computed for p in read), sum(p.piece for p in read))
        return seconds

    def _in_sight(self, plan: Plan, drafts: bool) -> tuple[float, float]:
        """Seconds of decisions, and of getting ready, for which the device waits. While a step repeats the last one, it is
        decided behind the device's back. Where requests come or go, and not all is plain, the host needs longer than the
        device."""
        before, now = self._before, Before([p.request.id for p in plan.parts], self._asked, drafts)
        self._before = now
        changes = now.there != before.there or plan.num_prefill_tokens > 0
        self._repeats = self.machine.ahead and not changes and now.asked == before.asked
        busy = drafts or before.drafts
        return 0.0 if self._repeats else self._thought, self.machine.changing if changes and busy else 0.0

    def _load(self, plan: Plan) -> Load:
        return plan.load(len(self.running), len(self.waiting), self.setting.max_batch_tokens)

    def _rows(self, plan: Plan, sizes: Sequence[int]) -> tuple[int, float]:
        """Of the forward, with drafts of these sizes, and the context of all of them together."""
        nodes = iter(sizes)
        new = [p.piece + (next(nodes) if p.ready else 0) for p in plan.parts]
        return sum(new), float(sum(n * p.request.computed for n, p in zip(new, plan.parts, strict=True)))

    # -------------------------------------------------------------- drafts
    def _draft(self, plan: Plan, load: Load) -> tuple[list[Tree], list[Errand]]:
        requests = [p.request for p in plan.ready]
        proposals: list[dict[str, Tree]] = [{} for _ in requests]
        errands: list[Errand] = []
        self._asking, before = requests, self._decisions
        self._asked = wishes = self._attended(requests, self.policy.ask(requests, proposals, load))
        self._blind = [0] * len(requests)
        while any(wishes):
            wishes = self._reserve(plan, wishes)
            if self.machine.ahead:
                self._blind = [max((w.nodes for n, w in own.items() if n in ON_DEVICE), default=0) for own in wishes]
            self._propose(plan, wishes, proposals, errands)
            wishes = self.policy.ask(requests, proposals, load)
        self._thoughts = self._decisions - before
        trees = self.policy.choose(requests, proposals, load)
        sizes = self._fit(plan, [len(t) for t in trees])
        return [tree.prune(t, n, len(t)) for t, n in zip(trees, sizes, strict=True)], errands

    @property
    def _decisions(self) -> int:
        """That the policy has taken so far, where they take time."""
        return self.policy.decisions if isinstance(self.policy, AheadPolicy) else 0

    def _attended(self, requests: Sequence[Request], wishes: list[Wishes]) -> list[Wishes]:
        """What drafters hear. Heads leave those alone that the policy says they may. One that is wished for again joins in this
        step, and drafts from the next on."""
        out = wishes
        for i, (request, own) in enumerate(zip(requests, wishes, strict=True)):
            heads = [name for name in own if name in HEADS]
            if heads and request.id in self._resting:
                self._resting.remove(request.id)
                out = list(wishes) if out is wishes else out
                out[i] = {name: wish for name, wish in own.items() if name not in heads}
            elif not heads and self.policy.rests(request):
                self._resting.add(request.id)
        return out

    def _reserve(self, plan: Plan, wishes: Sequence[Wishes]) -> list[Wishes]:
        most = [max((w.nodes for w in own.values()), default=0) for own in wishes]
        most = self._fit(plan, [n if _left(p.request) > 1 else 0 for n, p in zip(most, plan.ready, strict=True)])
        return [
            {name: replace(w, nodes=min(w.nodes, n)) for name, w in own.items()}
            for n, own in zip(most, wishes, strict=True)
        ]

    def _fit(self, plan: Plan, wanted: Sequence[int]) -> list[int]:
        """Rows of a forward are bounded."""
        room, out = self.setting.max_batch_tokens - plan.num_tokens, []
        for n in wanted:
            out.append(max(0, min(n, room)))
            room -= out[-1]
        return out

    def _propose(
        self, plan: Plan, wishes: Sequence[Wishes], proposals: list[dict[str, Tree]], errands: list[Errand]
    ) -> None:
        """Each drafter once, for all requests that wish it."""
        levels: dict[str, list[int]] = {}
        wide: dict[str, int] = {}  # nodes beside the first path
        for part, wished, own in zip(plan.ready, wishes, proposals, strict=True):
            for name, wish in wished.items():
                depth = min(_left(part.request) - 1, wish.depth, wish.nodes)
                branches = wish.nodes > wish.depth
                own[name] = self._ask(name, part.request, depth, branches) if wish.nodes else Tree()
                if branches and len(own[name]):
                    _widen(own[name], wish.nodes)
                    wide[name] = wide.get(name, 0) + wish.nodes - depth
                own[name].origins = [name] * len(own[name])
                if wish.nodes:
                    levels.setdefault(name, []).append(depth)
        for name, own_levels in levels.items():
            errand = Errand.of(name, own_levels).wider(wide.get(name, 0))
            errands.append(replace(errand, seconds=self.machine.errand(errand, len(plan.ready))))

    def _ask(self, name: str, request: Request, depth: int, branches: bool) -> Tree:
        answers = self._answers[request.id]
        if name in self._real and answers.source.is_recorded:
            drafted = self._real[name].propose(View([_view(request, depth)])).trees()[0]
            return tree.prune(drafted, depth, depth)
        return answers.propose(name, request.num_output, depth, branches)

    def _verdict(self, request: Request, draft: Tree) -> Verdict:
        text, at = self._answers[request.id].text, request.num_output
        nodes = tree.follow(draft, text[at : at + DEEPEST + 16]) if len(draft) else []
        return Verdict(nodes, text[at + len(nodes)])

    # -------------------------------------------------------------- after the forward
    def _commit(self, plan: Plan, trees: Sequence[Tree], verdicts: Sequence[Verdict]) -> None:
        said = iter(zip(trees, verdicts, strict=True))
        for part in plan.parts:
            part.request.computed += part.piece
            if part.ready:
                draft, verdict = next(said)
                part.request.computed += len(verdict.accepted)
                part.request.tokens += verdict.tokens(draft)
                self.out.drafted += len(draft)
                self.out.accepted += len(verdict.accepted)
                if _left(part.request) < 1:
                    self._leave(part.request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._resting.discard(request.id)
        request.finish_reason = "length"
        self.out.tokens += request.num_output
        answers = self._answers.pop(request.id)
        self.out.latency += self.clock - answers.source.arrival
        for drafter in self._real.values():
            drafter.release(_view(request, 0))
        self._left.append(request)

    def _account(self, drafting: float, target: float, deciding: float, errands: Sequence[Errand]) -> None:
        period = drafting + target + deciding + self.machine.around
        self.clock += period
        self.out.steps += 1
        self.out.seconds += period
        for part, seconds in (("draft", drafting), ("target", target), ("around", deciding + self.machine.around)):
            self.out.times[part] += seconds
        for errand in errands:
            self.out.asked[errand.name] = self.out.asked.get(errand.name, 0) + 1


def _add(plan: Plan, request: Request, room: int) -> int:
    """As much of it as there is room for: so many tokens."""
    piece = min(len(request.tokens) - request.computed, room)
    if piece:
        plan.add(Planned(request, piece, request.computed + piece == len(request.tokens)))
    return piece


def _widen(draft: Tree, nodes: int) -> None:
    """A trace tells how deep a tree was right; the rest of its nodes are wrong ones beside the first."""
    more = nodes - len(draft)
    draft.tokens, draft.parents = draft.tokens + [NO_TOKEN] * more, draft.parents + [-1] * more
    if draft.confidence is not None:
        draft.confidence = [*draft.confidence, *[0.0] * more]


def _left(request: Request) -> int:
    return request.params.max_tokens - request.num_output


def _view(request: Request, depth: int) -> RequestView:
    return RequestView(request.id, request.tokens, len(request.prompt), depth, depth, request.params, 0)


def _real_drafters(trace: Trace, names: Sequence[str]) -> dict[str, Drafter]:
    """Drafters that can be run because the tokens are known."""
    ids = [t for r in trace.requests for t in (*r.prompt_ids, *r.output_ids)]
    around = Surroundings(1 + max(ids, default=0))
    out = {}
    for name in WEIGHTLESS if ids else ():
        drafter = build(SpeculativeConfig(name, num_speculative_tokens=DEEPEST), around) if name in names else None
        if drafter is not None:
            out[name] = drafter
    return out
