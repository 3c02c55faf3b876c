"""What a draft model or the folder of a head is called in a speculative config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.advise.facts import Facts

if TYPE_CHECKING:
    from headstart.models.heads.dialects import Plan


def head_plan(target: Facts, head: Facts) -> Plan:
    """A head as the loader sees it: dialect, sizes, and a place for every tensor. What does not fit is an error."""
    import torch

    from headstart.models.heads.dialects import Source, TargetFacts, make_plan
    from headstart.models.heads.load import find_places
    from headstart.models.heads.store import open_store

    matrix = torch.empty(target.vocab_size, target.hidden, device="meta")  # which some heads share
    facts = TargetFacts(target.name, target.hidden, target.vocab_size, target.layers, matrix, matrix)
    source = Source(head.path, dict(head.config), open_store(Path(head.path)).shapes, facts)
    plan = make_plan(source)
    find_places(source, plan)
    return plan


def speculation(target: Facts, draft: Facts) -> dict[str, Any]:
    """The method and its model."""
    method = head_plan(target, draft).head.spec.method if draft.head else "draft_model"
    return {"method": method, "model": str(draft.path) if draft.head else draft.name}
