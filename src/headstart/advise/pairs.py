"""Which of these models can draft for which, and what that would be worth, best first; and why the others cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headstart.advise.check import ENGINES, STOP, Pair, Report, capability_of, check, plan_head
from headstart.advise.facts import GGUF, Facts
from headstart.advise.families import DRAFT_MODEL, SMALLER, Family, Known, family_of, plain, stand_in, well_known
from headstart.advise.forecast import AT_ONCE, Forecast, Guess, Hardware, forecast, times
from headstart.advise.stores import Found, Model
from headstart.advise.vocabularies import Relation
from headstart.errors import HeadstartError
from headstart.models import files
from headstart.models.builtin import hub_id
from headstart.models.heads.dialects import BORROWS

# How likely drafted tokens are accepted. For drafts of the target's family after the published table of Leviathan et al. (2023,
# table 3): 0.61 to 0.82 for greedy texts and 0.53 to 0.74 for sampled ones, about 0.08 more for a draft ten times as large.
FAMILY, SPREAD, PER_TEN, AT = 0.7, 0.1, 0.08, 0.05  # for a draft with this share of the target's weights
STRANGER, WIDER = 0.12, 0.05  # less for a draft of another family with the same vocabulary, and how much less sure
TRANSLATED, LOOSE = 0.45, 0.18  # for a draft whose tokens are translated
HEADS = {"eagle3": 0.65, "peagle": 0.6, "eagle": 0.58, "mtp": 0.7, "medusa": 0.5, "mlp_speculator": 0.5}
HEAD_SPREAD = 0.12
OTHER_TARGET = 0.15  # less for a head that was made for another target
LEAST, MOST = 0.05, 0.95


@dataclass(frozen=True)
class Candidate:
    """A draft or head that works, with what it promises."""

    draft: Facts
    kind: str  # draft_model, or the kind of the head
    engines: tuple[str, ...]  # that take the pair as it is
    ratio: float  # of its weights to the target's
    guess: Guess
    forecast: Forecast
    relation: Relation | None = None
    objections: tuple[tuple[str, str], ...] = ()  # engine and reason, of engines that do not


@dataclass(frozen=True)
class Rejection:
    name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Suggestion:
    """Something well known that is not here."""

    known: Known
    guess: Guess
    forecast: Forecast | None  # None where the target's size is not known
    here: bool = False  # it is on this disk, under some name


@dataclass(frozen=True)
class Ranking:
    target: str
    facts: Facts | None  # None: it is not on this disk
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    family: Family | None
    suggestions: tuple[Suggestion, ...] = ()


def rank(
    target: Facts, models: Sequence[Model], hardware: Hardware, engines: Sequence[str] = ("headstart",),
    advance: Callable[[int, str], None] = lambda done, what: None,
) -> Ranking:  # fmt: skip
    """All models as drafts for this target, which have to work in these engines."""
    others = [m for m in models if m.facts is None or m.facts.path.resolve() != target.path.resolve()]
    judged = []
    for model in (*others, *_own_layer(target)):
        advance(1, model.name)
        judged.append(_judge(target, model, hardware, engines))
    best = sorted((one for one in judged if isinstance(one, Candidate)), key=lambda c: -c.forecast.speedup)
    refused = tuple(one for one in judged if isinstance(one, Rejection))
    names = names_of(target)
    known = suggest(names, target, hardware, models)
    return Ranking(target.name, target, tuple(best), refused, family_of(*names), known)


def rank_absent(name: str, models: Sequence[Model], hardware: Hardware) -> Ranking | None:
    """A target that is not on this disk: what is well known for its family. None where that is not known either."""
    if (family := family_of(name)) is None:
        return None
    return Ranking(name, None, (), (), family, suggest([name], stand_in(name), hardware, models))


# ------------------------------------------------------------------ one pair
def _judge(target: Facts, model: Model, hardware: Hardware, engines: Sequence[str]) -> Candidate | Rejection:
    draft = model.facts
    if draft is None or model.problem:
        return Rejection(model.name, (model.problem,))
    if not draft.head and draft.parameters * SMALLER > target.parameters:
        share = draft.parameters / max(1, target.parameters)
        return Rejection(model.name, (f"it has {share:.0%} of the target's weights: drafts have to be smaller.",))
    try:
        report = check(Pair(target, draft, capability_of(hardware.name)))
        if reasons := _reasons(report, engines):
            return Rejection(model.name, reasons)
        return _candidate(report, draft, hardware)
    except (HeadstartError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        return Rejection(model.name, (f"it cannot be judged: {error}",))


def _reasons(report: Report, engines: Sequence[str]) -> tuple[str, ...]:
    """Why a pair does not work in one of these engines, with the tokens that differ where they are the reason."""
    if all(report.works(engine) for engine in engines):
        return ()
    own = [v for v in report.verdicts if v.engine in engines]
    found = [f.text for f in report.common if f.level == STOP]
    found += [f.text for v in own for f in v.findings if f.level == STOP]
    if report.relation is not None and report.relation.differing:
        found.append(report.relation.told())
    return tuple(dict.fromkeys(found))


def _candidate(report: Report, draft: Facts, hardware: Hardware) -> Candidate:
    target, relation = report.pair.target, report.relation
    spec = plan_head(target, draft) if draft.head else None
    if spec is None:
        kind, guess = DRAFT_MODEL, guess_draft(target, draft, relation)
        spent = times(target, draft, hardware)
    else:
        kind, guess = spec.method, guess_head(target, spec.method, spec.target)
        spent = times(target, draft, hardware, head_bytes(target, draft, kind), kind in AT_ONCE, spec.max_depth)
    works = tuple(engine for engine in ENGINES if report.works(engine))
    told = [(e, "; ".join(_reasons(report, [e]))) for e in ENGINES if e not in works]
    ratio = draft.parameters / max(1, target.parameters)
    return Candidate(draft, kind, works, ratio, guess, forecast(guess, spent), relation, tuple(told))


def _own_layer(target: Facts) -> list[Model]:
    """The MTP layer that some models bring along: a head in the target's own folder."""
    inner = target.config.get("text_config")
    told = (inner if isinstance(inner, dict) else target.config).get("num_nextn_predict_layers")
    if target.form == GGUF or target.problems or not isinstance(told, int) or told < 1:
        return []
    layers = _tensor_bytes(target, f"model.layers.{target.layers}.")
    if not layers:
        return []
    name = f"{target.name} (its MTP layer)"
    count = round(layers / max(1, target.weight_bytes) * target.parameters)
    facts = replace(target, name=name, head=True, weight_bytes=layers, parameters=count)
    return [Model(Found(name, "", target.path), facts)]


def head_bytes(target: Facts, head: Facts, kind: str) -> float:
    """What a forward of a head reads: not its embeddings, but the output matrix that it shares with the target."""
    own = head.weight_bytes - _tensor_bytes(head, "embed_tokens.", "model.embed_tokens.")
    matrix = 2.0 * target.vocab_size * target.hidden
    if head.config.get(BORROWS):
        share = int(head.config.get("draft_vocab_size") or target.vocab_size) / max(1, target.vocab_size)
        return own + matrix * share
    return own + (matrix if kind in ("eagle", "mtp") else 0.0)


def _tensor_bytes(model: Facts, *beginnings: str) -> int:
    """Of tensors whose names begin so; 0 where the files cannot be read."""
    total = 0
    try:
        for shard in files.shards(model.path):
            for name, told in files.safetensors_header(shard).items():
                begin, end = told["data_offsets"]
                total += end - begin if name.startswith(beginnings) else 0
    except (HeadstartError, OSError):
        return 0
    return total


# ------------------------------------------------------------------ acceptance
def names_of(model: Facts) -> list[str]:
    """What a model is called: by the user, on the hub, and in its own file."""
    told = [model.config.get(key) for key in ("general.basename", "general.name", "_name_or_path")]
    here = [hub_id(model.name), model.name, repository(model)]
    return [name for name in dict.fromkeys([*here, *told]) if isinstance(name, str) and name]


def repository(model: Facts) -> str:
    """For a snapshot in a cache of the hub, the id that its folder tells."""
    for part in model.path.parts:
        if part.startswith("models--"):
            return "/".join(part.removeprefix("models--").split("--"))
    return ""


def same_family(target: Facts, draft: Facts) -> bool:
    """By their names, where those are well known; else by their architecture."""
    ours, theirs = family_of(*names_of(target)), family_of(*names_of(draft))
    if ours is None and theirs is None:
        return target.architecture == draft.architecture
    return ours is theirs


def guess_draft(target: Facts, draft: Facts, relation: Relation | None) -> Guess:
    if relation is not None and not relation.same and not relation.prefix:
        return Guess(TRANSLATED, LOOSE, "another vocabulary: drafts are translated")
    share = draft.parameters / max(1, target.parameters)
    alpha = FAMILY + PER_TEN * math.log10(max(share, 1e-4) / AT)
    if relation is None:
        return Guess(_within(alpha - STRANGER), LOOSE, "a vocabulary that cannot be compared")
    if same_family(target, draft):
        return Guess(_within(alpha), SPREAD, "the same family and vocabulary")
    return Guess(_within(alpha - STRANGER), SPREAD + WIDER, "the same vocabulary, another family")


def guess_head(target: Facts, kind: str, made_for: str | None) -> Guess:
    alpha = HEADS.get(kind, min(HEADS.values()))
    if made_for is None:
        return Guess(alpha, HEAD_SPREAD + WIDER, f"{kind}; it does not name its target, but fits")
    wanted = plain(made_for)
    if any(wanted in own or own in wanted for own in map(plain, names_of(target))):
        return Guess(alpha, HEAD_SPREAD, f"{kind}, made for this target")
    return Guess(_within(alpha - OTHER_TARGET), HEAD_SPREAD + WIDER, f"{kind}, made for {made_for}")


def _within(alpha: float) -> float:
    return min(MOST, max(LEAST, alpha))


# ------------------------------------------------------------------ what is well known
def suggest(
    names: Sequence[str], target: Facts | None, hardware: Hardware, models: Sequence[Model]
) -> tuple[Suggestion, ...]:
    """For a target with these names; `target` is None where its size is not known."""
    size = target.parameters / 1e9 if target is not None and target.parameters else None
    here = {plain(name) for m in models if m.facts is not None for name in names_of(m.facts)}
    out = []
    for known in well_known(*names, billions=size):
        draft = known.facts()
        guess = _known_guess(target, known)
        told = None
        if target is not None and target.parameters:
            told = forecast(guess, times(target, draft, hardware, None, known.kind in AT_ONCE))
        out.append(Suggestion(known, guess, told, plain(known.id) in here))
    return tuple(sorted(out, key=lambda s: -(s.forecast.speedup if s.forecast else s.guess.alpha)))


def _known_guess(target: Facts | None, known: Known) -> Guess:
    if known.head:
        return Guess(HEADS[known.kind], HEAD_SPREAD, f"{known.kind}, made for this target")
    share = known.billions * 1e9 / target.parameters if target is not None and target.parameters else AT
    return Guess(_within(FAMILY + PER_TEN * math.log10(share / AT)), SPREAD, "the same family")
