"""TabbyAPI: `main.py` of its checkout, with ExLlamaV3 on a GPU; one server for each method."""

from __future__ import annotations

import sys
from pathlib import Path

from headstart.advise.export.tabbyapi import METHODS, cache_size
from headstart.bench.methods import Method
from headstart.engines.launching import HOST, Launch, Order, flags
from headstart.errors import BadInput

NAME = "TabbyAPI"
MISSING = (
    "TabbyAPI is run from its checkout: `git clone https://github.com/theroyallab/tabbyAPI`, install it as its "
    "documentation says, and name the folder: --engine tabbyapi:FOLDER."
)
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models")  # others load and unload what it serves
LACKS = {
    "structured_outputs": None,
    "return_token_ids": False,
    "prompt_logprobs": None,
    "include_stop_str_in_output": False,
}


def find(where: str = "") -> Path:
    """The checkout."""
    if not where:
        raise BadInput(MISSING)
    folder = Path(where).expanduser()
    if not (folder / "main.py").is_file():
        raise BadInput(f"--engine tabbyapi:{where}: there is no main.py in that folder. {MISSING}")
    return folder.resolve()


def launch(order: Order, where: str = "") -> Launch:
    """Every entry of its config.yml has a flag, so that no file needs to be written."""
    folder, model = find(where), Path(order.model).expanduser().resolve()
    if not model.is_dir():
        raise BadInput(f"TabbyAPI runs folders, and {order.model} is none: name one with --model.")
    cache = order.max_len and cache_size(order.max_len, max(1, order.at_once))
    options = {
        "host": HOST,
        "port": order.port,
        "disable-auth": "true",
        "model-dir": model.parent,
        "model-name": model.name,
        "max-seq-len": order.max_len,
        "cache-size": cache,
        "max-batch-size": order.at_once or None,
        "tensor-parallel": "true" if order.tensor_parallel > 1 else None,
        **drafting(order.method),
    }
    command = [_python(folder), "main.py", *flags(options), *order.more]
    return Launch(NAME, command, f"http://{HOST}:{order.port}", folder=folder, routes=ROUTES, lacks=LACKS)


def drafting(method: Method) -> dict[str, object]:
    config = method.config
    if not config:
        return {"draft-mode": "disabled"}
    kind, own = str(config.get("method")), dict[str, object]({"draft-num-tokens": method.tokens})
    if kind not in METHODS:
        raise BadInput(f"TabbyAPI has no method {kind!r}: choose ngram, mtp or draft_model:FOLDER.")
    own |= {"draft-mode": METHODS[kind]}
    if kind != "draft_model":
        return own
    draft = Path(str(config.get("model", ""))).expanduser().resolve()
    return own | {"draft-model-dir": draft.parent, "draft-model-name": draft.name}


def _python(folder: Path) -> str:
    """Of its own environment, where it has made one."""
    own = folder / "venv" / "bin" / "python"
    return str(own) if own.is_file() else sys.executable
