"""SGLang: flags of its server, and a file of steps by batch size where a schedule is wanted."""

from __future__ import annotations

import json

from headstart.advise.check import Report
from headstart.advise.export.wish import Engine, Exported, Setting, Wish, asked, one_vocabulary, only_forms, steps
from headstart.advise.export.words import flags, heading, script

TITLE = "SGLang"
METHODS = {
    "ngram": "NGRAM", "suffix": "NGRAM", "draft_model": "STANDALONE", "eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN",
}  # fmt: skip
OF_EAGLE = ("eagle3", "eagle", "mtp")  # that follow a schedule, as long as they draft chains
BRANCHES = 4  # candidates of a node, where a tree is wanted and nobody says
SCHEDULE = "adaptive.json"
SERVING = {
    "host": "host",
    "port": "port",
    "max_model_len": "context-length",
    "max_num_seqs": "max-running-requests",
    "dtype": "dtype",
    "gpu_memory_utilization": "mem-fraction-static",
    "tensor_parallel_size": "tp-size",
}
LACKS = {
    "draft_tensor_parallel_size": "the draft is split like the target",
    "static_tree": "it grows its trees, --speculative-eagle-topk wide",
    "prompt_lookup_min": "its n-grams are kept in a trie with rules of its own",
    "prompt_lookup_max": "its n-grams are kept in a trie with rules of its own",
    "p_min": "drafts always have their full length",
}


def write(wish: Wish) -> Exported:
    notes = (*wish.notes, *_remarks(wish))
    start = ("python", "-m", "sglang.launch_server")
    settings = [Setting("model-path", wish.target.place, "the target"), *asked(wish, SERVING), *_speculation(wish)]
    text = script(start, settings, heading(TITLE, wish, notes))
    table = ((SCHEDULE, json.dumps(_slots(wish), indent=2) + "\n"),) if _scheduled(wish) else ()
    return Exported((("serve.sh", text), *table), (*start, *flags(settings)), notes)


def _speculation(wish: Wish) -> list[Setting]:
    if not wish.speculates:
        return []
    own = [Setting("speculative-algorithm", METHODS[wish.method], wish.why("method"))]
    if wish.drafter is not None:
        own.append(Setting("speculative-draft-model-path", wish.drafter.place, wish.why("model")))
    return own + (_lookup(wish) if METHODS[wish.method] == "NGRAM" else _drafting(wish))


def _lookup(wish: Wish) -> list[Setting]:
    return [
        Setting("speculative-num-draft-tokens", wish.tokens + 1, _counted(wish.tokens)),
        Setting("speculative-ngram-max-bfs-breadth", 1, "chains: branches need one of few attention back ends"),
    ]


def _drafting(wish: Wish) -> list[Setting]:
    wide = (wish.config.top_k or BRANCHES) if wish.config.tree else 1
    nodes = wish.config.nodes if wish.config.tree else wish.tokens
    own = [
        Setting("speculative-num-steps", wish.tokens, wish.why("num_speculative_tokens")),
        Setting("speculative-eagle-topk", wide, wish.why("tree") if wish.config.tree else "a chain"),
        Setting("speculative-num-draft-tokens", nodes + 1, _counted(nodes)),
    ]
    if wish.config.tree:
        own.append(Setting("disable-overlap-schedule", True, "its overlapped steps verify chains only"))
    if wish.config.verification == "rejection" and _chain_of_eagle(wish):
        own.append(Setting("speculative-use-rejection-sampling", True, wish.why("verification")))
    if _adapts(wish):
        own.append(
            Setting("speculative-adaptive", True, wish.why("batch_size_schedule" if _scheduled(wish) else "policy"))
        )
    if _scheduled(wish):
        own.append(
            Setting("speculative-adaptive-config", wish.file(SCHEDULE), "one number of steps for each batch size")
        )
    return own


def _counted(nodes: int) -> str:
    return f"{nodes} drafted, and the token that they follow"


def _chain_of_eagle(wish: Wish) -> bool:
    return wish.method in OF_EAGLE and not wish.config.tree


def _scheduled(wish: Wish) -> bool:
    return bool(wish.config.batch_size_schedule) and _chain_of_eagle(wish)


def _adapts(wish: Wish) -> bool:
    return _scheduled(wish) or (wish.config.policy == "adaptive" and _chain_of_eagle(wish))


def _slots(wish: Wish) -> dict[str, dict[str, list[int]]]:
    """By the smallest batch that they are for; one candidate each, so that nothing but the batch decides."""
    rows = steps(wish.config.batch_size_schedule, wish.tokens)
    return {str(low): {"candidate_steps": [tokens]} for low, _, tokens in rows}


def _remarks(wish: Wish) -> list[str]:
    out = []
    if wish.config.batch_size_schedule and not _scheduled(wish):
        out.append("SGLang has no word for batch_size_schedule but with chains of EAGLE heads and MTP layers.")
    if wish.config.policy == "adaptive" and not _adapts(wish):
        out.append("SGLang adapts the length of EAGLE's chains only: policy=adaptive is left out.")
    if wish.config.verification == "rejection" and not _chain_of_eagle(wish):
        out.append(
            "SGLang rejects by the draft's probabilities with EAGLE's chains only: verification=rejection is left out."
        )
    if wish.config.policy == "watch":
        out.append("SGLang verifies whatever it drafts: policy=watch has no counterpart.")
    if wish.method == "suffix":
        out.append("SGLang's nearest to suffix drafts is NGRAM, a trie of all past texts.")
    if wish.config.tree and METHODS.get(wish.method) == "NGRAM":
        out.append("SGLang's n-grams branch with --speculative-ngram-max-bfs-breadth; a chain is written here.")
    if wish.speculates and wish.serving.max_num_seqs is None:
        out.append("SGLang runs 48 requests at once where it speculates and --max-num-seqs is not said.")
    if wish.serving.gpu_memory_utilization is not None:
        out.append(
            "SGLang's --mem-fraction-static counts weights and KV, but not activations and graphs: leave it room."
        )
    return out


def objections(report: Report) -> list[str]:
    unread = {"exl2": "in ExLlama's format", "exl3": "in ExLlama's format"}
    return [*one_vocabulary(report, TITLE), *only_forms(report, TITLE, unread)]


SAYS = frozenset(
    {*SERVING, "num_speculative_tokens", "num_draft_nodes", "tree", "top_k", "batch_size_schedule", "policy"}
    | {"verification"}
)
ENGINE = Engine(TITLE, METHODS, SAYS, write, objections=objections, lacks=LACKS)
