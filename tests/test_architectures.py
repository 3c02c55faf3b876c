"""Greedy output equals transformers' generate, token by token: 17 architectures, every drafter, batch 1 and 8."""

from __future__ import annotations

import functools

import pytest
import torch

from headstart.models import lean
from headstart.models.runner import TorchRunner
from tests import tiny
from tests.harness import assert_same, engine, generate, request, run

LENGTH = 20
SPECULATIVE = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_draft_nodes": 8},
    "chain": {"method": "draft_model", "num_speculative_tokens": 4},
    "tree": {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "tree": True,
        "num_draft_nodes": 12,
        "p_split": 0.02,
    },
    "oracle": {"method": "tests.tiny.Oracle", "num_draft_nodes": 24},
    "random": {"method": "tests.tiny.RandomTrees", "num_draft_nodes": 10},
}


@functools.cache
def wanted(name: str) -> list[list[int]]:
    stock = tiny.model(name)
    return [generate(stock, p, LENGTH) for p in tiny.prompts(8)]


@pytest.mark.parametrize("how", SPECULATIVE)
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_greedy_equals_generate(name: str, how: str) -> None:
    prompts, want = tiny.prompts(8), wanted(name)
    tiny.Oracle.known = {tuple(p): w for p, w in zip(prompts, want, strict=True)}
    draft = tiny.noisy(name) if SPECULATIVE[how] and SPECULATIVE[how]["method"] == "draft_model" else None
    e = engine(tiny.model(name), SPECULATIVE[how], draft)
    alone = run(e, [r := request(prompts[1], max_tokens=LENGTH)])
    batch = [request(p, max_tokens=LENGTH) for p in prompts]
    outs = alone + run(e, batch)
    stock = tiny.model(name)
    for prompt, ours, theirs in zip([prompts[1], *prompts], outs, [want[1], *want], strict=True):
        assert_same(stock, prompt, ours, theirs)
    accepted = sum(b.stats.accepted for b in [r, *batch])
    if how in ("oracle", "chain", "tree"):
        assert accepted > 0, "the drafts were never right: this test would prove nothing"
    for x in [r, *batch]:
        assert x.stats.tokens == len(x.output) and x.stats.accepted <= x.stats.drafted


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_wide_weights_say_the_same(name: str, monkeypatch) -> None:
    """The second copy of the weights, in oneDNN's order, where torch has it."""
    if tiny.DEVICE != "cpu" or not torch.backends.mkldnn.is_available():
        pytest.skip("only for CPUs, and a torch with oneDNN")
    monkeypatch.setattr(lean, "wide_pays", lambda weight: True)
    wide = engine(TorchRunner(tiny.model(name), wide=True), SPECULATIVE["ngram"])
    assert (
        wide.runner.lean.head.packed is not None
        and wide.runner.weight_bytes > 1.5 * TorchRunner(tiny.model(name)).weight_bytes
    )
    prompts = tiny.prompts(8)
    outs = run(wide, [request(p, max_tokens=LENGTH) for p in prompts])
    stock = tiny.model(name)
    for prompt, ours, theirs in zip(prompts, outs, wanted(name), strict=True):
        assert_same(stock, prompt, ours, theirs)


@pytest.mark.parametrize("name", ["llama", "mistral+window", "qwen2", "qwen3"])
def test_fused_forward_equals_stock(name: str) -> None:
    """The switch `fuse=False` runs the model's own forward; both say the same."""
    prompts = tiny.prompts(4)
    fused, plain = engine(tiny.model(name)), engine(tiny.model(name), fuse=False)
    assert fused.runner.lean is not None and plain.runner.lean is None
    assert run(fused, [request(p) for p in prompts]) == run(plain, [request(p) for p in prompts])
