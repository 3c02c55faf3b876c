"""What a draft model or the folder of a head is called in a speculative config."""

from __future__ import annotations

from typing import Any

from headstart.advise.check import plan_head
from headstart.advise.facts import Facts


def speculation(target: Facts, draft: Facts) -> dict[str, Any]:
    """The method and its model. A head that does not fit the target is an error."""
    method = plan_head(target, draft).method if draft.head else "draft_model"
    return {"method": method, "model": str(draft.path) if draft.head else draft.name}
