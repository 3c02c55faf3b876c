"""vLLM: `vllm serve`, whose `--speculative-config` has the keys that Headstart took over."""

from __future__ import annotations

from typing import Any

from headstart.advise.export.wish import ASKED, Engine, Exported, Setting, Wish, asked, steps
from headstart.advise.export.words import comments, flags, heading, reasons, script
from headstart.errors import BadInput

TITLE = "vLLM"
METHODS = {
    "ngram": "ngram", "suffix": "suffix", "draft_model": "draft_model", "eagle3": "eagle3", "peagle": "eagle3",
    "eagle": "eagle", "medusa": "medusa", "mlp_speculator": "mlp_speculator", "mtp": "mtp",
}  # fmt: skip
KEYS = {  # our names, and its own
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
    "suffix_max_depth": "suffix_decoding_max_tree_depth",
    "suffix_max_requests": "suffix_decoding_max_cached_requests",
    "suffix_factor": "suffix_decoding_max_spec_factor",
    "suffix_min_prob": "suffix_decoding_min_token_prob",
    "draft_max_model_len": "max_model_len",
    "draft_sample_method": "draft_sample_method",
    "batch_size_schedule": "num_speculative_tokens_per_batch_size",
}
PASSED_ON = (  # keys that mean nothing to Headstart, and something to vLLM
    "enforce_eager", "disable_padded_drafter_batch", "use_local_argmax_reduction", "use_heterogeneous_vocab",
    "attention_backend", "moe_backend", "revision", "code_revision", "draft_load_config",
)  # fmt: skip
TESTED = ("eagle", "eagle3", "peagle")  # methods that it tries schedules with
SERVING = {
    "host": "host",
    "port": "port",
    "max_model_len": "max-model-len",
    "max_num_seqs": "max-num-seqs",
    "dtype": "dtype",
    "gpu_memory_utilization": "gpu-memory-utilization",
    "tensor_parallel_size": "tensor-parallel-size",
}
LACKS = {
    "tree": "it verifies chains only, trees were removed",
    "static_tree": "it verifies chains only, trees were removed",
    "policy": "a table by batch size is all it has: headstart tune makes one",
    "p_min": "drafts always have their full length",
    "disable_by_batch_size": "newer versions have num_speculative_tokens_per_batch_size",
}


def write(wish: Wish) -> Exported:
    notes = (*wish.notes, *remarks(wish))
    start, settings = ("vllm", "serve", wish.target.place), asked(wish, SERVING)
    inner = speculation(wish)
    if inner:
        settings.append(Setting("speculative-config", as_object(inner)))
    above = heading(TITLE, wish, notes) + explained(inner)
    return Exported((("serve.sh", script(start, settings, above)),), (*start, *flags(settings)), notes)


def speculation(wish: Wish) -> list[Setting]:
    """The keys of `speculative_config`, each with its reason."""
    if not wish.speculates:
        return []
    own = [Setting("method", METHODS[wish.method], wish.why("method"))]
    if wish.drafter is not None:
        own.append(Setting("model", wish.drafter.place, wish.why("model")))
    if wish.method == "peagle":
        own.append(Setting("parallel_drafting", True, "P-EAGLE is an EAGLE-3 head that drafts all tokens at once"))
    own += [Setting(key, _value(wish, name), wish.why(name)) for name, key in KEYS.items() if _written(wish, name)]
    if wish.config.verification == "rejection":
        own.append(Setting("rejection_sample_method", "standard", wish.why("verification")))
    if wish.another_vocabulary:
        own = [one for one in own if one.name != "draft_sample_method"]
        own.append(Setting("use_heterogeneous_vocab", True, "the draft's matrices have another number of rows"))
    if (size := wish.serving.draft_tensor_parallel_size) is not None:
        own.append(Setting("draft_tensor_parallel_size", _parallel(wish, size), ASKED))
    names = {one.name for one in own}
    return own + [Setting(n, v, wish.why(n)) for n, v in wish.extra.items() if n in PASSED_ON and n not in names]


def _written(wish: Wish, name: str) -> bool:
    """What was said, and how n-grams match, where vLLM's own numbers differ."""
    return name in wish.given or (wish.method == "ngram" and name.startswith("prompt_lookup"))


def _value(wish: Wish, name: str) -> Any:
    value = getattr(wish.config, name)
    if name == "batch_size_schedule":
        return [list(row) for row in steps(value, wish.tokens)]  # it wants them from 1 on, and one row for each size
    return value


def _parallel(wish: Wish, size: int) -> int:
    whole = wish.serving.tensor_parallel_size or 1
    if size not in (1, whole):
        raise BadInput(
            f"--draft-tensor-parallel-size {size}: vLLM splits a draft over 1 device, or over all {whole} of the target."
        )
    return size


def as_object(settings: list[Setting]) -> dict[str, Any]:
    return {one.name: one.value for one in settings}


def explained(settings: list[Setting]) -> str:
    return comments(reasons(settings, dashes=""))


def remarks(wish: Wish) -> list[str]:
    out = []
    if wish.config.batch_size_schedule and wish.method not in TESTED:
        out.append(f"vLLM tries schedules with EAGLE heads; with {wish.method}, look whether it follows yours.")
    if wish.config.batch_size_schedule:
        out.append("vLLM takes no notice of a schedule where it runs data-parallel.")
    if wish.method == "suffix":
        out.append("vLLM's suffix method needs the package arctic-inference==0.1.1.")
    if wish.another_vocabulary and wish.config.draft_sample_method != "greedy":
        out.append("vLLM maps vocabularies for greedy drafts only, which is what it drafts with here.")
    return out


SAYS = frozenset({*KEYS, *PASSED_ON, *SERVING, "draft_tensor_parallel_size", "verification"})
ENGINE = Engine(TITLE, METHODS, SAYS, write, rules="vllm", lacks=LACKS)
