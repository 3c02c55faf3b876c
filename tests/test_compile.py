"""Every kernel that an engine launches compiles for a GPU that is not here: the interpreter forgives what a compiler does not.

Launches are caught and their kernels compiled for compute capability 9.0; nothing runs, so what the engine computes is
nonsense, but it goes through all its steps.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from headstart.models.kernel_runner import KernelRunner
from tests import harness, tiny

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are not compiled here", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from headstart.models.kernels import launch

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
KINDS = {torch.int32: "i32", torch.int64: "i64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint32: "u32"}
TREE = {
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "tree": True,
    "num_draft_nodes": 7,
    "top_k": 4,
    "max_branches": 4,
}


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{KINDS[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i1" if isinstance(value, bool) else "i32"


class Compiler:
    """Takes the place of a launch."""

    def __init__(self) -> None:
        self.seen: dict[Any, str] = {}

    def __call__(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        values = dict(zip(function.arg_names, args, strict=False)) | kwargs
        fixed = {p.name: values[p.name] for p in function.params if p.is_constexpr}
        types = {n: "constexpr" if n in fixed else kind(values[n]) for n in function.arg_names}
        key = (function.__name__, *types.items(), *fixed.items(), *options.items())
        if key not in self.seen:
            places = {(function.arg_names.index(n),): v for n, v in fixed.items()}
            self.seen[key] = function.__name__
            triton.compile(ASTSource(function, types, places), target=TARGET, options=options)


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    out = Compiler()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: out(self, *args, **kwargs))
    monkeypatch.setattr(launch, "_early_launch", lambda device: {"EARLY": True, "launch_pdl": True})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return out


@pytest.mark.filterwarnings("ignore")
def test_an_engine_with_a_head(compiler: Compiler, capsys) -> None:
    model = tiny.model().to(torch.bfloat16)
    head = tiny.eagle(model.config, (1, 2, 3), list(range(40)), head_dim=32, norm_output=True).to(torch.bfloat16)
    e = harness.engine(KernelRunner(model), TREE, head=head)
    asked = [
        harness.request(p, eos=None, max_tokens=8, temperature=t)
        for p, t in zip(tiny.prompts(2), (0.0, 0.7), strict=True)
    ]
    for r in asked:
        e.add(r)
    for _ in range(6):
        e.step()
    names = set(compiler.seen.values())
    assert {"_begin", "_gather", "_enter", "_qkv", "_product", "_gate_up", "_top", "_frontier", "_select"} <= names
    assert {"_advance", "_plant", "_choose", "_walk", "_move", "_embed"} <= names
    assert "without drafts" not in capsys.readouterr().err
