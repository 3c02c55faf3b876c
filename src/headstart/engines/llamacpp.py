"""llama.cpp: `llama-server`, or the same server out of the xllamacpp wheel; one for each method."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from headstart.advise.export.llamacpp import MATCH, MAX_LEN, METHODS
from headstart.bench import meters
from headstart.bench.methods import Method
from headstart.engines import xllama
from headstart.engines.launching import HOST, Launch, Order, flags
from headstart.errors import BadInput

NAME = "llama.cpp"
MISSING = (
    "llama.cpp is not here: put llama-server on the path, or `pip install xllamacpp`; or say where one is: "
    "--engine llamacpp:PATH/llama-server, or --engine llamacpp:ENVIRONMENT/bin/python of one with xllamacpp."
)
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # its own are made for talks
RENAMES = {"repetition_penalty": "repeat_penalty"}
LACKS = {  # with what says nothing
    "stop_token_ids": [],
    "bad_words": [],
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "structured_outputs": None,
    "return_token_ids": False,
    "prompt_logprobs": None,
}
ASKS = {"top_k": 0, "min_p": 0.0, "cache_prompt": False}  # as the others sample; and a prompt is read anew each time


def find(where: str = "") -> list[str]:
    """The command up to its arguments: a llama-server, or a Python that has xllamacpp."""
    found = shutil.which(str(Path(where).expanduser()) if where else "llama-server")
    if where and found is None:
        raise BadInput(f"--engine llamacpp:{where}: there is no such command.")
    if found is None and importlib.util.find_spec("xllamacpp") is not None:
        found = sys.executable
    if found is None:
        raise BadInput(MISSING)
    return [found, xllama.__file__] if Path(found).name.startswith("python") else [found]


def launch(order: Order, where: str = "") -> Launch:
    """The wheel's server is told the same in JSON."""
    from headstart.models.load import gguf_file

    if (file := gguf_file(order.model)) is None:
        raise BadInput(f"llama.cpp runs GGUF files, and {order.model} is none: name one with --model.")
    command = find(where)
    told = settings(order, str(file))
    if len(command) > 1:
        if order.more:
            raise BadInput("The server out of xllamacpp takes no --engine-args: name a llama-server.")
        command = [*command, json.dumps(told)]
    else:
        command = [*command, *arguments(told), *order.more]
    url, env = f"http://{HOST}:{order.port}", {"LLAMA_ARG_OFFLINE": "1"}
    if order.serving is None:
        return Launch(NAME, command, url, env, asks=ASKS, forgets=True)
    key = order.serving.key
    env |= {"LLAMA_API_KEY": key} if key else {}
    return Launch(NAME, command, url, env, key=key, usual=USUAL, renames=RENAMES, lacks=LACKS)


def settings(order: Order, file: str) -> dict[str, Any]:
    """In our words: see `arguments` and `xllama`."""
    length, at_once = order.max_len or MAX_LEN, order.at_once or 1
    own = {
        "model": file,
        "host": HOST,
        "port": order.port,
        "at_once": at_once,
        "context": length * at_once,  # all requests share it
        "threads": order.threads or meters.cores(),
        "name": order.serving.name if order.serving else None,
    }
    return own | speculation(order.method)


def speculation(method: Method) -> dict[str, Any]:
    config = method.config
    if not config:
        return {}
    kind = str(config.get("method"))
    if kind not in METHODS:
        raise BadInput(f"llama.cpp has no method {kind!r} here: choose from {', '.join(METHODS)}.")
    own: dict[str, Any] = {"type": METHODS[kind], "tokens": method.tokens}
    if kind == "ngram":
        return own | {"match": config.get("prompt_lookup_max", MATCH)}
    if kind == "mtp":
        return own
    from headstart.models.load import gguf_file

    draft = str(config.get("model", ""))
    if (file := gguf_file(draft)) is None:
        raise BadInput(f"llama.cpp runs GGUF files, and the draft {draft!r} is none.")
    return own | {"draft": str(file)}


def arguments(told: dict[str, Any]) -> list[str]:
    """As llama-server has them."""
    ngram = str(told.get("type", "")).startswith("ngram")
    names = {
        "model": "model",
        "host": "host",
        "port": "port",
        "at_once": "parallel",
        "context": "ctx-size",
        "threads": "threads",
        "name": "alias",
        "type": "spec-type",
        "tokens": "spec-ngram-simple-size-m" if ngram else "spec-draft-n-max",
        "match": "spec-ngram-simple-size-n",
        "draft": "spec-draft-model",
    }
    return ["--metrics", *flags({flag: told.get(name) for name, flag in names.items()})]
