"""What a user can set. vLLM's `speculative_config` and llama.cpp's names are taken as they are.

An unknown key is an error that names the nearest one. A key that has no effect here is accepted and *said*; a key that would
change the output or the method in a way that Headstart does not have is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from headstart import shapes
from headstart.core import RequestSpeculation
from headstart.errors import ConfigError, nearest

VERIFICATIONS = ("walk", "rejection")
POLICIES = ("fixed", "adaptive", "watch")
AUTO = "auto"  # the method that chooses among all drafters at hand
WIDE_TOKENS = 16  # γ where it is a bound and nobody says


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft and how to verify."""

    method: str = "none"
    model: str | None = None
    num_speculative_tokens: int = 5  # γ: how deep a draft may reach
    num_draft_nodes: int | None = None  # nodes of one draft tree; None: γ for a chain, 4γ for a tree
    tree: bool = False
    top_k: int | None = None  # candidates looked at per node; None: 1 for a chain, 4 for a tree
    max_branches: int = 4  # nodes expanded per level of a tree
    static_tree: shapes.Shape | None = None  # every tree has this shape, best nodes first
    min_draft_tokens: int = 0  # a shorter draft is dropped
    p_min: float = 0.0  # stop drafting where the drafter's confidence is lower
    p_split: float = 0.1  # branch where another candidate's confidence is at least this
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_max_depth: int = 24
    suffix_max_tokens: int = 1_000_000  # tokens of past outputs kept
    suffix_max_requests: int = 10_000  # past outputs kept
    suffix_factor: float = 1.0  # draft at most this many times the length of the match
    suffix_min_prob: float = 0.1
    suffix_cache: str | None = None  # file to load past outputs from, if it exists
    suffix_corpus: str | None = None  # text file to fill the past outputs with
    exit_layer: int | None = None  # early_exit: layers of the target that draft; None: a third of them
    draft_dtype: str = "auto"
    draft_device: str = "auto"
    draft_max_model_len: int | None = None
    draft_sample_method: str = "probabilistic"  # under rejection: draw from q, or propose its best with certainty
    vocab_mapping: str = "auto"  # auto, token, string
    verification: str = "walk"
    policy: str = "fixed"  # fixed: always γ; adaptive: as many as pay here and for this text; watch: none is verified
    batch_size_schedule: tuple[tuple[int, int, int], ...] = ()  # (from, to, γ)
    options: Mapping[str, Any] = field(default_factory=dict)  # for a drafter of your own

    def __post_init__(self) -> None:
        for name, ok, expected in self._rules():
            if not ok:
                raise ConfigError(f"speculative {name}={getattr(self, name)!r} is not usable: expected {expected}.")

    def _rules(self) -> list[tuple[str, bool, str]]:
        def whole(v: Any, low: int, high: int = 1 << 31) -> bool:
            return isinstance(v, int) and not isinstance(v, bool) and low <= v <= high

        def share(v: Any) -> bool:
            return isinstance(v, (int, float)) and 0 <= v <= 1

        return [
            ("method", isinstance(self.method, str) and bool(self.method), "a method's name"),
            ("model", self.model is None or (isinstance(self.model, str) and bool(self.model)), "a name or a path"),
            ("tree", isinstance(self.tree, bool), "true or false"),
            (
                "draft_max_model_len",
                self.draft_max_model_len is None or whole(self.draft_max_model_len, 1),
                "a whole number of at least 1",
            ),
            ("num_speculative_tokens", whole(self.num_speculative_tokens, 0, 4096), "a whole number from 0 to 4096"),
            ("num_draft_nodes", self.num_draft_nodes is None or whole(self.num_draft_nodes, 0, 4096), "0 to 4096"),
            ("top_k", self.top_k is None or whole(self.top_k, 1, 1024), "a whole number from 1 to 1024"),
            ("max_branches", whole(self.max_branches, 1, 1024), "a whole number from 1 to 1024"),
            ("static_tree", _shape_or_none(self.static_tree), "paths of ranks, each behind its parent"),
            ("min_draft_tokens", whole(self.min_draft_tokens, 0), "0 or more"),
            ("p_min", share(self.p_min), "a number from 0 to 1"),
            ("p_split", share(self.p_split), "a number from 0 to 1"),
            ("prompt_lookup_min", whole(self.prompt_lookup_min, 1), "a whole number of at least 1"),
            (
                "prompt_lookup_max",
                whole(self.prompt_lookup_min, 1) and whole(self.prompt_lookup_max, self.prompt_lookup_min),
                f"a whole number of at least prompt_lookup_min ({self.prompt_lookup_min})",
            ),
            ("suffix_max_depth", whole(self.suffix_max_depth, 1, 4096), "a whole number from 1 to 4096"),
            ("suffix_max_tokens", whole(self.suffix_max_tokens, 0), "0 or more"),
            ("suffix_max_requests", whole(self.suffix_max_requests, 0), "0 or more"),
            ("suffix_min_prob", share(self.suffix_min_prob), "a number from 0 to 1"),
            (
                "suffix_factor",
                isinstance(self.suffix_factor, (int, float)) and 0 < self.suffix_factor < 1e6,
                "a positive number",
            ),
            ("exit_layer", self.exit_layer is None or whole(self.exit_layer, 1), "a whole number of at least 1"),
            *((n, _text_or_none(getattr(self, n)), "a path") for n in ("suffix_cache", "suffix_corpus")),
            *((n, _text_or_none(getattr(self, n)), "a name") for n in ("draft_dtype", "draft_device")),
            ("options", isinstance(self.options, Mapping), "an object"),
            ("draft_sample_method", self.draft_sample_method in ("greedy", "probabilistic"), "greedy or probabilistic"),
            ("vocab_mapping", self.vocab_mapping in ("auto", "token", "string"), "auto, token or string"),
            ("verification", self.verification in VERIFICATIONS, "walk or rejection"),
            ("policy", self.policy in POLICIES, "fixed, adaptive or watch"),
        ]

    @property
    def nodes(self) -> int:
        """Largest draft tree of one request."""
        if self.num_draft_nodes is not None:
            return self.num_draft_nodes
        return self.num_speculative_tokens * (4 if self.tree and self.method in GROWING else 1)


def _text_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(value))


def _shape_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and shapes.check(value) is None)


# Names from elsewhere -> ours. docs/options.md shows this table; a test keeps the two together.
ALIASES = {
    "n_max": "num_speculative_tokens",
    "n_min": "min_draft_tokens",
    "n_parallel": "max_branches",
    "gamma": "num_speculative_tokens",
    "num_draft_tokens": "num_draft_nodes",
    "speculative_token_tree": "static_tree",
    "suffix_decoding_max_tree_depth": "suffix_max_depth",
    "suffix_decoding_max_cached_requests": "suffix_max_requests",
    "suffix_decoding_max_spec_factor": "suffix_factor",
    "suffix_decoding_min_token_prob": "suffix_min_prob",
    "assistant_early_exit": "exit_layer",  # transformers
    "max_model_len": "draft_max_model_len",
    "num_speculative_tokens_per_batch_size": "batch_size_schedule",
    "rejection_sample_method": "verification",  # 'standard' is our 'rejection'; others are refused
}
NO_EFFECT = {
    "n_reuse": "the draft's KV is always reused as far as its tokens agree",
    "draft_tensor_parallel_size": "one device runs the draft here",
    "enforce_eager": "the engine option kernels=False turns graphs off",
    "disable_padded_drafter_batch": "batches are padded to sizes that a graph exists for, drafts with them",
    "use_local_argmax_reduction": "the vocabulary is not split over devices",
    "use_heterogeneous_vocab": "another vocabulary is recognised by itself",
    "attention_backend": "the device decides which attention runs; kernels=False takes the reference",
    "moe_backend": "there is one back end here",
    "revision": "a hub id is taken at its main revision",
    "code_revision": "remote code is not fetched",
    "draft_load_config": "loading needs no settings here",
    "disable_by_batch_size": "use batch_size_schedule",
}
REFUSED = {
    "tensor_parallel_size": "vLLM spells it draft_tensor_parallel_size; Headstart runs on one device",
    "quantization": "a quantised draft is recognised from its own config",
    "kv_cache_dtype": "the KV pool has the model's dtype",
    "enable_adaptive_verification": "it belongs to DSpark, which is not available",
    "synthetic_acceptance_rates": "it accepts tokens that the target did not choose",
    "synthetic_acceptance_length": "it accepts tokens that the target did not choose",
    "dspark_draft_topk": "DSpark is not available",
}
METHOD_ALIASES = {
    "prompt_lookup": "ngram", "[ngram]": "ngram", "ngram_gpu": "ngram", "ngram-simple": "ngram", "draft": "draft_model",
    "draft-simple": "draft_model", "off": "none", "disabled": "none", "model": "draft_model", "custom_class": "custom",
}  # fmt: skip
OWN_OPTIONS = {  # options that only some methods read
    "none": (),
    "ngram": ("prompt_lookup_min", "prompt_lookup_max", "min_draft_tokens"),
    "suffix": (
        "suffix_max_depth", "suffix_max_tokens", "suffix_max_requests", "suffix_factor", "suffix_min_prob", "suffix_cache",
        "suffix_corpus", "min_draft_tokens",
    ),
    "draft_model": (
        "model", "tree", "top_k", "max_branches", "static_tree", "min_draft_tokens", "p_min", "p_split", "draft_dtype",
        "draft_device", "draft_max_model_len", "draft_sample_method", "vocab_mapping",
    ),
}  # fmt: skip
TREE_OPTIONS = ("top_k", "max_branches", "p_split")
GROWTH_OPTIONS = (*TREE_OPTIONS, "p_min", "min_draft_tokens")  # how a tree grows where it has no shape beforehand
HEADS = ("eagle3", "peagle", "eagle", "medusa", "mlp_speculator", "mtp")  # that draft from the target's hidden states
OF_TORCH = (*HEADS, "early_exit")  # methods that look inside the target, so torch has to run it
GROWING = ("draft_model", *OF_TORCH)  # methods that can draft trees where they are asked to
LATER = ("dflash", "dspark")
_OF_TREES = ("tree", "static_tree", *GROWTH_OPTIONS, "draft_sample_method")
OWN_OPTIONS |= dict.fromkeys(HEADS, ("model", "draft_dtype", *_OF_TREES)) | {"early_exit": ("exit_layer", *_OF_TREES)}


def parse_speculative(value: Any) -> tuple[SpeculativeConfig, list[str]]:
    """A dict, JSON text, a method's name, None or a config -> the config, and what must be said about it."""
    if value is None:
        return SpeculativeConfig(), []
    if isinstance(value, SpeculativeConfig):
        return value, []
    if isinstance(value, str):
        value = _from_text(value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"The speculative config should be a JSON object, not {type(value).__name__}.")
    known = {f.name for f in fields(SpeculativeConfig)}
    out: dict[str, Any] = {}
    notes: list[str] = []
    parallel: Any = False
    for key, given in value.items():
        if given is None or (given is False and key in REFUSED):
            continue
        if key in REFUSED:
            raise ConfigError(f"speculative option {key!r} is not available: {REFUSED[key]}.")
        if key in NO_EFFECT:
            notes.append(f"speculative option {key!r} has no effect here: {NO_EFFECT[key]}.")
            continue
        if key == "parallel_drafting":
            parallel = given
            continue
        if key == "rejection_sample_method":
            given = _rejection_method(given)
        name = ALIASES.get(key, key)
        if name not in known:
            everything = known | set(ALIASES) | set(NO_EFFECT) | {"parallel_drafting"}
            raise ConfigError(f"Unknown speculative option {key!r}.{nearest(key, everything)}")
        if name in out:
            raise ConfigError(f"speculative option {key!r} says {name} a second time.")
        out[name] = given
    config = SpeculativeConfig(**_complete(out))
    if parallel:
        config = _parallel(config)
    return config, notes + _idle_options(config, out)


def _parallel(config: SpeculativeConfig) -> SpeculativeConfig:
    """vLLM's switch: with an EAGLE-3 head it means P-EAGLE."""
    if config.method not in ("eagle3", "peagle"):
        raise ConfigError(
            f"parallel_drafting is not available with method {config.method!r}: it is with 'eagle3', for P-EAGLE heads."
        )
    return replace(config, method="peagle")


def _idle_options(config: SpeculativeConfig, given: Mapping[str, Any]) -> list[str]:
    """What was set for another method than the one chosen."""
    if config.method not in OWN_OPTIONS:
        return []
    by_method = reversed(OWN_OPTIONS.items())  # of several that read an option, the first is named
    others = {o: m for m, names in by_method for o in names if o not in OWN_OPTIONS[config.method]}
    said = [
        f"speculative option {name!r} has no effect with method {config.method!r}, only with {others[name]!r}."
        for name in given
        if name in others
    ]
    if config.method in GROWING and not config.tree:
        said += [f"speculative option {n!r} has no effect without 'tree'." for n in TREE_OPTIONS if n in given]
    if config.method in GROWING and config.verification == "rejection" and "min_draft_tokens" in given:
        said.append("speculative option 'min_draft_tokens' does not apply to drafts that are drawn for rejection.")
    return said


def _from_text(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return {"method": text}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"The speculative config is not valid JSON: {error}.") from error


def _rejection_method(given: Any) -> str:
    if given == "standard":
        return "rejection"
    raise ConfigError(
        f"rejection_sample_method={given!r} is not available: 'standard' is (our verification='rejection')."
    )


def _complete(out: dict[str, Any]) -> dict[str, Any]:
    """Infer what vLLM infers: the method from the model, one lookup bound from the other."""
    if "method" not in out:
        if isinstance(out.get("model"), str) and out["model"] in ("ngram", "suffix", *METHOD_ALIASES):
            out["method"] = out.pop("model")
        else:
            out["method"] = "draft_model" if out.get("model") else ("none" if not out else "ngram")
    method = out["method"]
    if not isinstance(method, str):
        return out
    out["method"] = METHOD_ALIASES.get(method, method)
    if out["method"] == AUTO and out.setdefault("policy", "adaptive") == "fixed":
        raise ConfigError(
            "method 'auto' decides how much is drafted, and by whom: leave out policy='fixed', or name a method."
        )
    if out["method"] in LATER:
        raise ConfigError(
            f"method {method!r} is not available yet; ngram, suffix, draft_model, early_exit and {', '.join(HEADS)} are."
        )
    if "static_tree" in out:
        out |= _static(out)
    if out["method"] == "suffix" or out.get("policy") == "adaptive":  # its length is chosen, so the bound can be wide
        out.setdefault("num_speculative_tokens", WIDE_TOKENS)
    shortest, longest = out.get("prompt_lookup_min"), out.get("prompt_lookup_max")
    if isinstance(longest, int) and shortest is None:
        out["prompt_lookup_min"] = max(1, min(SpeculativeConfig.prompt_lookup_min, longest))
    if isinstance(shortest, int) and longest is None:
        out["prompt_lookup_max"] = max(SpeculativeConfig.prompt_lookup_max, shortest)
    if "batch_size_schedule" in out:
        out["batch_size_schedule"] = _schedule(out["batch_size_schedule"])
    return out


def _static(out: Mapping[str, Any]) -> dict[str, Any]:
    """A shape says how trees branch, how deep they reach and how many nodes they have."""
    shape = shapes.read_shape(out["static_tree"])
    if "static_tree" not in OWN_OPTIONS.get(out["method"], ("static_tree",)):
        return {"static_tree": shape}
    if clash := [name for name in GROWTH_OPTIONS if name in out]:
        raise ConfigError(f"static_tree fixes the shape of every draft: leave out {', '.join(clash)}.")
    if out.get("tree") is False:
        raise ConfigError("static_tree and tree=False contradict each other: leave one of the two out.")
    own: dict[str, Any] = {"static_tree": shape, "tree": out.get("tree", True)}
    depth, nodes = shapes.depth_of(shape), len(shape)
    for name, size, what in (
        ("num_speculative_tokens", depth, f"is {depth} levels deep"),
        ("num_draft_nodes", nodes, f"has {nodes} nodes"),
    ):
        given = out.get(name, size)
        if isinstance(given, int) and given < size:
            raise ConfigError(f"static_tree {what}, and {name}={given} allows less: raise it, or leave it out.")
        own[name] = size if isinstance(given, int) else given
    return own


def _schedule(value: Any) -> tuple[tuple[int, int, int], ...]:
    try:
        rows = tuple((int(a), int(b), int(k)) for a, b, k in value)
    except (TypeError, ValueError) as error:
        raise ConfigError("batch_size_schedule should be a list of [from, to, tokens].") from error
    if any(a < 1 or b < a or k < 0 for a, b, k in rows):
        raise ConfigError("batch_size_schedule rows should be [from, to, tokens] with 1 <= from <= to and tokens >= 0.")
    return rows


def parse_request_speculation(value: Any) -> RequestSpeculation:
    """What one request says: None, False, a method's name or {"enabled", "method", "max_tokens", "verification"}."""
    if value is None or isinstance(value, RequestSpeculation):
        return value or RequestSpeculation()
    if isinstance(value, bool):
        return RequestSpeculation(enabled=value)
    if isinstance(value, str):
        value = {"method": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative should be an object, a method's name or a bool, not {type(value).__name__}.")
    known = {f.name for f in fields(RequestSpeculation)}
    for key in value:
        if key not in known:
            raise ConfigError(f"Unknown per-request speculative option {key!r}.{nearest(key, known)}")
    out = RequestSpeculation(**{**value, **_request_method(value)})
    if out.verification not in (None, *VERIFICATIONS):
        raise ConfigError(f"verification={out.verification!r} is not known: walk or rejection.")
    if not isinstance(out.enabled, bool):
        raise ConfigError("speculative enabled should be true or false.")
    if out.method is not None and not isinstance(out.method, str):
        raise ConfigError(f"speculative method={out.method!r} should be a method's name.")
    if (
        isinstance(out.max_tokens, bool)
        or not isinstance(out.max_tokens, (int, type(None)))
        or (out.max_tokens or 0) < 0
    ):
        raise ConfigError(f"speculative max_tokens={out.max_tokens!r} should be a whole number of at least 0.")
    return out


def _request_method(value: Mapping[str, Any]) -> dict[str, Any]:
    method = value.get("method")
    return {"method": METHOD_ALIASES.get(method, method)} if isinstance(method, str) else {}


@dataclass(frozen=True)
class EngineConfig:
    """How much the engine takes on at once, and how much memory it may use."""

    max_num_seqs: int = 32
    max_batch_tokens: int = 512  # new tokens in one forward; a longer prefill is split
    kv_memory: int | None = None  # bytes; None: from free memory
    page_size: int = 16
    share_prefixes: bool = True
    fuse: bool = True  # lean forward for the Llama family
    kernels: bool = True  # Triton kernels and graphs on GPUs that can
    deterministic: bool = False  # on a GPU, a row's result does not depend on its neighbours
    wide_weights: bool | None = None  # on CPU, a second copy of the weights for several rows; None: when speculating
    quantize: str | None = None  # on CPU, weights of the Llama family in int8 or int4
    profile: bool = False  # wait for the device after each part of a step
    record: str | None = None  # a file for the trace of all requests: token ids and what became of drafts

    def __post_init__(self) -> None:
        if not _text_or_none(self.record):
            raise ConfigError(f"record={self.record!r} should be the path of a file to write.")
        for name in ("max_num_seqs", "max_batch_tokens", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} should be a whole number of at least 1.")
        if self.kv_memory is not None and (not isinstance(self.kv_memory, int) or self.kv_memory < 1):
            raise ConfigError(f"kv_memory={self.kv_memory!r} should be a number of bytes.")
