"""Traffic against policies without a model: the engine's step on a clock that only counts.

What a forward and a drafter take is given (`Machine`), and what drafters would have said is in the trace, so that every policy
hears the same answers. Drafters without weights are run for real where the tokens are known.
"""

from __future__ import annotations

import bisect
import json
import random
import re
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart import tree
from headstart.config import HEADS, SpeculativeConfig
from headstart.core import Request, RequestView, SamplingParams, Tree, Verdict, View
from headstart.drafters import WEIGHTLESS, Drafter, Surroundings, build
from headstart.errors import BadInput
from headstart.policy import Errand, Load, Policy, StepTimes, Wishes
from headstart.policy.adaptive import AdaptivePolicy
from headstart.policy.costs import ROWS, Costs, Work
from headstart.policy.fixed import FixedPolicy
from headstart.policy.goodput import GoodputPolicy
from headstart.scheduler import Plan, Planned
from headstart.traffic import Arrival, Seen, Skill, Trace

DEEPEST = 16  # levels of a synthetic draft
WRONG = 1  # the token of the first drafter that is wrong; the next ones follow, and texts begin behind them
FIRST_TOKEN = 100
WIDEST, NO_TOKEN = 64, -1  # nodes of a tree, and one that no text has
SIZE = re.compile(r"(?:(\d+)x)?(\d+)")  # of a draft: tokens, or nodes and tokens


# ------------------------------------------------------------------ what things take
@dataclass(frozen=True)
class Machine:
    """The true seconds, which a policy has to find out."""

    name: str
    costs: Costs
    work: Mapping[str, Work]
    around: float = 0.0  # of each step, outside forward and drafters
    reading: Mapping[str, float] = field(default_factory=dict)  # of a drafter that reads along, for a token of a prompt

    @property
    def tick(self) -> float:
        """A plain step of one request."""
        return self.costs.of(1) + self.around

    def forward(self, plan: Plan, rows: int, reach: float) -> float:
        """Seconds of the target, for so many rows behind so much context in all."""
        return self.costs.of(rows, reach / rows)

    def errand(self, errand: Errand, company: int) -> float:
        """Seconds of a drafter, in this company."""
        return (self.work.get(errand.name) or Work()).of(errand.levels, errand.rows)


def _machine(name: str, points: dict[int, float], reach: float, around: float, **work: tuple[float, float]) -> Machine:
    return Machine(name, Costs(points, reach), {n: Work(*w) for n, w in work.items()}, around)


PRESETS = {
    m.name: m
    for m in (
        _machine(
            "cpu",
            {1: 0.022, 2: 0.025, 3: 0.031, 4: 0.037, 8: 0.072, 16: 0.110, 32: 0.193, 64: 0.363},
            5e-7, 3e-4, ngram=(3e-5, 1e-5), suffix=(5e-5, 3e-5), eagle3=(3e-3, 3e-4),
        ),
        _machine(
            "gpu",
            {1: 0.00114, 2: 0.0012, 8: 0.0012, 16: 0.0013, 64: 0.0016, 256: 0.0035, 1024: 0.011},
            2e-9, 1.5e-4, ngram=(2e-5, 8e-6), suffix=(3e-5, 2e-5), eagle3=(1.1e-4, 1e-6),
        ),
        _machine(
            "node",
            {1: 0.012, 16: 0.0125, 64: 0.0145, 256: 0.026, 1024: 0.085},
            5e-9, 5e-4, ngram=(2e-5, 8e-6), suffix=(3e-5, 2e-5), eagle3=(9e-4, 4e-6),
        ),
    )
}  # fmt: skip


def read_machine(name: str) -> Machine:
    """A preset by its name, or a file as `Costs.to_dict` writes it, with "drafters" and "around"."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise BadInput(f"No costs are called {name!r}: name a file, or one of {', '.join(PRESETS)}.")
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        work = {
            str(n): Work(_seconds(w["seconds_by_level"]), _seconds(w["seconds_by_row"]))
            for n, w in kept.get("drafters", {}).items()
        }
        return Machine(path.stem, Costs.from_dict(kept), work, _seconds(kept.get("around", 0.0)))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise BadInput(f"The costs in {name} cannot be used: {what}.") from None


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise ValueError("seconds are numbers from 0 on")
    return float(value)


# ------------------------------------------------------------------ what drafters would say
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

    def propose(self, name: str, position: int, depth: int) -> Tree:
        """A chain of at most `depth` tokens, `position` tokens into the answer."""
        if name in self._drawn:
            right, grown = self._drawn[name].chain(position, depth)
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
        self._right: list[int] = np.cumprod(coins < chances, 1).sum(1).tolist()
        self._kinds: list[int] | None = (1 + 4 * chances[:, 0]).astype(int).tolist() if weightless else None
        self._sure = None if weightless else (chances**skill.sure).round(4)

    def chain(self, position: int, depth: int) -> tuple[int, Tree]:
        """How many are right, and a chain whose tokens are still to be filled in."""
        depth = min(depth, DEEPEST) if self._found[position] else 0
        out = Tree.chain([0] * depth)
        if self._kinds is not None:
            out.kinds = [self._kinds[position]] * depth
        elif self._sure is not None and depth:
            out.confidence = self._sure[position, :depth].tolist()
        return self._right[position], out


# ------------------------------------------------------------------ policies by name
@dataclass(frozen=True)
class Setting:
    """How large the engine runs, and how much its steps vary."""

    max_num_seqs: int = 32
    max_batch_tokens: int = 512
    noise: float = 0.0


@dataclass(frozen=True)
class Entrant:
    """A policy by its name: none, adaptive, adaptive:NAME+NAME, fixed:NAME:TOKENS, fixed:NAME:NODESxTOKENS (trees), or
    goodput:NAME:TOKENS."""

    name: str
    drafters: tuple[str, ...] | None  # None: all that the trace tells of
    tokens: int = DEEPEST
    kind: str = "fixed"
    nodes: int | None = None  # of a tree

    @staticmethod
    def parse(name: str) -> Entrant:
        kind, *more = name.split(":")
        if name == "none":
            return Entrant(name, ())
        if kind == "adaptive" and len(more) < 2:
            return Entrant(name, tuple(more[0].split("+")) if more else None, kind=kind)
        size = SIZE.fullmatch(more[1]) if len(more) == 2 and more[0] else None
        if (
            size is not None
            and 1 <= int(size[2]) <= DEEPEST
            and (kind == "fixed" or (kind == "goodput" and not size[1]))
        ):
            nodes = int(size[1]) if size[1] else None
            if nodes is None or int(size[2]) <= nodes <= WIDEST:
                return Entrant(name, (more[0],), int(size[2]), kind, nodes)
        raise BadInput(
            f"--policy {name} is not usable: expected none, adaptive, adaptive:NAME+NAME, fixed:NAME:TOKENS, "
            f"fixed:NAME:NODESxTOKENS or goodput:NAME:TOKENS with at most {DEEPEST} tokens, and {WIDEST} nodes."
        )

    def check(self, traces: Sequence[Trace]) -> None:
        """A drafter that no trace tells of is a slip of the pen, not a drafter that never has anything to say."""
        known = {name for trace in traces for name in drafters_of(trace)}
        for name in self.drafters or ():
            if name not in known:
                raise BadInput(f"--policy {self.name}: the traces tell of {', '.join(sorted(known))}, not of {name}.")

    def make(self, choices: Callable[[Request], Sequence[str]], machine: Machine, noise: Noise) -> Policy:
        method = self.drafters[0] if self.drafters else "none"
        config = SpeculativeConfig(method, num_speculative_tokens=self.tokens, num_draft_nodes=self.nodes)
        if self.kind == "fixed":
            return FixedPolicy(config, choices)
        policy = AdaptivePolicy(config, choices) if self.kind == "adaptive" else GoodputPolicy(config, choices)
        policy.costs = Costs({n: _median(noise, machine.costs.of(n)) for n in ROWS}, machine.costs.reach)
        return policy


class Noise:
    """Seconds as a clock shows them: now and then more, now and then less."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._rng = share, random.Random(seed)

    def __call__(self, seconds: float) -> float:
        return seconds * self._rng.lognormvariate(0.0, self._share) if self._share else seconds


def _median(noise: Noise, seconds: float) -> float:
    """As costs are measured at load."""
    return statistics.median(noise(seconds) for _ in range(3))


# ------------------------------------------------------------------ one replay
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


class Replay:
    """One trace, one policy: continuous batching, pieces of prompts, drafts, verdicts; as the engine does it."""

    def __init__(
        self, trace: Trace, answers: Sequence[Answers], entrant: Entrant, machine: Machine, setting: Setting
    ) -> None:
        self.machine, self.setting = machine, setting
        names = drafters_of(trace) if entrant.drafters is None else entrant.drafters
        self._noise = Noise(setting.noise, trace.seed)
        self._coming = deque(enumerate(answers))
        self._answers: dict[str, Answers] = {}
        self._chosen: dict[str, tuple[str, ...]] = {}
        self._names, self._real = names, _real_drafters(trace, names)
        self.policy = entrant.make(lambda r: self._chosen[r.id], machine, self._noise)
        self.clock, self.out = 0.0, Outcome(entrant.name)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def run(self) -> Outcome:
        count = len(self._coming)
        while self._coming or self.waiting or self.running:
            self._arrive()
            self._step()
        self.out.latency /= count
        return self.out

    def _arrive(self) -> None:
        if not self.waiting and not self.running:
            self.clock = max(self.clock, self._coming[0][1].source.arrival)
        while self._coming and self._coming[0][1].source.arrival <= self.clock:
            number, answers = self._coming.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=answers.source.output)
            request = Request(answers.prompt, params, 0, id=str(number))
            self._answers[request.id], self._chosen[request.id] = answers, answers.choices(self._names)
            self._enlist(request)
            self.waiting.append(request)

    def _enlist(self, request: Request) -> None:
        """Heads read along only where the policy says so."""
        company = min(len(self.running) + len(self.waiting) + 1, self.setting.max_num_seqs)
        own = self._chosen[request.id]
        if any(n in HEADS for n in own) and not self.policy.enlist(request, Load(company, 0, 0, len(request.prompt))):
            self._chosen[request.id] = tuple(n for n in own if n not in HEADS)

    def _plan(self) -> Plan:
        plan, room = Plan(), self.setting.max_batch_tokens
        while self.waiting and len(self.running) < self.setting.max_num_seqs:
            self.running.append(self.waiting.popleft())
        for request in self.running:
            piece = min(len(request.tokens) - request.computed, room)
            if piece:
                plan.add(Planned(request, piece, request.computed + piece == len(request.tokens)))
                room -= piece
        return plan

    def _step(self) -> None:
        plan = self._plan()
        trees, errands = self._draft(plan, self._load(plan))
        ready = plan.ready
        rows, reach = self._rows(plan, trees)
        target, drafting = self.machine.forward(plan, rows, reach), sum(e.seconds for e in errands)
        self._account(drafting + self._reading(plan), target, errands)
        verdicts = [self._verdict(p.request, t) for p, t in zip(ready, trees, strict=True)]
        self._commit(plan, trees, verdicts)
        produced = len(verdicts) + sum(len(v.accepted) for v in verdicts)
        self.policy.learn(
            self._measured(target, errands, rows, plan, reach, produced), [p.request for p in ready], verdicts
        )

    def _measured(
        self, target: float, errands: Sequence[Errand], rows: int, plan: Plan, reach: float, produced: int
    ) -> StepTimes:
        """What a clock would have shown. Noise troubles the policy alone: what is compared are true times."""
        seen = tuple(replace(e, seconds=self._noise(e.seconds)) for e in errands)
        drafting, target = sum(e.seconds for e in seen), self._noise(target)
        period = target + drafting + self._noise(self.machine.around)
        return StepTimes(drafting, target, 0, 0, rows, plan.num_prefill_tokens, period, reach, seen, produced)

    def _reading(self, plan: Plan) -> float:
        """Seconds in which drafters read prompts."""
        each = self.machine.reading
        return sum(
            each[name] * p.piece
            for p in plan.parts
            if p.piece > 1
            for name in self._chosen[p.request.id]
            if name in each
        )

    def _load(self, plan: Plan) -> Load:
        return plan.load(len(self.running), len(self.waiting), self.setting.max_batch_tokens)

    def _rows(self, plan: Plan, trees: Sequence[Tree]) -> tuple[int, float]:
        """Of the forward, and the context of all of them together."""
        nodes = iter(trees)
        new = [p.piece + (len(next(nodes)) if p.ready else 0) for p in plan.parts]
        return sum(new), float(sum(n * p.request.computed for n, p in zip(new, plan.parts, strict=True)))

    # -------------------------------------------------------------- drafts
    def _draft(self, plan: Plan, load: Load) -> tuple[list[Tree], list[Errand]]:
        requests = [p.request for p in plan.ready]
        proposals: list[dict[str, Tree]] = [{} for _ in requests]
        errands: list[Errand] = []
        while any(wishes := self.policy.ask(requests, proposals, load)):
            self._propose(plan, self._reserve(plan, wishes), proposals, errands)
        trees = self.policy.choose(requests, proposals, load)
        sizes = self._fit(plan, [len(t) for t in trees])
        return [tree.prune(t, n, len(t)) for t, n in zip(trees, sizes, strict=True)], errands

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
                own[name] = self._ask(name, part.request, depth) if wish.nodes else Tree()
                if wish.nodes > wish.depth and len(own[name]):
                    _widen(own[name], wish.nodes)
                    wide[name] = wide.get(name, 0) + wish.nodes - depth
                own[name].origins = [name] * len(own[name])
                if wish.nodes:
                    levels.setdefault(name, []).append(depth)
        for name, own_levels in levels.items():
            errand = Errand.of(name, own_levels)
            errand = replace(errand, rows=errand.rows + wide.get(name, 0))
            errands.append(replace(errand, seconds=self.machine.errand(errand, len(plan.ready))))

    def _ask(self, name: str, request: Request, depth: int) -> Tree:
        answers = self._answers[request.id]
        if name in self._real and answers.source.is_recorded:
            drafted = self._real[name].propose(View([_view(request, depth)])).trees()[0]
            return tree.prune(drafted, depth, depth)
        return answers.propose(name, request.num_output, depth)

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
        self.out.tokens += request.num_output
        answers = self._answers.pop(request.id)
        self.out.latency += self.clock - answers.source.arrival
        for drafter in self._real.values():
            drafter.release(_view(request, 0))
        self.policy.release(request)

    def _account(self, drafting: float, target: float, errands: Sequence[Errand]) -> None:
        period = drafting + target + self.machine.around
        self.clock += period
        self.out.steps += 1
        self.out.seconds += period
        for part, seconds in (("draft", drafting), ("target", target), ("around", self.machine.around)):
            self.out.times[part] += seconds
        for errand in errands:
            self.out.asked[errand.name] = self.out.asked.get(errand.name, 0) + 1


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


def drafters_of(trace: Trace) -> tuple[str, ...]:
    """All drafters that a trace tells of, those without weights first."""
    free = [n for n in WEIGHTLESS if n in trace.drafters or any(r.is_recorded for r in trace.requests)]
    return (*free, *(n for n in trace.drafters if n not in WEIGHTLESS))


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


# ------------------------------------------------------------------ many
def compare(trace: Trace, entrants: Sequence[Entrant], machine: Machine, setting: Setting) -> list[Outcome]:
    """Plain decoding of a trace, then each policy, with its ratio to that."""
    answers = [Answers(trace, i) for i in range(len(trace.requests))]
    plain = Replay(trace, answers, Entrant.parse("none"), machine, setting).run()
    out = [plain]
    for entrant in entrants:
        if entrant.name == "none":
            continue
        own = Replay(trace, answers, entrant, machine, setting).run()
        own.sooner, own.less = plain.latency / own.latency, plain.seconds / own.seconds
        out.append(own)
    return out


@dataclass(frozen=True)
class Summary:
    """One policy over many traces."""

    policy: str
    traces: int
    median: float
    worst: float
    best: float
    losing: float  # share of traces that lose over 2%, in time to the end of a request and in work alike
    losing_time: float  # in the first alone,
    losing_work: float  # and in the second alone
    sooner: float  # the median for requests alone
    tokens_per_second: float

    @staticmethod
    def of(policy: str, outcomes: Sequence[Outcome]) -> Summary:
        ratios = [o.ratio for o in outcomes]
        losing, time, work = (
            sum(r < 0.98 for r in many) / len(ratios)
            for many in (ratios, [o.sooner for o in outcomes], [o.less for o in outcomes])
        )
        speed = sum(o.tokens for o in outcomes) / sum(o.seconds for o in outcomes)
        sooner = float(np.median([o.sooner for o in outcomes]))
        middle = float(np.median(ratios))
        return Summary(policy, len(ratios), middle, min(ratios), max(ratios), losing, time, work, sooner, speed)
