"""From what a user said, or `tune` found out, to a wish: models are looked at where they are here, methods inferred."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headstart.advise.check import plan_head
from headstart.advise.decision import Decision, read
from headstart.advise.export.wish import ASKED, Model, Serving, Wish
from headstart.advise.facts import GGUF, Facts, look
from headstart.config import (
    ALIASES,
    HEADS,
    METHOD_ALIASES,
    NO_EFFECT,
    OWN_OPTIONS,
    WIDE_TOKENS,
    SpeculativeConfig,
    parse_speculative,
)
from headstart.errors import BadInput, ConfigError, HeadstartError, ModelError, nearest

TOKENS = 3  # of a draft, where nobody says
USUAL = "a usual start, longer drafts pay where most tokens are accepted; headstart tune finds the number"
WIDE = "a bound: how much is drafted goes by what was found"
LOOKUP = "Headstart's own: short matches draft more often, and a wrong draft costs little"
PARALLEL = "draft_tensor_parallel_size"


@dataclass(frozen=True)
class Order:
    """What the command line says."""

    target: str | None = None
    draft: str | None = None
    head: str | None = None
    method: str | None = None
    tuned: Path | None = None
    tokens: int | None = None
    tree: bool = False
    serving: Serving = field(default_factory=Serving)
    version: tuple[int, ...] | None = None
    folder: str = "."


def wish_of(order: Order) -> Wish:
    tuned = read(order.tuned) if order.tuned is not None else None
    name = order.target or (tuned.target if tuned is not None else "")
    if not name:
        raise BadInput("Name the target: --target MODEL, or --tuned with a file that names it.")
    notes = _other_target(order, tuned)
    target = _model(name, notes)
    spoken = _spoken(order, tuned)
    drafter = _model(spoken["model"], notes) if isinstance(spoken.get("model"), str) else None
    if order.head is not None and "method" not in spoken:
        spoken["method"] = _kind(target, drafter, notes)
    if drafter is not None and drafter.facts is not None:
        _told_apart(drafter.facts, spoken.get("method") in HEADS)
    reasons = _reasons(order, tuned)
    return _wish(order, target, drafter, spoken, reasons, notes)


def _wish(
    order: Order,
    target: Model,
    drafter: Model | None,
    spoken: dict[str, Any],
    reasons: dict[str, str],
    notes: list[str],
) -> Wish:
    extra = {k: v for k, v in spoken.items() if k in NO_EFFECT and v not in (None, False)}
    serving = _split(order.serving, extra.pop(PARALLEL, None))
    try:
        _complete(spoken, reasons)
        config, _ = parse_speculative(spoken or None)
        config = SpeculativeConfig() if not config.num_speculative_tokens else config
    except ConfigError as error:
        raise BadInput(str(error)) from error
    given = {ALIASES.get(k, k) for k, v in spoken.items() if v is not None} - {*NO_EFFECT, "parallel_drafting"}
    values = {name: getattr(config, name) for name in sorted(given)}
    if config.verification == "walk" and values.pop("verification", None) is not None:
        notes.append(
            "verification=walk is Headstart's own: elsewhere a seed may give other text with drafts than without."
        )
    if config.method == "none":
        values, drafter = {}, None
        notes.append(f"Without speculation: {reasons.get('method') or _plainly(order)}.")
    return Wish(target, drafter, config, values, extra, reasons, serving, order.version, order.folder, tuple(notes))


def _plainly(order: Order) -> str:
    if order.method is not None:
        return ASKED
    return f"{order.tuned} says so" if order.tuned is not None else "no --draft, --head, --method or --tuned was given"


# ------------------------------------------------------------------ models
def _model(name: str, notes: list[str]) -> Model:
    """Looked at where it is on this machine, else taken as it is."""
    try:
        return Model(name, look(name))
    except ModelError:
        if Path(name).expanduser().exists():
            raise
    notes.append(f"{name} is not on this machine, so nothing was checked of it: its name is taken as it is.")
    return Model(name)


def _told_apart(facts: Facts, head: bool) -> None:
    """A head from a draft model. A GGUF file does not tell which it is."""
    if facts.form == GGUF:
        facts.head = head
    elif facts.head and not head:
        raise BadInput(f"{facts.name} is a head, and no model by itself: name it with --head.")
    elif head and not facts.head:
        raise BadInput(f"{facts.name} is a model by itself, and no head: name it with --draft.")


def _kind(target: Model, head: Model | None, notes: list[str]) -> str:
    """Of a head, by its config and tensors."""
    facts = head.facts if head is not None else None
    if target.facts is not None and facts is not None and (found := _read_kind(target.facts, facts)) is not None:
        return found
    notes.append("The head was taken for EAGLE-3: say --method where it is of another kind.")
    return "eagle3"


def _read_kind(target: Facts, head: Facts) -> str | None:
    try:
        return plan_head(target, head).method
    except (HeadstartError, OSError):
        return None  # check says what is wrong with it


# ------------------------------------------------------------------ what was said
def _spoken(order: Order, tuned: Decision | None) -> dict[str, Any]:
    """The speculative config: of the file, with what the command line says beside it."""
    if order.draft is not None and order.head is not None:
        raise BadInput("--draft and --head are two ways to speculate: leave one of them out.")
    method = _method(order)
    model = order.draft or order.head
    out = dict(tuned.speculative) if tuned is not None else {}
    if tuned is not None and (method is not None or model is not None):
        _agrees(order, tuned, method)
    if method is not None:
        out["method"] = method
    elif order.draft is not None:
        out["method"] = "draft_model"
    if model is not None:
        out["model"] = model
    named = out.get("method")
    if named == "draft_model" and "model" not in out:
        raise BadInput("--method draft_model needs the model that drafts: add --draft MODEL.")
    if named in HEADS and named != "mtp" and "model" not in out:
        raise BadInput(f"--method {named} needs the head: add --head FOLDER.")
    return _lengths(order, out)


def _lengths(order: Order, out: dict[str, Any]) -> dict[str, Any]:
    speculates = bool(out) or order.head is not None
    if not speculates and (order.tokens is not None or order.tree):
        flag = "--tree" if order.tree else "--num-speculative-tokens"
        raise BadInput(f"{flag} has no effect without speculation: add --draft, --head or --method.")
    if order.tokens is not None:
        out = {k: v for k, v in out.items() if ALIASES.get(k, k) != "num_speculative_tokens"}
        out["num_speculative_tokens"] = order.tokens
    if order.tree:
        out["tree"] = True
    return out


def _method(order: Order) -> str | None:
    if order.method is None:
        return None
    method = METHOD_ALIASES.get(order.method, order.method)
    if method not in OWN_OPTIONS:
        raise BadInput(f"--method {order.method} is not known.{nearest(order.method, OWN_OPTIONS)}")
    if order.draft is not None and method != "draft_model":
        raise BadInput(f"--draft has no effect with --method {method}: leave one of the two out.")
    if order.head is not None and method not in HEADS:
        raise BadInput(f"--head has no effect with --method {method}: leave one of the two out.")
    return method


def _agrees(order: Order, tuned: Decision, method: str | None) -> None:
    """A path may differ from the one that was tuned with, but not the kind of drafts."""
    was = tuned.config.method
    now = method or ("draft_model" if order.draft is not None else None)
    if (now is not None and now != was) or (order.head is not None and was not in HEADS):
        said = "--method" if order.method else "--draft" if order.draft else "--head"
        raise BadInput(f"{order.tuned} is for method {was!r}, and {said} says otherwise: leave one of the two out.")


def _complete(spoken: dict[str, Any], reasons: dict[str, str]) -> None:
    """What other engines want to be told, though Headstart does not."""
    names = {ALIASES.get(key, key) for key, value in spoken.items() if value is not None}
    method = METHOD_ALIASES.get(str(spoken.get("method")), spoken.get("method"))
    if not spoken or method == "none":
        return
    config = parse_speculative(spoken)[0]
    if "num_speculative_tokens" not in names:
        spoken["num_speculative_tokens"], reasons["num_speculative_tokens"] = _tokens(config)
    reasons |= dict.fromkeys({"prompt_lookup_min", "prompt_lookup_max"} - names, LOOKUP)


def _tokens(config: SpeculativeConfig) -> tuple[int, str]:
    """How deep drafts may reach where nobody says, and why."""
    if config.static_tree is not None:
        return config.num_speculative_tokens, "as deep as the tree"
    if config.batch_size_schedule:
        return max(tokens for _, _, tokens in config.batch_size_schedule), "the longest of the schedule"
    return (WIDE_TOKENS, WIDE) if config.method == "suffix" else (TOKENS, USUAL)


def _split(serving: Serving, tuned: Any) -> Serving:
    if tuned is None or serving.draft_tensor_parallel_size is not None:
        return serving
    return replace(serving, draft_tensor_parallel_size=tuned)


def _reasons(order: Order, tuned: Decision | None) -> dict[str, str]:
    """Of the file, by our names; what the command line says is as asked."""
    if tuned is None:
        return {}
    every: Mapping[str, Any] = dict.fromkeys(tuned.speculative, f"as {order.tuned} has it") | dict(tuned.reasons)
    out = {ALIASES.get(key, key): str(why) for key, why in every.items()}
    for name, said in (("num_speculative_tokens", order.tokens), ("model", order.draft or order.head)):
        out |= {name: ASKED} if said is not None else {}
    return out


def _other_target(order: Order, tuned: Decision | None) -> list[str]:
    if tuned is None or order.target is None or order.target == tuned.target:
        return []
    return [f"{order.tuned} was tuned for {tuned.target}, which may want other numbers than {order.target}."]
