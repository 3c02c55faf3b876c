"""llama.cpp: flags of `llama-server`."""

from __future__ import annotations

from headstart.advise.export.wish import ASKED, Engine, Exported, Model, Setting, Wish, asked
from headstart.advise.export.words import flags, heading, script

TITLE = "llama.cpp"
METHODS = {"ngram": "ngram-simple", "draft_model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp"}
MAX_LEN = 4096  # tokens of a request, where only their number is said
MATCH = 3  # tokens that have to be the same, where nobody says; its own number is 12
LACKS = {
    "batch_size_schedule": "drafts have one length, and --spec-draft-p-min is all that shortens them",
    "tree": "its server verifies chains only",
    "static_tree": "its server verifies chains only",
    "policy": "drafts have one length, and --spec-draft-p-min is all that shortens them",
    "verification": "it samples the target at each place and compares, which is exact too",
    "draft_sample_method": "its drafts are greedy",
    "dtype": "the GGUF file has its own",
    "gpu_memory_utilization": "--ctx-size decides how much it takes",
    "draft_tensor_parallel_size": "--spec-draft-device names the devices of the draft, as --list-devices calls them",
    "prompt_lookup_min": "one length of match is all it has, --spec-ngram-simple-size-n",
    "vocab_mapping": "it does not translate between vocabularies",
}


def write(wish: Wish) -> Exported:
    notes = (*wish.notes, *_remarks(wish))
    settings = [_model(wish.target, "model", "hf-repo", "the target"), *asked(wish, {"host": "host", "port": "port"})]
    settings += [*_room(wish), *_devices(wish), Setting("metrics", True, "/metrics tells what is accepted")]
    settings += _speculation(wish)
    start = ("llama-server",)
    text = script(start, settings, heading(TITLE, wish, notes))
    return Exported((("serve.sh", text),), (*start, *flags(settings)), notes)


def _model(model: Model, file: str, hub: str, why: str) -> Setting:
    away = model.facts is None and not model.place.endswith(".gguf")
    return Setting(hub if away else file, model.place, why)


def _room(wish: Wish) -> list[Setting]:
    """Requests at once, and the context that they share."""
    length, many = wish.serving.max_model_len, wish.serving.max_num_seqs
    if length is None and many is None:
        return []
    why = f"{length or MAX_LEN} tokens for each of {many or 1} requests, which share it"
    return [
        Setting("parallel", many or 1, ASKED if many else "one request, as nobody says more"),
        Setting("ctx-size", (length or MAX_LEN) * (many or 1), why),
    ]


def _devices(wish: Wish) -> list[Setting]:
    size = wish.serving.tensor_parallel_size or 1
    if size == 1:
        return []
    why = f"every layer in {size} equal parts, which is what it has for --tensor-parallel-size"
    return [Setting("split-mode", "row", why), Setting("tensor-split", ",".join("1" * size), why)]


def _speculation(wish: Wish) -> list[Setting]:
    if not wish.speculates:
        return []
    own = [Setting("spec-type", METHODS[wish.method], wish.why("method"))]
    tokens, why = wish.tokens, wish.why("num_speculative_tokens")
    if wish.method == "ngram":
        said = "prompt_lookup_max" in wish.given
        match = Setting("spec-ngram-simple-size-n", wish.config.prompt_lookup_max, wish.why("prompt_lookup_max"))
        usual = Setting("spec-ngram-simple-size-n", MATCH, "its own 12 rarely matches")
        return [*own, match if said else usual, Setting("spec-ngram-simple-size-m", tokens, why)]
    if wish.drafter is not None:
        own.append(_model(wish.drafter, "spec-draft-model", "spec-draft-hf", wish.why("model")))
    own.append(Setting("spec-draft-n-max", tokens, why))
    names = {"min_draft_tokens": "spec-draft-n-min", "p_min": "spec-draft-p-min", "p_split": "spec-draft-p-split"}
    return own + [
        Setting(new, getattr(wish.config, old), wish.why(old)) for old, new in names.items() if old in wish.given
    ]


def _remarks(wish: Wish) -> list[str]:
    out = []
    if wish.method == "ngram":
        said = [name for name in ("min_draft_tokens", "p_min", "p_split") if name in wish.given]
        out += [f"llama.cpp has no word for {name} with n-grams." for name in said]
    away = [
        m for m in (wish.target, wish.drafter) if m is not None and m.facts is None and not m.place.endswith(".gguf")
    ]
    out += [f"llama.cpp fetches GGUF files: {model.name} has to be a repository of such." for model in away]
    if wish.method == "eagle3" and (wish.drafter is None or wish.drafter.facts is None):
        out.append("llama.cpp wants the head as GGUF: convert_hf_to_gguf.py HEAD --target-model-dir TARGET makes it.")
    return out


SAYS = frozenset(
    {"host", "port", "max_model_len", "max_num_seqs", "tensor_parallel_size", "num_speculative_tokens"}
    | {"prompt_lookup_max", "min_draft_tokens", "p_min", "p_split"}
)
ENGINE = Engine(TITLE, METHODS, SAYS, write, rules="llamacpp", lacks=LACKS)
