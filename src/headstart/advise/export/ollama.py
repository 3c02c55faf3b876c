"""Ollama: a Modelfile. It speculates with MTP layers only; a classic draft model is passed to nobody there."""

from __future__ import annotations

from headstart.advise.export.wish import ASKED, Engine, Exported, Setting, Wish
from headstart.advise.export.words import heading, line, safe_name
from headstart.models.ollama import PREFIX

TITLE = "Ollama"
METHODS = {"mtp": "draft_num_predict"}
LACKS = {
    "tensor_parallel_size": "it lays layers on GPUs by itself",
    "draft_tensor_parallel_size": "it lays layers on GPUs by itself",
    "dtype": "the weights have their own",
    "gpu_memory_utilization": "it takes what it needs",
    "batch_size_schedule": "draft_num_predict is one number",
    "tree": "it verifies chains only",
    "static_tree": "it verifies chains only",
    "policy": "only its MLX runner adapts, and by itself",
}


def write(wish: Wish) -> Exported:
    notes = (*wish.notes, *_remarks(wish))
    start = ("ollama", "create", safe_name(wish.target.short).lower(), "-f", wish.file("Modelfile"))
    text = heading(TITLE, wish, notes, start) + "".join(_lines(one) for one in _settings(wish))
    return Exported((("Modelfile", text),), start, notes)


def _settings(wish: Wish) -> list[Setting]:
    name = wish.target.name
    own = [Setting("FROM", name.removeprefix(PREFIX) if name.startswith(PREFIX) else wish.target.place, "the target")]
    if wish.drafter is not None and wish.speculates:
        own.append(Setting("DRAFT", wish.drafter.place, wish.why("model")))
    if (length := wish.serving.max_model_len) is not None:
        own.append(Setting("PARAMETER num_ctx", length, ASKED))
    if wish.speculates:
        own.append(Setting("PARAMETER draft_num_predict", wish.tokens, wish.why("num_speculative_tokens")))
    return own


def _lines(one: Setting) -> str:
    value = line(str(one.value))
    quoted = f'"{value}"' if " " in value else value
    return f"# {line(one.why)}\n{one.name} {quoted}\n"


def _remarks(wish: Wish) -> list[str]:
    """What Ollama's server is told by its environment, and what a name means there."""
    own, out = wish.serving, []
    if own.host is not None or own.port is not None:
        out.append(
            f"Ollama's server is told by OLLAMA_HOST={own.host or '127.0.0.1'}:{own.port or 11434} where it listens."
        )
    if own.max_num_seqs is not None:
        out.append(f"Ollama's server is told by OLLAMA_NUM_PARALLEL={own.max_num_seqs} how many requests run at once.")
    if wish.target.facts is None:
        out.append("Ollama looks for FROM in its own library: a hub's GGUF files are hf.co/OWNER/NAME there.")
    return out


SAYS = frozenset({"host", "port", "max_num_seqs", "max_model_len", "num_speculative_tokens"})
ENGINE = Engine(TITLE, METHODS, SAYS, write, lacks=LACKS)
