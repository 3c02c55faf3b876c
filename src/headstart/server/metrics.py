"""What the server tells Prometheus: vLLM's names under a prefix, drafts by drafter, and where the time went.

Steps are counted on the engine's thread (`Meter`), requests on the server's (`Metrics`); both are read when somebody asks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headstart.core import Chunk, Stats, Tree, Verdict
from headstart.policy import StepTimes
from headstart.server.gate import Gate
from headstart.server.logs import account

if TYPE_CHECKING:
    from headstart.llm import LLM

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TIMES = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "From one token to the next, as they are handed out.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first step.",
}
LEFT = 499  # as nginx has it: the client closed the request
Labels = dict[str, str]


class Meter:
    """All steps so far. One thread writes, others read."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.drafts: dict[str, int] = defaultdict(int)  # by drafter
        self.drafted: dict[str, int] = defaultdict(int)
        self.accepted: dict[str, int] = defaultdict(int)
        self.by_position: dict[tuple[str, int], int] = defaultdict(int)

    def __call__(self, times: StepTimes, trees: Sequence[Tree], verdicts: Sequence[Verdict]) -> None:
        self.steps += 1
        self.rows += times.num_tokens
        for tree, verdict in zip(trees, verdicts, strict=False):
            if tree.origins:
                self._count(tree.origins, verdict.accepted)

    def _count(self, origins: Sequence[str], accepted: Sequence[int]) -> None:
        for name in set(origins):
            self.drafts[name] += 1
        for name in origins:
            self.drafted[name] += 1
        for position, node in enumerate(accepted):
            self.accepted[origins[node]] += 1
            self.by_position[origins[node], position] += 1


class Times:
    """How many were how long. Each token counts here, so counting is cheap; adding up is for those who ask."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += count
        self._sum += seconds * count

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """How many were at most so long, and the sum."""
        upper = [*map(floatToGoString, SECONDS), "+Inf"]
        return list(zip(upper, accumulate(self._counts), strict=True)), self._sum


class Metrics(Collector):
    """Everything, by name."""

    def __init__(self, llm: LLM, gate: Gate, model: str, prefix: str = "headstart") -> None:
        self.llm, self.gate, self.prefix, self.meter = llm, gate, prefix, Meter()
        self._model = model
        self._ended: dict[str, int] = defaultdict(int)  # requests, by why
        self._answered: dict[tuple[str, str], int] = defaultdict(int)  # over HTTP, by route and status
        self._sums: dict[str, float] = defaultdict(float)
        self.registry = CollectorRegistry(auto_describe=False)
        self._times = {name: Times() for name in TIMES}
        self.registry.register(self)
        llm.engine.watch = self.meter

    @property
    def generated(self) -> int:
        """Tokens of all answers so far."""
        return int(self._sums["generated"])

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ what requests tell
    def follow(self, count: int) -> Follower:
        """So many answers to one request."""
        return Follower(self, count)

    def whole(self, reason: str, stats: Stats) -> None:
        """An answer that nobody followed: its tokens are taken to have come evenly."""
        self.tokens(stats.first_tokens, stats.time_to_first_token, True)
        if rest := stats.tokens - stats.first_tokens:
            self.tokens(rest, stats.time_total - stats.time_to_first_token, False)
        self.steps(stats.steps)
        self.ended(reason, stats)

    def answered(self, route: str, status: int | None) -> None:
        """Somebody was told this; None: nobody was there any more."""
        self._answered[route, str(status or LEFT)] += 1

    def abandoned(self, count: int, so_far: Iterable[Stats] = ()) -> None:
        """So many did not come to their end: the client left, or a step failed."""
        self._ended["abort"] += count
        account().finish_reasons += ["abort"] * count
        for stats in so_far:
            account().add_stats(stats)

    def ended(self, reason: str, stats: Stats) -> None:
        self._ended[reason] += 1
        account().finish_reasons.append(reason)
        account().add_stats(stats)
        self._sums["preemptions"] += stats.preemptions
        self._sums["prompt"] += stats.prompt_tokens
        self._sums["cached"] += stats.cached_prompt_tokens
        self._sums["compared"] += stats.time_compared
        self._sums["plain"] += stats.time_plain
        self._times["e2e_request_latency_seconds"].add(stats.time_total)
        self._times["request_queue_time_seconds"].add(stats.time_queue)

    def tokens(self, count: int, seconds: float, first: bool) -> None:
        """So many came together, so long after the last ones or after the request."""
        self._sums["generated"] += count
        account().add_tokens(count, seconds, first)
        if first:
            self._times["time_to_first_token_seconds"].add(seconds)
        else:
            self._times["inter_token_latency_seconds"].add(seconds / count, count)

    def steps(self, count: int) -> None:
        """One request got its tokens from so many target forwards."""
        self._sums["steps"] += count

    # ------------------------------------------------------------------ what is told
    def collect(self) -> Iterable[Metric]:
        yield from self._speculation()
        yield from self._engine()
        yield from self._requests()
        for name, text in TIMES.items():
            family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name"])
            family.add_metric([self._model], *self._times[name].told())
            yield family

    def _speculation(self) -> Iterator[Metric]:
        m = self.meter
        for name, text, by in (
            ("spec_decode_num_drafts", "Drafts that were verified.", m.drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", m.drafted),
            ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", m.accepted),
        ):
            yield self._counter(name, text, [({"drafter": d}, n) for d, n in sorted(by.items())], ["drafter"])
        places = [({"drafter": d, "position": str(p)}, n) for (d, p), n in sorted(m.by_position.items())]
        text = "Draft tokens that were accepted, by their place in the draft."
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", text, places, ["drafter", "position"])
        wasted = sum(m.drafted.values()) - sum(m.accepted.values())
        yield self._counter("spec_decode_wasted_tokens", "Draft tokens that were not accepted.", [({}, wasted)])
        parts = [({"part": name}, seconds) for name, seconds in self.llm.engine.seconds.items()]
        yield self._counter("step_seconds", "Seconds of all steps, by what they went into.", parts, ["part"])
        compared = self._sums["compared"]
        told: list[tuple[Labels, float]] = [({}, self._sums["plain"] / compared)] if compared > 0 else []
        text = "Speed-up over plain decoding, against plain steps as this engine has measured them."
        yield self._gauge("spec_decode_speedup_estimate", text, told)

    def _engine(self) -> Iterator[Metric]:
        scheduler, pool = self.llm.engine.scheduler, self.llm.engine.pool
        yield self._gauge("num_requests_running", "Requests that run.", [({}, len(scheduler.running))])
        yield self._gauge("num_requests_waiting", "Requests that wait.", [({}, len(scheduler.waiting))])
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV pages in use.", [({}, pool.num_used / pool.num_pages)]
        )
        yield self._counter(
            "engine_steps", "Steps of the engine; one may be several forwards of one row.", [({}, self.meter.steps)]
        )
        yield self._counter("engine_rows", "Rows of target forwards.", [({}, self.meter.rows)])
        broke = [({"why": why}, n) for why, n in self.llm.engine.setbacks.items()]
        yield self._counter(
            "engine_setbacks", "Steps that broke, or ran out of memory, and began anew.", broke, ["why"]
        )
        yield self._counter("engine_restarts", "Starts of an engine that broke.", [({}, self.llm.health.restarts)])

    def _requests(self) -> Iterator[Metric]:
        s = self._sums
        reasons = [({"finished_reason": why}, n) for why, n in sorted(self._ended.items()) if n]
        yield self._counter("request_success", "Requests that came to an end.", reasons, ["finished_reason"])
        yield self._counter("prompt_tokens", "Tokens of prompts.", [({}, s["prompt"])])
        yield self._counter("generation_tokens", "Tokens of answers.", [({}, s["generated"])])
        text = "Target forwards, each counted for each request that it brought tokens."
        yield self._counter("request_steps", text, [({}, s["steps"])])
        yield self._counter("prefix_cache_queries", "Prompt tokens that were looked for in KV.", [({}, s["prompt"])])
        yield self._counter("prefix_cache_hits", "Prompt tokens that were found there.", [({}, s["cached"])])
        yield self._counter("num_preemptions", "Requests that were set aside for others.", [({}, s["preemptions"])])
        told = [({"route": route, "status": status}, n) for (route, status), n in sorted(self._answered.items())]
        yield self._counter("http_requests", "Requests over HTTP, refused ones too.", told, ["route", "status"])
        yield self._counter(
            "requests_turned_away", "Requests that found the queue full.", [({}, self.gate.turned_away)]
        )

    def _counter(self, name: str, text: str, found: Iterable[tuple[Labels, float]], more: Sequence[str] = ()) -> Metric:
        return self._family(CounterMetricFamily, name, text, found, more)

    def _gauge(self, name: str, text: str, found: Iterable[tuple[Labels, float]], more: Sequence[str] = ()) -> Metric:
        return self._family(GaugeMetricFamily, name, text, found, more)

    def _family(
        self, kind: Any, name: str, text: str, found: Iterable[tuple[Labels, float]], more: Sequence[str]
    ) -> Metric:
        family = kind(f"{self.prefix}:{name}", text, labels=["model_name", *more])
        for labels, value in found:
            family.add_metric([self._model, *(labels[k] for k in more)], value)
        return family


class Follower:
    """The tokens of one request's answers, as they come."""

    def __init__(self, metrics: Metrics, count: int) -> None:
        self._metrics, self._left = metrics, count
        self._last: dict[int, float] = {}
        self._stats: dict[int, Stats] = {}  # so far, of those that have not ended
        self._began = time.perf_counter()

    def add(self, index: int, chunk: Chunk) -> None:
        now = time.perf_counter()
        if chunk.token_ids:
            before = self._last.get(index)
            self._metrics.tokens(
                len(chunk.token_ids), now - (self._began if before is None else before), before is None
            )
            self._last[index] = now
        if chunk.stats is not None:
            self._metrics.steps(chunk.stats.steps - (self._stats[index].steps if index in self._stats else 0))
            self._stats[index] = chunk.stats
        if chunk.finish_reason is not None and chunk.stats is not None:
            self._left -= 1
            self._metrics.ended(chunk.finish_reason, self._stats.pop(index))

    def close(self) -> None:
        self._metrics.abandoned(self._left, self._stats.values())
        self._left = 0
