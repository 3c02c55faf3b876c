"""What servers tell of speculation in Prometheus' form: vLLM's names, under whichever prefix, in both spellings."""

from __future__ import annotations

import math
from collections import defaultdict

from headstart.bench.records import Counts

NAMES = {  # in the middle of a metric's name
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
}
POSITIONS = "spec_decode_num_accepted_tokens_per_pos"


def read(text: str) -> Counts | None:
    """Sums over all labels; None where a server tells nothing of the kind."""
    from prometheus_client.parser import text_string_to_metric_families

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
