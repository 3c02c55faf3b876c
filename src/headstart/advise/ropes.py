"""How far a model's positions reach: what it was trained on, how its RoPE is stretched, and what that means for a pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.advise.facts import GGUF, Facts
from headstart.models.load import UNSTEADY

PLAIN = ("default", "none", "mrope", "")
STRETCHED = (
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "su",
)  # kinds that reach beyond what was trained; llama3 was trained on it
SPELLED = {"su": "longrope"}  # as older configs name it


@dataclass(frozen=True)
class Rope:
    kind: str  # as transformers names it
    factor: float = 1.0
    original: int = 0  # positions before it was stretched; 0: not told


def rope_of(model: Facts) -> Rope:
    """The one of its layers, or of those that look at everything."""
    if model.form == GGUF:
        return _of_gguf(model.config, str(model.config.get("general.architecture", "")))
    inner = model.config.get("text_config") or model.config.get("transformer_layer_config")
    text: Mapping[str, Any] = {**model.config, **inner} if isinstance(inner, dict) else model.config
    told = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(told, dict) and isinstance(told.get("full_attention"), dict):
        told = told["full_attention"]
    if not isinstance(told, dict):
        return Rope("default")
    kind = str(told.get("rope_type") or told.get("type") or "default")
    original = told.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    return Rope(SPELLED.get(kind, kind), _positive(told.get("factor"), 1.0), int(_positive(original, 0.0)))


def _of_gguf(told: Mapping[str, Any], kind: str) -> Rope:
    get = lambda key: told.get(f"{kind}.rope.scaling.{key}")  # noqa: E731
    original = _positive(get("original_context_length"), 0.0)
    return Rope(str(get("type") or "default"), _positive(get("factor"), 1.0), int(original))


def _positive(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1 << 40 else otherwise


def trained(model: Facts) -> int:
    """Positions that it was trained on, as far as its config tells; 0: it does not."""
    rope = rope_of(model)
    if rope.kind not in STRETCHED:
        return model.max_len
    return rope.original or (round(model.max_len / rope.factor) if rope.kind in ("linear", "yarn") else model.max_len)


def served(model: Facts) -> int:
    """Positions that Headstart serves with torch: it does not stretch where that would depend on others in the batch."""
    rope = rope_of(model)
    return min(model.max_len, rope.original) if rope.kind in UNSTEADY and rope.original else model.max_len


# ------------------------------------------------------------------ what is worth to be told
def doubts(model: Facts) -> list[str]:
    """What is wrong with a config's RoPE."""
    rope, out = rope_of(model), []
    if model.form != GGUF and rope.kind not in PLAIN and not _known(rope.kind):
        out.append(f"{model.name} has RoPE of the type {rope.kind!r}, which the installed transformers does not know.")
    reach = round(rope.original * rope.factor)
    if rope.kind in ("linear", "yarn") and 0 < reach * 1.01 < model.max_len:
        promised = f"{model.name} promises {model.max_len:,} positions"
        out.append(f"{promised}, but its RoPE ({rope.kind}) is stretched to {reach:,}: beyond that it goes wrong.")
    return out


def _known(kind: str) -> bool:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return kind in ROPE_INIT_FUNCTIONS


def apart(target: Facts, draft: Facts) -> list[str]:
    """Where a draft or head knows shorter texts than its target, or was trained on shorter ones."""
    what = "head" if draft.head else "draft"
    if 0 < draft.max_len < target.max_len:
        lengths = f"{draft.max_len:,} tokens, the target {target.max_len:,}"
        return [f"the {what} knows texts of {lengths}: beyond that, drafts stop or go wrong."]
    ours, theirs = trained(target), trained(draft)
    if 0 < theirs < ours and theirs < draft.max_len:
        how = f"its RoPE ({rope_of(draft).kind}) is stretched"
        return [f"the {what} was trained on texts of {theirs:,} tokens, the target on {ours:,}: beyond that {how}, "
                "and less is accepted."]  # fmt: skip
    return []


def shortened(model: Facts) -> list[str]:
    """Where Headstart serves fewer positions than a config names."""
    if not 0 < served(model) < model.max_len:
        return []
    kind = rope_of(model).kind
    return [
        f"{model.name} gets {served(model):,} of its {model.max_len:,} positions: its {kind} RoPE depends on the batch."
    ]
