"""llama.cpp's server out of the xllamacpp wheel: a program of its own, for any Python that has the wheel.

    python xllama.py '{"model": "x.gguf", "host": "127.0.0.1", "port": 8080, "at_once": 1, "context": 4096}'

It needs nothing of Headstart, and ends when it is told to (SIGTERM). With a `name` it answers those who have LLAMA_API_KEY.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def serve(told: dict[str, Any]) -> Any:
    """The server, which runs as long as somebody holds it."""
    import xllamacpp  # type: ignore[import-not-found,import-untyped,unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path = told["model"]
    params.hostnames, params.port = [told["host"]], told["port"]
    params.n_parallel, params.n_ctx = told["at_once"], told["context"]
    params.endpoint_metrics = True
    if told.get("name"):  # it serves clients
        params.model_alias, params.api_keys = {told["name"]}, [os.environ["LLAMA_API_KEY"]]
    if told.get("threads"):
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = told["threads"]
    if told.get("type"):
        speculate(params.speculative, told, xllamacpp.common_speculative_type)
    return xllamacpp.Server(params)


def speculate(own: Any, told: dict[str, Any], types: Any) -> None:
    """`ngram-simple` is COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE."""
    own.types = [getattr(types, "COMMON_SPECULATIVE_TYPE_" + told["type"].upper().replace("-", "_"))]
    if told["type"].startswith("ngram"):
        own.ngram_simple.size_m = told.get("tokens") or own.ngram_simple.size_m
        own.ngram_simple.size_n = told.get("match") or own.ngram_simple.size_n
        return
    own.draft.n_max = told.get("tokens") or own.draft.n_max
    if told.get("draft"):
        own.draft.mparams.path = told["draft"]


if __name__ == "__main__":
    server = serve(json.loads(sys.argv[1]))
    print(f"listening at {server.listening_address}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pause()
