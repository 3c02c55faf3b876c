"""A target with its way to speculate, in the words of other engines. One module for each engine; `export` is the way in."""

from __future__ import annotations

from dataclasses import replace

from headstart.advise.check import STOP, WARN, Pair, Report, check
from headstart.advise.export import llamacpp, ollama, sglang, tabbyapi, triton, trtllm, vllm
from headstart.advise.export.order import Order, wish_of
from headstart.advise.export.wish import Engine, Exported, Wish
from headstart.config import SpeculativeConfig
from headstart.errors import BadInput, nearest

ANSWER = "use_heterogeneous_vocab"  # a key of vLLM's that is written where check asks for it
ENGINES: dict[str, Engine] = {
    "vllm": vllm.ENGINE,
    "llamacpp": llamacpp.ENGINE,
    "tabbyapi": tabbyapi.ENGINE,
    "triton": triton.ENGINE,
    "sglang": sglang.ENGINE,
    "trtllm": trtllm.ENGINE,
    "ollama": ollama.ENGINE,
}


def export(name: str, order: Order, force: bool = False) -> Exported:
    """What was ordered, as this engine takes it. What stops it there is an error, or with `force` a note."""
    if (engine := ENGINES.get(name)) is None:
        raise BadInput(f"{name} is not an engine that can be exported to.{nearest(name, ENGINES)}")
    if order.version is not None and not engine.versions:
        known = ", ".join(key for key, one in ENGINES.items() if one.versions)
        raise BadInput(f"--for-version has no effect with {name}: one spelling is known, and several for {known}.")
    wish = wish_of(order)
    report = _report(wish)
    stops = [*_methods(engine, wish), *_against(engine, wish, report)]
    if stops and not force:
        raise BadInput(f"{engine.title} will not run this (--force exports it all the same): {' '.join(stops)}")
    wish = _without(wish) if wish.speculates and wish.method not in engine.methods else wish
    notes = (*wish.notes, *stops, *(_found(engine, report, WARN) if report else ()), *engine.unsaid(wish))
    return engine.write(replace(wish, notes=tuple(dict.fromkeys(notes))))


def _methods(engine: Engine, wish: Wish) -> list[str]:
    if not wish.speculates or wish.method in engine.methods:
        return []
    has = " and ".join(filter(None, [", ".join(list(engine.methods)[:-1]), list(engine.methods)[-1]]))
    return [f"{engine.title} has no method {wish.method!r}, only {has}."]


def _without(wish: Wish) -> Wish:
    """Plain decoding, where the method is unknown there."""
    note = f"exported without speculation, as {wish.method!r} cannot be said."
    return replace(wish, config=SpeculativeConfig(), drafter=None, given={}, extra={}, notes=(*wish.notes, note))


def _report(wish: Wish) -> Report | None:
    """What check says of it, where the target is here."""
    if wish.target.facts is None:
        return None
    return check(Pair(wish.target.facts, wish.drafter.facts if wish.drafter is not None else None))


def _found(engine: Engine, report: Report, level: str) -> list[str]:
    own = [f for v in report.verdicts if v.engine == engine.rules for f in v.findings]
    return [f.text for f in (*report.common, *own) if f.level == level]


def _against(engine: Engine, wish: Wish, report: Report | None) -> list[str]:
    """What stops it, but for what is answered by a key that is written."""
    if report is None:
        return []
    stops = [*_found(engine, report, STOP), *engine.objections(report)]
    return [text for text in stops if not (wish.another_vocabulary and ANSWER in text)]
