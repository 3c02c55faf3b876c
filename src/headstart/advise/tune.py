"""Which way to draft, and how much: predicted for many settings from what was watched, then tried for the best few.

A prediction is the simulator's: the user's texts, what drafts would have brought behind every token of them, and what steps
take on this device. So it knows how prompts, batches and lengths of drafts work together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headstart.advise.decision import Decision
from headstart.advise.watched import Device, Watched, measure, watch, weightless
from headstart.bench.methods import Method
from headstart.bench.own import OwnEngine, encode
from headstart.bench.records import BASELINE, Point, Result
from headstart.bench.run import Plan
from headstart.bench.run import run as run_bench
from headstart.bench.summary import summarise
from headstart.bench.workloads import Workload
from headstart.config import AUTO
from headstart.drafters import WEIGHTLESS
from headstart.errors import BadInput
from headstart.policy.periods import Mode
from headstart.shapes import GROWN
from headstart.simulate.answers import DEEPEST
from headstart.simulate.entrants import Entrant
from headstart.simulate.machines import Machine
from headstart.simulate.many import compare
from headstart.simulate.replay import Setting
from headstart.traffic import Trace

if TYPE_CHECKING:
    from headstart.models.load import Loaded

CHAINS = {"ngram": (2, 3, 4, 6, 8), "suffix": (4, 8, 16)}
MODEL_CHAINS = (1, 2, 3, 4, 5, 6, 8)  # of heads and draft models
TREES = ((8, 4), (15, 5))  # nodes and levels
PAYS = 1.02  # times plain decoding, from which on a setting is worth it
Advance = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """What is to be tuned."""

    target: str
    workload: Workload
    batches: tuple[int, ...] = (1, 4)
    tokens: int = 64
    rounds: int = 2
    tries: int = 4  # settings that are really run
    methods: tuple[str, ...] = ("ngram", "suffix")  # without weights that are looked at
    draft: Mapping[str, Any] = field(default_factory=dict)  # method and model of what drafts with weights


@dataclass(frozen=True)
class Guess:
    """A setting at one number of requests: times plain decoding."""

    mode: Mode
    at_once: int
    predicted: float
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """By how much of what was measured the prediction is off."""
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def best_known(self) -> float:
        return self.predicted if self.measured is None else self.measured


@dataclass
class Tuned:
    guesses: list[Guess]
    acceptance: dict[str, list[float]]  # by setting that was watched: how often drafts are right to depth 1, 2, ...
    auto: dict[int, float] = field(default_factory=dict)  # what `auto` makes by itself, measured
    plain: dict[int, float] = field(default_factory=dict)  # tokens per second
    same_text: bool = True

    def at(self, at_once: int) -> list[Guess]:
        return [g for g in self.guesses if g.at_once == at_once]


# ------------------------------------------------------------------ settings
def config_of(mode: Mode, draft: Mapping[str, Any]) -> dict[str, Any]:
    """As Headstart and vLLM take it; trees are Headstart's."""
    own = {"method": mode.drafter, "num_speculative_tokens": mode.depth}
    own |= {"model": draft["model"]} if draft.get("method") == mode.drafter and "model" in draft else {}
    return own | (GROWN | {"num_draft_nodes": mode.nodes} if mode.branches else {})


def modes_of(task: Task) -> list[Mode]:
    """All that is looked at."""
    named = [Mode(name, n, n) for name in task.methods for n in CHAINS[name]]
    if not task.draft:
        return named
    name = str(task.draft["method"])
    return [*named, *(Mode(name, n, n) for n in MODEL_CHAINS), *(Mode(name, *size) for size in TREES)]


# ------------------------------------------------------------------ predicting
def predict(
    trace: Trace, modes: Iterable[Mode], batches: Sequence[int], machine: Callable[[Mode], Machine]
) -> list[Guess]:
    """Each setting over this trace, as if all requests had come at once."""
    found = []
    for mode in modes:
        entrant = Entrant.parse(f"fixed:{mode.drafter}:{mode.size}")
        for at_once in batches:
            _, own = compare(trace, [entrant], machine(mode), Setting(at_once))
            found.append(Guess(mode, at_once, own.less))
    return found


def acceptance(trace: Trace, name: str) -> list[float]:
    """How often drafts are right to depth 1, 2, ..., behind every token."""
    seen = [s for r in trace.requests for s in r.seen.get(name, ())]
    depth = max((len(s.right) for s in seen), default=0)
    return [sum(len(s.right) > k and all(s.right[: k + 1]) for s in seen) / len(seen) for k in range(depth)]


def _guess(loaded: Loaded, task: Task, texts: list[list[int]], advance: Advance) -> Tuned:
    advance("measuring this device")
    devices = _devices(loaded, task, texts)
    out = Tuned([], {})
    modes = [m for m in modes_of(task) if devices[m.drafter].knows(m)]
    trace: Trace | None = None
    for name, own in _by_watch(modes).items():
        advance(f"watching {name}")
        watched = _watch(loaded, task, own, texts)
        trace = trace or watched.trace
        out.acceptance[name] = acceptance(watched.trace, own[0].drafter)
        advance(f"predicting {name}")
        out.guesses += predict(watched.trace, own, task.batches, _machines(devices[own[0].drafter], watched))
    if trace is None:  # texts are needed all the same
        advance("answering")
        trace = watch(loaded, {"method": "ngram"}, texts, task.tokens, max(task.batches)).trace
    for mode in (m for m in modes if m.drafter in WEIGHTLESS):
        advance(f"predicting {mode}")
        work = weightless(trace, mode.drafter, mode.depth)
        out.guesses += predict(trace, [mode], task.batches, _machines(devices[mode.drafter], Watched(trace, work, 0.0)))
    return out


def _devices(loaded: Loaded, task: Task, texts: list[list[int]]) -> dict[str, Device]:
    """What steps take, by drafter. Where whole steps are timed and there is no head, each drafter has to be by itself."""
    if task.draft:
        spec = {"method": AUTO, "model": task.draft["model"]}
        device = measure(loaded, spec, texts, task.tokens, task.batches)
        return dict.fromkeys((*task.methods, str(task.draft["method"])), device)
    out: dict[str, Device] = {}
    for name in task.methods:
        device = measure(loaded, {"method": name, "policy": "adaptive"}, texts, task.tokens, task.batches)
        if device.periods is None:
            return dict.fromkeys(task.methods, device)
        out[name] = device
    return out


def _by_watch(modes: Iterable[Mode]) -> dict[str, list[Mode]]:
    """Those with weights that one run tells of: all chains together, each tree by itself."""
    out: dict[str, list[Mode]] = {}
    for mode in modes:
        if mode.drafter not in WEIGHTLESS:
            out.setdefault(_family(mode), []).append(mode)
    return out


def _watch(loaded: Loaded, task: Task, modes: Sequence[Mode], texts: list[list[int]]) -> Watched:
    deepest = max(modes, key=lambda m: m.depth)
    return watch(loaded, config_of(deepest, task.draft), texts, task.tokens, max(task.batches))


def _machines(device: Device, watched: Watched) -> Callable[[Mode], Machine]:
    return lambda mode: device.with_drafter(mode, watched.work, watched.reading)


# ------------------------------------------------------------------ trying
def best(guesses: Sequence[Guess], count: int) -> list[Mode]:
    """The settings that promise most: the best at each number of requests, then the next best anywhere."""
    order = sorted(guesses, key=lambda g: -g.predicted)
    firsts = [
        max((g for g in guesses if g.at_once == n), key=lambda g: g.predicted) for n in {g.at_once for g in guesses}
    ]
    found = dict.fromkeys(g.mode for g in (*sorted(firsts, key=lambda g: -g.predicted), *order))
    return list(found)[:count]


def _try(loaded: Loaded, task: Task, out: Tuned, advance: Advance) -> None:
    """The best few and `auto`, in turns with plain decoding."""
    chosen = best(out.guesses, task.tries)
    auto = {"method": AUTO} | ({"model": task.draft["model"]} if task.draft else {})
    methods = [Method(BASELINE), Method(AUTO, auto), *(Method(str(m), config_of(m, task.draft)) for m in chosen)]
    points = tuple(Point(n, 0.0) for n in task.batches)
    plan = Plan(task.workload, points, task.rounds, task.tokens)
    result = Result({}, {}, {})
    run_bench(OwnEngine(loaded), methods, plan, result, lambda kept: None, advance)
    found = {(s.method, s.point.concurrency): s for s in summarise(result)}
    for n in task.batches:
        out.plain[n] = found[BASELINE, n].tokens_per_second
        out.auto[n] = found[AUTO, n].tokens_per_second / out.plain[n]
    out.guesses = [_held(g, found, out.plain) for g in out.guesses]
    out.same_text = all(s.identical in (None, 1.0) for s in found.values())


def _held(guess: Guess, found: Mapping[tuple[str, int], Any], plain: Mapping[int, float]) -> Guess:
    """Against what was measured, if it was."""
    own = found.get((str(guess.mode), guess.at_once))
    return guess if own is None else replace(guess, measured=own.tokens_per_second / plain[guess.at_once])


# ------------------------------------------------------------------ deciding
def decide(target: str, tuned: Tuned, draft: Mapping[str, Any], batches: Sequence[int]) -> Decision:
    """One method, and how much of it at which number of requests; nothing, where nothing pays."""
    by_mode: dict[Mode, dict[int, Guess]] = {}
    for guess in tuned.guesses:
        by_mode.setdefault(guess.mode, {})[guess.at_once] = guess
    tried = {m: own for m, own in by_mode.items() if any(g.measured is not None for g in own.values())} or by_mode
    if not tried:
        return Decision(target)
    ways = {family: _way(family, tried, batches) for family in {_family(m) for m in tried}}
    family = max(ways, key=lambda f: _mean(ways[f].values()))
    way = {n: g for n, g in ways[family].items() if g is not None}
    if not way:
        return Decision(target, {}, {"method": "nothing pays here: plain decoding is the fastest."})
    config = config_of(max((g.mode for g in way.values()), key=lambda m: m.nodes), draft)
    reasons = {"method": _why(way), "num_speculative_tokens": f"the most that pays, of {len(tried)} settings."}
    schedule = _schedule(ways[family], batches)
    if len({nodes for _, _, nodes in schedule}) > 1:
        config["num_speculative_tokens_per_batch_size"] = schedule
        reasons["num_speculative_tokens_per_batch_size"] = "as many tokens as pay at each number of requests."
    return Decision(target, config, reasons)


def _family(mode: Mode) -> str:
    """Settings that one config can change between: chains of one method. A tree is by itself, or off."""
    return str(mode) if mode.branches else mode.drafter


def _way(family: str, tried: Mapping[Mode, Mapping[int, Guess]], batches: Sequence[int]) -> dict[int, Guess | None]:
    """The best of these settings at each number of requests, where it pays."""
    out: dict[int, Guess | None] = {}
    for n in batches:
        own = [guesses[n] for mode, guesses in tried.items() if _family(mode) == family and n in guesses]
        first = max(own, key=lambda g: g.best_known, default=None)
        out[n] = first if first is not None and first.best_known >= PAYS else None
    return out


def _mean(guesses: Iterable[Guess | None]) -> float:
    gains = [1.0 if g is None else g.best_known for g in guesses]
    return math.exp(sum(map(math.log, gains)) / len(gains))


def _schedule(way: Mapping[int, Guess | None], batches: Sequence[int]) -> list[list[int]]:
    """From, to, nodes: what holds for a number of requests holds up to half-way to the next, by factors."""
    out, low = [], 1
    for n, after in zip(batches, [*batches[1:], None], strict=True):
        high = int(math.sqrt(n * after)) if after is not None else 1 << 16
        guess = way[n]
        out.append([low, high, guess.mode.nodes if guess is not None else 0])
        low = high + 1
    return out


def _why(way: Mapping[int, Guess]) -> str:
    parts = [
        f"{g.best_known:.2f} times plain decoding at {n} at once, {'measured' if g.measured is not None else 'predicted'}"
        for n, g in way.items()
    ]
    return "; ".join(parts) + "."


# ------------------------------------------------------------------ all of it
def tune(loaded: Loaded, task: Task, advance: Advance = lambda what: None) -> tuple[Tuned, Decision]:
    texts = [encode(loaded.tokenizer, prompt) for prompt in task.workload.prompts]
    if max(map(len, texts)) + task.tokens + DEEPEST > loaded.max_len:
        raise BadInput(
            f"{task.target} takes texts of {loaded.max_len} tokens: choose shorter prompts or a smaller --max-tokens."
        )
    out = _guess(loaded, task, texts, advance)
    if task.tries and out.guesses:
        _try(loaded, task, out, advance)
    return out, decide(task.target, out, task.draft, task.batches)


def from_traffic(trace: Trace, machine: Machine, batches: Sequence[int], methods: Sequence[str]) -> Tuned:
    """Without a model: drafters that need none are run on the tokens of recorded traffic."""
    modes = [Mode(name, n, n) for name in methods for n in CHAINS[name]]
    trace = replace(trace, requests=tuple(replace(r, arrival=0.0) for r in trace.requests))
    recorded = [name for name in trace.drafters if name not in WEIGHTLESS]
    modes += [Mode(name, n, n) for name in recorded for n in MODEL_CHAINS if n <= _recorded_depth(trace, name)]
    return Tuned(predict(trace, modes, batches, lambda mode: machine), {n: acceptance(trace, n) for n in recorded})


def _recorded_depth(trace: Trace, name: str) -> int:
    """Of its deepest draft: what lies beyond was never seen."""
    return max((len(s.right) for r in trace.requests for s in r.seen.get(name, ())), default=0)


def parts(task: Task) -> int:
    """Of the work, as `tune` tells them: what is done, and of what is tried each warm-up and each lap."""
    modes, tried = modes_of(task), task.tries + 2
    watched = 2 * len(_by_watch(modes)) or 1
    laps = tried + tried * task.rounds * len(task.batches) if task.tries else 0
    return 1 + watched + sum(m.drafter in WEIGHTLESS for m in modes) + laps
