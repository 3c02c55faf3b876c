"""TensorRT-LLM: the YAML of its LLM API, for `trtllm-serve`. Its spelling has changed, so the version counts."""

from __future__ import annotations

from headstart.advise.check import Report
from headstart.advise.export.wish import (
    ASKED,
    Engine,
    Exported,
    Setting,
    Wish,
    asked,
    one_vocabulary,
    only_forms,
    steps,
)
from headstart.advise.export.words import heading, yaml

TITLE = "TensorRT-LLM"
METHODS = {"ngram": "NGram", "suffix": "SA", "draft_model": "Draft_Target", "eagle3": "Eagle3", "mtp": "MTP"}
BEFORE = (((1, 2), {"eagle3": "Eagle"}), ((1, 0), {"draft_model": "DraftTarget"}))  # versions that spelt differently
NEW = (1, 2)  # the flag --config, `speculative_model`, lengths by batch size
BRANCHES = 4  # candidates of a node, where a tree is wanted and nobody says
GROWS = ("eagle3", "mtp")  # methods that can draft trees
APART = ("ngram", "draft_model")  # methods that draft outside of the target's forward
FLAGS = {"host": "host", "port": "port"}
SERVING = {
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
}
LACKS = {
    "draft_tensor_parallel_size": "the draft is split like the target",
    "static_tree": "static trees are on their way out there, --tree grows one",
    "policy": "a table by batch size is all it has",
    "prompt_lookup_min": "the longest match is what it looks for",
    "p_min": "drafts always have their full length",
}


def write(wish: Wish) -> Exported:
    notes = (*wish.notes, *_remarks(wish))
    file = wish.file("config.yaml")
    start = ["trtllm-serve", wish.target.place, "--config" if _new(wish) else "--extra_llm_api_options", file]
    start += [word for one in asked(wish, FLAGS) for word in (f"--{one.name}", str(one.value))]
    settings = [*asked(wish, SERVING), *_memory(wish), *_speculation(wish)]
    text = heading(TITLE, wish, notes, start) + (yaml(settings) or "{}\n")
    return Exported((("config.yaml", text),), tuple(start), notes)


def _new(wish: Wish) -> bool:
    return wish.version is None or wish.version >= NEW


def _memory(wish: Wish) -> list[Setting]:
    share = wish.serving.gpu_memory_utilization
    return [] if share is None else [Setting("kv_cache_config", [Setting("free_gpu_memory_fraction", share, ASKED)])]


def _speculation(wish: Wish) -> list[Setting]:
    if not wish.speculates:
        return []
    own = [Setting("decoding_type", spelling(wish), wish.why("method"))]
    length = "max_draft_len" if _new(wish) or wish.method != "mtp" else "num_nextn_predict_layers"
    own.append(Setting(length, longest(wish), wish.why("num_speculative_tokens")))
    if wish.drafter is not None:
        name = "speculative_model" if _new(wish) else "speculative_model_dir"
        own.append(Setting(name, wish.drafter.place, wish.why("model")))
    if wish.method == "ngram":
        own.append(Setting("max_matching_ngram_size", wish.config.prompt_lookup_max, wish.why("prompt_lookup_max")))
    if wish.config.tree and wish.method in GROWS:
        own += _tree(wish)
    elif _scheduled(wish):
        own.append(Setting("draft_len_schedule", _table(wish), wish.why("batch_size_schedule")))
    if wish.config.verification == "rejection":
        own.append(Setting("use_rejection_sampling", True, wish.why("verification")))
    outer = [Setting("speculative_config", own)]
    if wish.method in APART:
        outer.append(Setting("disable_overlap_scheduler", True, "these drafts need the tokens of the step before"))
    return outer


def spelling(wish: Wish) -> str:
    for version, words in BEFORE:
        if wish.version is not None and wish.version < version and wish.method in words:
            return words[wish.method]
    return METHODS[wish.method]


def _tree(wish: Wish) -> list[Setting]:
    wide = wish.config.top_k or BRANCHES
    return [
        Setting("use_dynamic_tree", True, wish.why("tree")),
        Setting("dynamic_tree_max_topK", wide, "candidates of each node"),
        Setting(
            "max_total_draft_tokens",
            max(wish.tokens, min(wish.config.nodes, wide * wish.tokens)),
            "nodes of one tree",
        ),
    ]


def _scheduled(wish: Wish) -> bool:
    return bool(wish.config.batch_size_schedule) and _new(wish) and _falls(wish)


def _falls(wish: Wish) -> bool:
    """The length for the smallest batches has to be the longest of all."""
    rows = steps(wish.config.batch_size_schedule, wish.tokens)
    return rows[0][2] == max(tokens for _, _, tokens in rows)


def _table(wish: Wish) -> dict[int, int]:
    """By the largest batch that a length is for. Behind the last one nothing is drafted, so that needs no row."""
    rows = steps(wish.config.batch_size_schedule, wish.tokens)
    table = {high: tokens for _, high, tokens in rows}
    while len(table) > 1 and not table[max(table)]:
        table.pop(max(table))
    return table


def longest(wish: Wish) -> int:
    """Of all drafts."""
    if _scheduled(wish) and not wish.config.tree:
        return steps(wish.config.batch_size_schedule, wish.tokens)[0][2]
    return wish.tokens


def _remarks(wish: Wish) -> list[str]:
    out, table = [], wish.config.batch_size_schedule
    if table and not _new(wish):
        out.append("TensorRT-LLM before 1.2 has no word for batch_size_schedule.")
    elif table and wish.config.tree and wish.method in GROWS:
        out.append("TensorRT-LLM has no word for batch_size_schedule with trees.")
    elif table:
        out += _of_table(wish)
    if wish.config.tree and wish.method not in GROWS:
        out.append(f"TensorRT-LLM drafts trees with EAGLE-3 and MTP only, not with {wish.method}: a chain is written.")
    if wish.config.tree and wish.method in GROWS:
        out.append("TensorRT-LLM verifies no trees for models with sliding windows or MLA.")
    if wish.serving.gpu_memory_utilization is not None:
        out.append("TensorRT-LLM's free_gpu_memory_fraction counts what is free beside the weights, not the whole GPU.")
    if wish.method == "draft_model" and _new(wish):
        out.append("TensorRT-LLM's pages write DraftTarget; its code takes Draft_Target from 1.0 on.")
    return out


def _of_table(wish: Wish) -> list[str]:
    rows = steps(wish.config.batch_size_schedule, wish.tokens)
    if not _falls(wish):
        return [
            "TensorRT-LLM wants the longest drafts for the smallest batches, and this schedule has not: it is left out."
        ]
    out = ["TensorRT-LLM calls draft_len_schedule an interface for developers: it may change."]
    if rows[-1][2] and rows[-1][1] < 1 << 16:
        out.append(f"TensorRT-LLM drafts nothing for more than {rows[-1][1]} requests, where the schedule ends.")
    return out


def objections(report: Report) -> list[str]:
    unread = {"gguf": "GGUF", "exl2": "in ExLlama's format", "exl3": "in ExLlama's format"}
    return [*one_vocabulary(report, TITLE), *only_forms(report, TITLE, unread)]


SAYS = frozenset(
    {
        *SERVING,
        *FLAGS,
        "gpu_memory_utilization",
        "num_speculative_tokens",
        "num_draft_nodes",
        "prompt_lookup_max",
        "tree",
    }
    | {"top_k", "batch_size_schedule", "verification"}
)
ENGINE = Engine(TITLE, METHODS, SAYS, write, objections=objections, lacks=LACKS, versions=True)
