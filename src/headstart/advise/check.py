"""Will this target, with this draft or head, work in each engine, and if not, why? Only headers and configs are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.advise import knows, ropes
from headstart.advise.facts import GGUF, PICKLE, SAFETENSORS, Facts, Vocabulary
from headstart.advise.vocabularies import Relation, llamacpp_objections, relate
from headstart.errors import HeadstartError
from headstart.models.heads.dialects import BORROWS
from headstart.models.llamacpp import native

if TYPE_CHECKING:
    from headstart.models.heads import HeadSpec

STOP, WARN, NOTE = "stop", "warn", "note"
ENGINES = ("headstart", "vllm", "llamacpp", "tabbyapi")
CAPABILITY = {  # of GPUs by name, the first that fits
    "B200": 10.0, "B100": 10.0, "5090": 12.0, "5080": 12.0, "5070": 12.0, "5060": 12.0, "H200": 9.0, "H100": 9.0, "GH200": 9.0,
    "L40": 8.9, "L4": 8.9, "4090": 8.9, "4080": 8.9, "4070": 8.9, "4060": 8.9, "A1000": 8.6,
    "A3000": 8.6, "A100": 8.0, "A30": 8.0, "A10": 8.6,
    "A40": 8.6, "A6000": 8.6, "A5000": 8.6, "3090": 8.6, "3080": 8.6, "3070": 8.6, "3060": 8.6, "T4": 7.5, "2080": 7.5,
    "2070": 7.5, "2060": 7.5, "V100": 7.0, "P100": 6.0, "1080": 6.1,
}  # fmt: skip
NEEDS = {"awq": 7.5, "gptq": 6.0, "fp8": 7.5, "compressed-tensors": 7.0, "mxfp4": 8.0}  # capability, in vLLM 0.32,
LEAST, BF16 = 7.0, 8.0  # for anything at all, and for bfloat16
MANY = 0.01  # of all tokens: where more of them differ, drafts are wrong


@dataclass(frozen=True)
class Finding:
    level: str  # stop: it will not work; warn: it will not work well; note: good to know
    text: str


@dataclass(frozen=True)
class Verdict:
    engine: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        return all(finding.level != STOP for finding in self.findings)


@dataclass(frozen=True)
class Pair:
    """What is judged, and what all rules need to know of it."""

    target: Facts
    draft: Facts | None = None
    capability: float | None = None  # of the GPU; None: a CPU, or not known

    @property
    def models(self) -> list[Facts]:
        return [self.target, *([self.draft] if self.draft is not None else [])]

    @property
    def drafts(self) -> Facts | None:
        """A draft model, which has a vocabulary; a head has its target's."""
        return self.draft if self.draft is not None and not self.draft.head else None


@dataclass(frozen=True)
class Report:
    pair: Pair
    relation: Relation | None
    common: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...] = field(default=())

    def works(self, engine: str) -> bool:
        own = next(verdict for verdict in self.verdicts if verdict.engine == engine)
        return own.works and all(finding.level != STOP for finding in self.common)


def check(pair: Pair) -> Report:
    draft, ours = pair.drafts, pair.target.vocabulary
    theirs = draft.vocabulary if draft is not None else None
    relation = _relation(ours, theirs) if ours is not None and theirs is not None else None
    common = tuple(finding for model in pair.models for finding in _integrity(model)) + tuple(_together(pair, relation))
    verdicts = tuple(Verdict(name, tuple(rule(pair, relation))) for name, rule in RULES.items())
    return Report(pair, relation, common, verdicts)


def _relation(ours: Vocabulary, theirs: Vocabulary) -> Relation:
    """Most pairs that are looked at have one vocabulary, which is soon seen."""
    if ours.texts == theirs.texts:
        return Relation((len(ours), len(theirs)), 0, (), 1.0)
    return relate(ours, theirs)


# ------------------------------------------------------------------ for every engine
def _integrity(model: Facts) -> list[Finding]:
    out = [Finding(STOP, f"{model.name}: {problem}") for problem in model.problems if model.form != PICKLE]
    if not model.head and not model.problems and model.vocabulary is None:
        out.append(
            Finding(WARN, f"{model.name} has no tokenizer that can be read, so vocabularies cannot be compared.")
        )
    return out


def _together(pair: Pair, relation: Relation | None) -> list[Finding]:
    target, draft, out = pair.target, pair.draft, []
    if target.head:
        out.append(Finding(STOP, f"{target.name} is a head, and no model by itself: name its target first."))
    if not target.head and not target.chat_template and not target.problems:
        out.append(
            Finding(
                NOTE, f"{target.name} has no chat template: it continues texts, and chats have none of their marks."
            )
        )
    if relation is not None:
        out.append(Finding(NOTE, relation.told()))
        if relation.same and pair.drafts is not None and pair.drafts.vocab_size != target.vocab_size:
            sizes = f"{target.vocab_size:,} and {pair.drafts.vocab_size:,}"
            out.append(
                Finding(NOTE, f"their matrices have {sizes} rows, but that is padding: the tokens are the same.")
            )
    if draft is not None and not draft.head:
        out += _worth(target, draft)
    out += [Finding(WARN, text) for model in pair.models for text in ropes.doubts(model)]
    if draft is not None:
        out += [Finding(NOTE, text) for text in ropes.apart(target, draft)]
    return out


def _worth(target: Facts, draft: Facts) -> list[Finding]:
    out = []
    if target.parameters and draft.parameters * 3 > target.parameters:
        share = draft.parameters / target.parameters
        out.append(
            Finding(
                WARN,
                f"the draft has {share:.0%} of the target's weights: to save time, it should have a tenth or less.",
            )
        )
    return out


def _pickled(pair: Pair, engine: str) -> list[Finding]:
    return [
        Finding(STOP, f"{m.name} has its weights in pickles, which {engine} does not load.")
        for m in pair.models
        if m.form == PICKLE
    ]


def _needs_code(pair: Pair, flag: str) -> list[Finding]:
    return [
        Finding(WARN, f"{m.name} names code of its own: {flag} where its architecture is not known.")
        for m in pair.models
        if m.needs_code and not m.head
    ]


# ------------------------------------------------------------------ Headstart
def for_headstart(pair: Pair, relation: Relation | None) -> list[Finding]:
    out = _pickled(pair, "Headstart")
    for model in pair.models:
        if model.head:
            continue
        out += _gguf_architecture(model) if model.form == GGUF else _architecture(model)
        out += [Finding(NOTE, text) for text in ropes.shortened(model)]
        if model.quantized in ("exl2", "exl3"):
            out.append(
                Finding(
                    STOP,
                    f"{model.name} is in ExLlama's format, which Headstart does not read: take the original or GGUF.",
                )
            )
        elif model.form != GGUF and model.quantized is not None:
            out.append(
                Finding(
                    WARN,
                    f"{model.name} is quantised ({model.quantized}): transformers needs that method's package for it.",
                )
            )
    if pair.draft is not None and pair.draft.head:
        out += _head(pair.target, pair.draft)
    if relation is not None and not relation.same and not relation.prefix:
        out.append(Finding(NOTE, "drafts are translated between the vocabularies, which costs some of their worth."))
    return out


def _architecture(model: Facts) -> list[Finding]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = str(model.config.get("model_type") or "")
    if not kind or kind in CONFIG_MAPPING_NAMES:
        return []
    if model.needs_code:
        return [Finding(WARN, f"{model.name} needs code of its own, which is run with --trust-remote-code only.")]
    return [
        Finding(STOP, f"transformers does not know the architecture {kind!r} of {model.name}: a newer version may.")
    ]


def _gguf_architecture(model: Facts) -> list[Finding]:
    """Through transformers on torch, or with llama.cpp, where that is installed."""
    kind = str(model.config.get("general.architecture") or "")
    if not kind or knows.gguf_by_transformers(kind):
        return []
    why = f"transformers reads no GGUF files of the architecture {kind!r} ({model.name})"
    if native.available() is not None:
        return [Finding(STOP, f"{why}: take the original, or install llama-cpp-python.")]
    return [Finding(NOTE, f"{why}: it runs on llama.cpp alone, without heads.")]


def _head(target: Facts, head: Facts) -> list[Finding]:
    try:
        spec = plan_head(target, head)
    except HeadstartError as error:
        return [Finding(STOP, str(error))]
    made_for = f", made for {spec.target}." if spec.target else "."
    return [Finding(NOTE, f"{head.name} is a head of the kind {spec.kind}{made_for}")]


def plan_head(target: Facts, head: Facts) -> HeadSpec:
    """As the loader would judge it: dialect, sizes, and a place for every tensor. What does not fit raises."""
    import torch

    from headstart.models.heads.dialects import Source, TargetFacts, make_plan
    from headstart.models.heads.load import find_places
    from headstart.models.heads.store import open_store

    matrix = torch.empty(target.vocab_size, target.hidden, device="meta")  # which some heads share
    facts = TargetFacts(target.name, target.hidden, target.vocab_size, target.layers, matrix, matrix)
    source = Source(head.path, dict(head.config), open_store(Path(head.path)).shapes, facts)
    plan = make_plan(source)
    find_places(source, plan)
    return plan.head.spec


# ------------------------------------------------------------------ vLLM
def for_vllm(pair: Pair, relation: Relation | None) -> list[Finding]:
    out = _needs_code(pair, "--trust-remote-code")
    for model in pair.models:
        if model.form == GGUF:
            out.append(
                Finding(
                    STOP, f"{model.name} is GGUF, which vLLM 0.32 does not read; `bench --engine vllm` converts it."
                )
            )
        if model.quantized in ("exl2", "exl3"):
            out.append(Finding(STOP, f"{model.name} is in ExLlama's format, which vLLM does not read."))
        if model.config.get(BORROWS):
            out.append(
                Finding(
                    STOP, f"{model.name} shares its target's output matrix: `headstart convert` writes one for vLLM."
                )
            )
        out += _capable(model, pair.capability)
        if not model.head and "architectures" in model.config and knows.by_vllm(model.architecture) is False:
            why = f"the installed vLLM has no {model.architecture} of its own ({model.name})"
            out.append(Finding(WARN, f"{why}: it runs that through transformers, or not at all."))
    draft = pair.drafts
    if draft is not None and draft.vocab_size != pair.target.vocab_size:
        sizes = f"{pair.target.vocab_size:,} and {draft.vocab_size:,} rows"
        if relation is not None and relation.same:
            why = f"vLLM compares sizes, and padding makes them differ ({sizes})"
            text = f"{why}: add use_heterogeneous_vocab, or pad the draft."
        else:
            text = f"vLLM wants one vocabulary ({sizes}); with use_heterogeneous_vocab it maps them, for greedy drafts."
        out.append(Finding(STOP, text))
    if draft is not None and relation is not None and relation.differing and draft.vocab_size == pair.target.vocab_size:
        out.append(_blindly(relation, "vLLM compares sizes, and does not look at tokens"))
    return out


def _blindly(relation: Relation, why: str) -> Finding:
    """Tokens that differ where nobody translates."""
    if relation.differing > MANY * max(relation.sizes):
        return Finding(STOP, f"{why}: drafts would be wrong.")
    return Finding(WARN, f"{why}: drafts with one of the {relation.differing:,} tokens that differ would be wrong.")


def _capable(model: Facts, capability: float | None) -> list[Finding]:
    """Against the GPU's compute capability."""
    if capability is None:
        return []
    if capability < LEAST:
        return [Finding(STOP, f"vLLM needs compute capability {LEAST}, and this GPU has {capability}.")]
    need = NEEDS.get(model.quantized or "")
    if need is not None and capability < need:
        why = f"which needs compute capability {need}, and this GPU has {capability}"
        text = f"{model.name} is quantised with {model.quantized}, {why}."
        return [Finding(STOP, text)]
    if model.dtype == "BF16" and capability < BF16:
        return [Finding(WARN, f"{model.name} is in bfloat16, which this GPU ({capability}) lacks: --dtype float16.")]
    return []


# ------------------------------------------------------------------ llama.cpp
def for_llamacpp(pair: Pair, relation: Relation | None) -> list[Finding]:
    out = [
        Finding(
            STOP, f"{m.name} is no GGUF file: llama.cpp's convert_hf_to_gguf.py makes one, from the original weights."
        )
        for m in pair.models
        if m.form != GGUF
    ]
    for model in pair.models:
        if model.form == GGUF and model.architecture and knows.gguf_by_llamacpp(model.architecture) is False:
            why = f"the installed package gguf does not list {model.architecture!r} ({model.name}) among llama.cpp's"
            out.append(Finding(WARN, f"{why} architectures: it takes a newer llama.cpp, or a fork."))
    draft, ours = pair.drafts, pair.target.vocabulary
    if draft is not None and ours is not None and draft.vocabulary is not None:
        out += [
            Finding(STOP, f"llama.cpp refuses the pair: {reason}.")
            for reason in llamacpp_objections(ours, draft.vocabulary)
        ]
    return out


# ------------------------------------------------------------------ TabbyAPI
def for_tabbyapi(pair: Pair, relation: Relation | None) -> list[Finding]:
    out = []
    for model in pair.models:
        plain = model.quantized is None and model.form == SAFETENSORS
        if model.quantized != "exl3" and not plain and not model.head:
            was = "EXL2, of the version before" if model.quantized == "exl2" else model.quantized or model.form
            out.append(
                Finding(
                    STOP,
                    f"{model.name} is {was}; TabbyAPI runs EXL3 and weights as they were: take the original.",
                )
            )
    if pair.draft is not None and pair.draft.head:
        out.append(Finding(STOP, "TabbyAPI runs draft models, n-grams and MTP layers, but no heads of this kind."))
    if relation is not None and relation.differing:
        out.append(_blindly(relation, "ExLlama drafts with the target's ids"))
    if pair.capability is not None and pair.capability < 8.0:
        out.append(
            Finding(
                WARN, f"ExLlamaV3 is made for compute capability 8.0 and newer, and this GPU has {pair.capability}."
            )
        )
    return out


RULES: Mapping[str, Callable[[Pair, Relation | None], list[Finding]]] = {
    "headstart": for_headstart,
    "vllm": for_vllm,
    "llamacpp": for_llamacpp,
    "tabbyapi": for_tabbyapi,
}


def capability_here() -> float | None:
    """Of this machine's GPU, if it has one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major + minor / 10


def capability_of(gpu: str) -> float | None:
    """By the name that people give it."""
    plain = gpu.upper().replace("RTX", "").replace("GTX", "").replace("TESLA", "").replace(" ", "")
    return next((value for name, value in CAPABILITY.items() if name in plain), None)
