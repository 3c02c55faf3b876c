"""The built-in model on real prompts, against transformers' own generate on the same weights."""

from __future__ import annotations

import copy

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.models.load import load, wrap
from tests.harness import assert_same

pytestmark = pytest.mark.real
PROMPTS = [
    "Repeat exactly: The ferry leaves at nine, the ferry returns at noon, the ferry leaves again at one.",
    "Write one sentence about a lighthouse.",
    "List three colours, then list them again.",
]
LENGTH = 24


@pytest.fixture(scope="module")
def target():
    return load("smollm2", dtype="float32")  # in which alone texts are equal to the last token


@pytest.fixture(scope="module")
def stock(target):
    """transformers' model over the very same weights."""
    return copy.deepcopy(target.model, {id(p): p for p in target.model.parameters()})


@pytest.fixture(scope="module")
def llm(target, stock):
    """With the target's first layers as its draft: a poor one, but of the right kind."""
    small = copy.deepcopy(stock, {id(p): p for p in stock.parameters()})
    small.model.layers = small.model.layers[:2]
    small.config.num_hidden_layers = 2
    draft = wrap("first layers", small, target.tokenizer)
    spec = {"method": "draft_model", "num_speculative_tokens": 3, "tree": True, "num_draft_nodes": 6}
    with LLM(target, speculative=spec, draft=draft, kv_memory=1 << 28) as made:
        yield made


def chat(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.chat([{"role": "user", "content": text}])


@torch.inference_mode()
def wanted(stock, ids: list[int]) -> list[int]:
    row = torch.tensor([ids])
    out = stock.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=LENGTH, do_sample=False)
    return out[0, len(ids) :].tolist()


def test_greedy_equals_generate(llm, stock) -> None:
    prompts = [chat(llm, p) for p in PROMPTS]
    want = [wanted(stock, ids) for ids in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    drafted = 0
    for method in (False, "ngram", "suffix", "draft_model"):
        outs = llm.generate(prompts, params, speculative=method)
        for ids, out, theirs in zip(prompts, outs, want, strict=True):
            assert_same(stock, ids, out.token_ids, theirs)
        drafted += sum(o.stats.accepted for o in outs)
    assert drafted > 10


def test_seeded_sampling_is_the_same_text_every_way(llm) -> None:
    prompts = [chat(llm, p) for p in PROMPTS]
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=LENGTH)
    want = [o.token_ids for o in llm.generate(prompts, params, speculative=False)]
    for method in ("ngram", "suffix", "draft_model"):
        assert [o.token_ids for o in llm.generate(prompts, params, speculative=method)] == want
    assert [llm.generate(p, params)[0].token_ids for p in prompts] == want


def test_text_is_sensible(llm) -> None:
    out = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0))[0]
    assert "Paris" in out.text and out.finish_reason == "stop"
