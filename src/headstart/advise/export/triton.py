"""Triton Inference Server: a model repository for its vLLM back end."""

from __future__ import annotations

import json

from headstart.advise.export import vllm
from headstart.advise.export.wish import Engine, Exported, Setting, Wish, asked
from headstart.advise.export.words import comments, heading, reasons, safe_name

TITLE = "Triton"
SERVING = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "dtype": "dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
}
CONFIG = """backend: "vllm"
# vLLM forms its own batches.
max_batch_size: 0
# One request has many answers: the back end wants it so.
model_transaction_policy { decoupled: true }
# vLLM chooses its devices, also where it takes several.
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""


def write(wish: Wish) -> Exported:
    notes = (*wish.notes, *vllm.remarks(wish))
    name = safe_name(wish.target.short)
    settings, inner = [Setting("model", wish.target.place, "the target"), *asked(wish, SERVING)], vllm.speculation(wish)
    told = vllm.as_object(settings) | ({"speculative_config": vllm.as_object(inner)} if inner else {})
    start = _command(wish)
    above = heading(TITLE, wish, notes, start) + comments(["Why 1/model.json is as it is (JSON has no comments):"])
    above += comments(reasons(settings, "")) + comments(reasons(inner, "speculative_config."))
    files = ((f"{name}/config.pbtxt", above + CONFIG), (f"{name}/1/model.json", json.dumps(told, indent=2) + "\n"))
    return Exported(files, start, notes)


def _command(wish: Wish) -> tuple[str, ...]:
    out = ["tritonserver", "--model-repository", wish.folder]
    out += ["--http-address", wish.serving.host] if wish.serving.host is not None else []
    out += ["--http-port", str(wish.serving.port)] if wish.serving.port is not None else []
    return tuple(out)


ENGINE = Engine(TITLE, vllm.METHODS, vllm.SAYS, write, rules="vllm", lacks=vllm.LACKS)
