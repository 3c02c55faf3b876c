"""`headstart serve --engine`: vLLM, llama.cpp or TabbyAPI behind our own door."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import (
    EngineOptions,
    SpeculationOptions,
    complete,
    engine_words,
    flags_of,
    option,
    parse_bytes,
)
from headstart.errors import BadInput, ConfigError, parse_json
from headstart.progress import note
from headstart.shapes import GROWN

if TYPE_CHECKING:
    from headstart.bench.methods import Method
    from headstart.engines.launching import Child, Launch, Order
    from headstart.server.app import ServerSettings
    from headstart.server.run import Address

log = logging.getLogger("headstart.engines")
PANEL = "Other engines"
HERE, OTHERS = "headstart", ("vllm", "llamacpp", "tabbyapi")
BACKENDS = ("ray", "mp")
TREES = (*GROWN, "num_draft_nodes")  # keys of trees in what tune writes
SCHEDULE = "num_speculative_tokens_per_batch_size"
SLOTS = 4  # requests at once in llama.cpp where nobody says: each has its context from the start
SHARE = 4  # of a CPU's free memory, one part is for KV where nobody says
MULTIPLE = (
    "pipeline_parallel_size",
    "distributed_executor_backend",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
)
OURS = (  # options that only our own engine has
    "device", "quantize", "runner", "gpu_layers", "kv_type", "flash_attention", "no_fuse", "deterministic", "record",
    "max_prompt_tokens", "verification", "policy",
)  # fmt: skip
IDLE = {  # options that an engine cannot honour
    "vllm": OURS,
    "llamacpp": (*OURS, "dtype", "kv_memory", "max_batch_tokens", "no_kernels", "trust_remote_code", "tensor_parallel_size",
                 "draft_tensor_parallel_size", *MULTIPLE),
    "tabbyapi": (*OURS, "dtype", "kv_memory", "max_batch_tokens", "no_kernels", "trust_remote_code", "threads",
                 "draft_tensor_parallel_size", *MULTIPLE),
}  # fmt: skip


@dataclass(frozen=True)
class OtherOptions:
    engine: Annotated[
        str,
        option(
            "--engine",
            help="Who computes: headstart; or vllm, llamacpp, tabbyapi (with :WHERE it is, where that is not on the path), "
            "which is started, watched and ended.",
            panel=PANEL,
        ),
    ] = HERE
    engine_args: Annotated[str, option("--engine-args", help="For it, as on its command line.", panel=PANEL)] = ""
    engine_log: Annotated[
        str | None,
        option(
            "--engine-log", help="File for all it says. [default: in the cache folder]", panel=PANEL, show_default=False
        ),
    ] = None
    start_timeout: Annotated[
        float, option("--start-timeout", help="Seconds until it has to be ready.", panel=PANEL)
    ] = 1200.0
    tensor_parallel_size: Annotated[
        int, option("--tensor-parallel-size", help="GPUs that share each layer; with our own engine, 1.", panel=PANEL)
    ] = 1
    draft_tensor_parallel_size: Annotated[
        int | None,
        option("--draft-tensor-parallel-size", help="GPUs that share the draft's layers: 1, or as many.", panel=PANEL),
    ] = None
    pipeline_parallel_size: Annotated[
        int, option("--pipeline-parallel-size", help="vLLM: parts that the layers are cut into.", panel=PANEL)
    ] = 1
    distributed_executor_backend: Annotated[
        str | None,
        option("--distributed-executor-backend", help="vLLM: ray or mp, for several GPUs or machines.", panel=PANEL),
    ] = None
    nnodes: Annotated[int, option("--nnodes", help="vLLM with mp: machines.", panel=PANEL)] = 1
    node_rank: Annotated[
        int, option("--node-rank", help="Which of them this is; those above 0 have no API.", panel=PANEL)
    ] = 0
    master_addr: Annotated[
        str | None, option("--master-addr", help="Address of the machine of rank 0.", panel=PANEL)
    ] = None
    master_port: Annotated[int | None, option("--master-port", help="Port there that is free.", panel=PANEL)] = None

    @property
    def name(self) -> str:
        return self.engine.partition(":")[0]

    @property
    def where(self) -> str:
        return self.engine.partition(":")[2]

    @property
    def headless(self) -> bool:
        return self.name == "vllm" and self.node_rank > 0

    def check(self, said: Collection[str]) -> None:
        """Before anything is bound or loaded."""
        if self.engine == HERE:
            own = {f.name for f in fields(self)} - {"engine"}
            if idle := [name for name in own if getattr(self, name) != getattr(OtherOptions(), name)]:
                if "tensor_parallel_size" in idle:
                    raise BadInput("Our own engine computes on one device: --tensor-parallel-size has to be 1.")
                raise BadInput(f"{flags_of(sorted(idle))} is for other engines: say which with --engine.")
            return
        if self.name not in OTHERS:
            raise BadInput(f"--engine {self.engine} is not known: choose {', '.join((HERE, *OTHERS))}.")
        if idle := [name for name in IDLE[self.name] if name in said]:
            note(
                f"{self.name} cannot be told {flags_of(idle)}, which has no effect. See --engine-args for its own options."
            )
        if self.name == "vllm":
            self._check_nodes()

    def _check_nodes(self) -> None:
        sizes = (self.tensor_parallel_size, self.pipeline_parallel_size, self.nnodes)
        if min(sizes) < 1:
            raise BadInput("--tensor-parallel-size, --pipeline-parallel-size and --nnodes are at least 1.")
        if self.draft_tensor_parallel_size not in (None, 1, self.tensor_parallel_size):
            raise BadInput(
                f"--draft-tensor-parallel-size {self.draft_tensor_parallel_size} is not usable: vLLM's drafts run on 1 GPU, or "
                f"on as many as the target ({self.tensor_parallel_size})."
            )
        if self.distributed_executor_backend not in (None, *BACKENDS):
            raise BadInput(
                f"--distributed-executor-backend {self.distributed_executor_backend} is not known: ray or mp."
            )
        if self.nnodes > 1 and self.distributed_executor_backend == "ray":
            raise BadInput("With Ray, machines join by `ray start`: leave out --nnodes.")
        if not 0 <= self.node_rank < self.nnodes:
            raise BadInput(f"--node-rank {self.node_rank} is none of --nnodes {self.nnodes}: they count from 0.")
        if self.nnodes > 1 and self.master_addr is None:
            raise BadInput("--nnodes needs --master-addr, the address of the machine of rank 0, on each of them.")


# ------------------------------------------------------------------ from options to an order
def method(spec: SpeculationOptions, other: OtherOptions) -> Method:
    """With vLLM's keys, and nothing that was not said. Nobody says: plain decoding, as with the other engine itself."""
    from headstart.bench.methods import Method
    from headstart.config import METHOD_ALIASES

    given, whole = spec.shorthands(), spec.whole()
    if isinstance(whole, dict):
        config = _without_trees(whole, other)
    elif whole is not None:
        config = _config(whole)
    else:
        if trees := [name for name in ("tree", "static_tree") if name in given]:
            raise BadInput(f"{other.name} verifies no trees: leave out {flags_of(trees)}.")
        config = complete({k: v for k, v in given.items() if k not in ("verification", "policy")}, "none")
    _check(config)
    name = METHOD_ALIASES.get(str(config.get("method")), str(config.get("method")))
    if name == "none":
        return Method("none")
    if other.draft_tensor_parallel_size is not None and other.name == "vllm":
        config = config | {"draft_tensor_parallel_size": other.draft_tensor_parallel_size}
    return Method(name, config | ({"method": name} if "method" in config else {}))


def _config(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return {"method": text}
    found = parse_json(text, "--speculative-config")
    if not isinstance(found, dict):
        raise ConfigError("--speculative-config should be a JSON object.")
    return found if "method" in found or "model" not in found else {"method": "draft_model"} | found


def _check(config: Mapping[str, Any]) -> None:
    """What we write on the other engine's command line ourselves."""
    if not isinstance(config.get("method"), str):
        raise ConfigError('The speculative config names no method: add one, such as "method": "ngram".')
    tokens = config.get("num_speculative_tokens", 1)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"num_speculative_tokens={tokens!r} is not usable: expected a whole number of at least 1.")


def _without_trees(tuned: dict[str, Any], other: OtherOptions) -> dict[str, Any]:
    """What was tuned, as far as the other engine has it; the rest is said."""
    if tuned.get("tree"):
        note(f"{other.name} verifies no trees, which --tuned names: it drafts chains of that depth.")
        depth, rows = int(tuned["num_speculative_tokens"]), tuned.get(SCHEDULE)
        tuned = {k: v for k, v in tuned.items() if k not in TREES}
        tuned |= {SCHEDULE: [[low, high, min(n, depth)] for low, high, n in rows]} if rows else {}
    if other.name != "vllm" and tuned.pop(SCHEDULE, None) is not None:
        note(f"{other.name} has no lengths by batch size, which --tuned names: all drafts are of one length.")
    return tuned


def order(
    engine: EngineOptions,
    spec: SpeculationOptions,
    other: OtherOptions,
    name: str,
    said: Collection[str],
    max_num_seqs: int,
    max_batch_tokens: int,
) -> Order:
    from headstart.engines.launching import Order, Serving, free_port

    serving = Serving(
        name,
        secrets.token_urlsafe(16) if other.name != "tabbyapi" else "",
        _kv_memory(engine),
        max_batch_tokens if "max_batch_tokens" in said else None,
        other.pipeline_parallel_size,
        other.distributed_executor_backend,
        other.nnodes,
        other.node_rank,
        other.master_addr,
        other.master_port,
    )
    return Order(
        engine.model,
        method(spec, other),
        free_port(),
        max_len=engine.max_model_len,
        at_once=SLOTS if other.name == "llamacpp" and "max_num_seqs" not in said else max_num_seqs,
        dtype=_dtype(engine),
        threads=engine.threads,
        eager=engine.no_kernels,
        tensor_parallel=other.tensor_parallel_size,
        trust_remote_code=engine.trust_remote_code,
        more=engine_words(other.engine_args),
        serving=serving,
    )


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _dtype(engine: EngineOptions) -> str:
    """On a GPU the engine chooses what goes with the weights; on a CPU we know what is fast."""
    from headstart.models.load import pick_device, pick_dtype

    if engine.dtype == "auto" and _gpu():
        return "auto"
    return str(pick_dtype(engine.dtype, pick_device())).removeprefix("torch.")


def _kv_memory(engine: EngineOptions) -> int | None:
    """Bytes. On a CPU, vLLM would take nine tenths of all memory, where nobody says."""
    from headstart.models.memory import free_memory

    if engine.kv_memory is not None:
        return parse_bytes(engine.kv_memory)
    return None if _gpu() or "VLLM_CPU_KVCACHE_SPACE" in os.environ else free_memory() // SHARE


def launch(asked: Order, other: OtherOptions) -> Launch:
    """How it is started, once everything that can be known has been looked at."""
    from headstart.advise.check import capability_here
    from headstart.engines.launched import LAUNCHERS
    from headstart.engines.vetting import vet

    made = LAUNCHERS[other.name](asked, other.where)  # what is not there, or not available, is said first
    vet(other.name, asked, capability_here())
    if not asked.method.config:
        note(f"{made.engine} is told to draft nothing: --drafter ngram, or another of its methods, would change that.")
    return made


# ------------------------------------------------------------------ and until it ends
@contextlib.contextmanager
def opened(made: Launch, other: OtherOptions, port: int) -> Iterator[Child]:
    """The engine while it runs. Each line that it says is one of our log, at the level info."""
    from headstart.engines.launching import running

    file = log_file(other, port)
    note(f"Starting {made.engine}: what it says is kept in {file}.")
    with running(made, file, lambda line: log.info("%s: %s", made.engine, line), other.start_timeout) as child:
        yield child


def log_file(other: OtherOptions, port: int) -> Path:
    """One for each port, so that they do not become many."""
    from headstart.models.builtin import cache_dir

    return Path(other.engine_log) if other.engine_log else cache_dir() / "logs" / f"{other.name}-{port}.log"


def serve_there(
    made: Launch,
    other: OtherOptions,
    asked: Order,
    settings: ServerSettings,
    address: Address,
    door: socket.socket,
    drain: float,
    log_level: str,
    tracing: Any,
) -> None:
    """Until somebody says stop, or the engine ends: then with code 1."""
    from headstart.engines.launching import RECENT
    from headstart.engines.relay import create_relay, watched
    from headstart.server.run import serve

    with opened(made, other, address.port) as child:
        app = create_relay(child, settings, asked.at_once, asked.method.name, tracing)
        note(f"Serving {settings.name} with {made.engine} at {address.url}/v1. Ctrl-C ends.")
        signal.signal(
            signal.SIGHUP, lambda *_: app.state.stop()
        )  # as SIGTERM; an exception would get lost in an event loop
        with watched(app):
            serve(app, address, door, drain, log_level)
        if app.state.died:
            _say_end(child, RECENT)


def work_there(made: Launch, other: OtherOptions) -> None:
    """A machine of a rank above 0: no door, until somebody says stop, or the engine ends."""
    from headstart.engines.launching import LOOK, RECENT

    with opened(made, other, other.node_rank) as child:
        note(f"{made.engine} works for {other.master_addr} as number {other.node_rank} of {other.nnodes}. Ctrl-C ends.")
        try:
            while child.process.poll() is None:
                time.sleep(LOOK)
        except (KeyboardInterrupt, SystemExit):
            return
        _say_end(child, RECENT)


def _say_end(child: Child, last: int) -> None:
    what = f"{child.launch.engine} ended with code {child.process.poll()}"
    print(f"headstart: {what}: {child.why(last)}", file=sys.stderr)
    raise typer.Exit(1)
