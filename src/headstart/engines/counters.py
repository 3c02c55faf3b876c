"""What servers tell in Prometheus' form: of speculation, by vLLM's names under whichever prefix, in both spellings; and all
of it under the names of our own server."""

from __future__ import annotations

import math
from collections import defaultdict

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from headstart.bench.records import Counts

NAMES = {  # in the middle of a metric's name
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
}
POSITIONS = "spec_decode_num_accepted_tokens_per_pos"


def read(text: str) -> Counts | None:
    """Sums over all labels; None where a server tells nothing of the kind."""
    known, sums = False, dict.fromkeys(NAMES.values(), 0.0)
    positions: dict[int, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            known |= _plain(family.name) in NAMES  # also where nothing was counted yet
            for sample in family.samples:
                name = _plain(sample.name)
                if name in NAMES and math.isfinite(sample.value):
                    sums[NAMES[name]] += sample.value
                elif name == POSITIONS and math.isfinite(sample.value):
                    positions[int(sample.labels.get("position", -1))] += sample.value
    except ValueError:
        return None
    if not known:
        return None
    told = [int(positions.get(i, 0.0)) for i in range(max(positions, default=-1) + 1)]
    return Counts(**{name: int(value) for name, value in sums.items()}, by_position=told)


def _plain(name: str) -> str:
    """Without a prefix, in the shorter spelling."""
    return name.rpartition(":")[2].removesuffix("_total")


# ------------------------------------------------------------------ under our names
OURS = frozenset(  # that other engines tell too
    [
        *NAMES,
        POSITIONS,
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "request_success",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "engine_steps",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ]
)
THEIRS = {  # llama.cpp's names for some of them
    "tokens_predicted": "generation_tokens",
    "requests_processing": "num_requests_running",
    "requests_deferred": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "n_decode": "engine_steps",
}
WASTED = "spec_decode_wasted_tokens"


def translate(text: str, prefix: str, model: str, drafter: str) -> list[Metric]:
    """What a server tells, under our names where we have one for it, and under its own where not. What does not begin with an
    engine's name is its Python's, and left out, as is when counters were made. Nothing, where it cannot be read."""
    try:
        families = [
            f for f in text_string_to_metric_families(text) if ":" in f.name and not f.name.endswith("_created")
        ]
    except ValueError:
        return []
    out = [_renamed(family, prefix, model, drafter) for family in families]
    if (counts := read(text)) is not None and counts.drafted is not None:
        wasted = CounterMetricFamily(
            f"{prefix}:{WASTED}", "Draft tokens that were not accepted.", labels=["model_name"]
        )
        wasted.add_metric([model], counts.drafted - (counts.accepted or 0))
        out.append(wasted)
    return out


def _renamed(family: Metric, prefix: str, model: str, drafter: str) -> Metric:
    name = _plain(family.name)
    name = THEIRS.get(name, name)
    ours = name in OURS
    old, new = (family.name.removesuffix("_total"), f"{prefix}:{name}") if ours else (family.name, family.name)
    kind = "counter" if ours and family.name.endswith("_total") else family.type  # nobody has said what it is
    labels = {"model_name": model} | ({"drafter": drafter} if name.startswith("spec_decode_") else {})
    out = Metric(new, family.documentation, kind)
    for sample in family.samples:
        own = new + sample.name.removeprefix(old)
        out.add_sample(own, dict(sample.labels) | labels, sample.value, sample.timestamp, sample.exemplar)
    return out
