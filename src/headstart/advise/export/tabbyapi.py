"""TabbyAPI: its `config.yml`, with ExLlamaV3 behind it."""

from __future__ import annotations

from pathlib import Path

from headstart.advise.export.wish import ASKED, Engine, Exported, Model, Setting, Wish, asked
from headstart.advise.export.words import heading, yaml

TITLE = "TabbyAPI"
METHODS = {"ngram": "ngram", "draft_model": "model", "mtp": "mtp"}
PAGE = 256  # tokens, of which its cache has a whole number
MODELS = "models"  # its own folder
LACKS = {
    "batch_size_schedule": "dynamic_draft, which goes by what is accepted, is all that changes lengths",
    "tree": "it verifies chains only",
    "static_tree": "it verifies chains only",
    "verification": "it compares what the target samples with the draft, which is exact too",
    "draft_sample_method": "its drafts are greedy",
    "dtype": "the weights have their own",
    "gpu_memory_utilization": "cache_size decides how much it takes",
    "draft_tensor_parallel_size": "draft_gpu_split says how much of a draft each GPU gets, in GB",
    "prompt_lookup_max": "the longest match is what it looks for",
}


def write(wish: Wish) -> Exported:
    notes = (*wish.notes, *_remarks(wish))
    start = ("python", "main.py", "--config", wish.file("config.yml"))
    sections = [
        Setting("network", asked(wish, {"host": "host", "port": "port"})),
        Setting("model", _model(wish)),
        Setting("draft_model", _drafting(wish)),
    ]
    text = heading(TITLE, wish, notes, start) + yaml(s for s in sections if s.value)
    return Exported((("config.yml", text),), start, notes)


def _where(model: Model) -> tuple[str, str]:
    """Folder and name; what is not here is expected in its own folder."""
    if model.facts is None:
        return MODELS, model.short
    path = Path(model.facts.path).absolute()
    return str(path.parent), path.name


def cache_size(length: int, many: int) -> int:
    """Tokens, for so many requests of this length."""
    return -(-length * many // PAGE) * PAGE


def _model(wish: Wish) -> list[Setting]:
    folder, name = _where(wish.target)
    own = [Setting("model_dir", folder, "where the target lies"), Setting("model_name", name, "the target")]
    length, many = wish.serving.max_model_len, wish.serving.max_num_seqs
    if length is not None:
        own.append(Setting("max_seq_len", length, ASKED))
        own.append(
            Setting(
                "cache_size",
                cache_size(length, many or 1),
                f"{length} tokens for each of {many or 1} requests, in pages of {PAGE}",
            )
        )
    if many is not None:
        own.append(Setting("max_batch_size", many, ASKED))
    if (many_gpus := wish.serving.tensor_parallel_size or 1) > 1:
        own.append(Setting("tensor_parallel", True, f"over all GPUs that it sees, which should be {many_gpus}"))
    return own


def _drafting(wish: Wish) -> list[Setting]:
    if not wish.speculates:
        return [Setting("draft_mode", "disabled", wish.why("method"))]
    own = [Setting("draft_mode", METHODS[wish.method], wish.why("method"))]
    if wish.drafter is not None and wish.method == "draft_model":
        folder, name = _where(wish.drafter)
        own.append(Setting("draft_model_dir", folder, "where the draft lies"))
        own.append(Setting("draft_model_name", name, wish.why("model")))
    own.append(Setting("draft_num_tokens", wish.tokens, wish.why("num_speculative_tokens")))
    if wish.config.policy == "adaptive":
        own.append(Setting("dynamic_draft", True, wish.why("policy")))
    if wish.method == "ngram":
        own.append(Setting("ngram_match_min", wish.config.prompt_lookup_min, wish.why("prompt_lookup_min")))
    return own


def _remarks(wish: Wish) -> list[str]:
    away = [m for m in (wish.target, wish.drafter) if m is not None and m.facts is None]
    out = [f"TabbyAPI loads folders: put {m.name} into {MODELS}/{m.short} first." for m in away]
    if wish.config.policy == "watch":
        out.append("TabbyAPI verifies whatever it drafts: policy=watch has no counterpart.")
    return out


SAYS = frozenset(
    {"host", "port", "max_model_len", "max_num_seqs", "tensor_parallel_size", "num_speculative_tokens"}
    | {"prompt_lookup_min", "policy"}
)
ENGINE = Engine(TITLE, METHODS, SAYS, write, rules="tabbyapi", lacks=LACKS)
