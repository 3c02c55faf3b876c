"""The target's first layers draft: logits are those of a shorter model, their KV is the target's, the text never changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from headstart.core import Batch, Segment
from headstart.errors import ConfigError
from headstart.models.runners import make_runner
from tests import tiny
from tests.harness import assert_same, engine, generate, request, run
from tests.test_head_drafter import asked, plain_texts, watched

CHAIN = {"method": "early_exit", "num_speculative_tokens": 4, "exit_layer": 2}
TREE = CHAIN | {"tree": True, "num_draft_nodes": 9, "top_k": 3, "max_branches": 3, "p_split": 0.0}


def shorter(name: str, layers: int) -> Any:
    """transformers' own model of the first layers, with the weights of the tiny one."""
    from transformers import AutoModelForCausalLM

    whole = tiny.model(name)
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(whole.device)
    missing, _ = made.load_state_dict(whole.state_dict(), strict=False)
    assert not missing
    return made


def one_text(runner: Any, tokens: list[int], split: int, layers: int | None) -> torch.Tensor:
    """Logits of the rows behind `split`: the text before it is read whole, by all layers."""
    slots = np.arange(len(tokens))
    for start, stop, cut in ((0, split, None), (split, len(tokens), layers)):
        span = np.arange(start, stop)
        segment = Segment(0, stop - start, start, slots[:stop])
        batch = Batch(np.array(tokens[start:stop]), span, [segment], np.arange(stop - start), layers=cut)
        out = runner.forward(batch).logits.clone()
    return out


# ------------------------------------------------------------------ a forward of some layers
@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_logits_are_those_of_a_shorter_model(name: str) -> None:
    """Behind a text that all layers have read: of each architecture, with its own final norm and head."""
    runner, text = make_runner(tiny.model(name)), tiny.prompts(2)[1]
    runner.allocate(64, 4, 64, 4)
    for layers in (1, 2, 3):
        model = shorter(name, layers) if layers < 3 else tiny.model(name)
        with torch.inference_mode():
            wanted = model(torch.tensor([text], device=model.device), use_cache=False).logits[0, -4:]
        found = one_text(runner, text, len(text) - 4, layers)
        torch.testing.assert_close(found.float(), wanted.float(), atol=2e-3, rtol=1e-3)
    again = one_text(runner, text, len(text) - 4, None)  # it is whole again
    torch.testing.assert_close(again.float(), wanted.float(), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("fuse", [True, False])
def test_every_way_of_computing_can_stop_early(fuse: bool, monkeypatch) -> None:
    """Compiled loops, the lean forward, transformers' own: for a few rows and for many."""
    text = tiny.prompts(2)[1]
    model = shorter("llama", 2)
    with torch.inference_mode():
        wanted = model(torch.tensor([text], device=model.device), use_cache=False).logits[0]
    for loops in (True, False) if fuse else (True,):
        monkeypatch.setattr("headstart.models.looped.available", lambda loops=loops: loops)
        runner = make_runner(tiny.model(), fuse=fuse)
        runner.allocate(64, 4, 64, 4)
        found = one_text(runner, text, 1, 2)
        torch.testing.assert_close(found.float(), wanted[1:].float(), atol=2e-3, rtol=1e-3)


# ------------------------------------------------------------------ drafts
@pytest.mark.parametrize("pages", [400, 14])
def test_a_chain_is_that_of_the_shorter_model(pages: int) -> None:
    """From the target's KV alone: of prompts read in pieces, of accepted tokens, after a preemption."""
    short = shorter("llama", 2)
    e = engine(tiny.model(), CHAIN, pages=pages, max_len=50, max_batch_tokens=20, share_prefixes=False)
    seen, rs = watched(e), asked(4)
    assert run(e, rs) == plain_texts(rs)
    assert (sum(r.stats.preemptions for r in rs) > 0) == (pages == 14)
    seen = [(tokens, draft) for tokens, draft in seen if len(draft)]
    assert len(seen) > 20
    for tokens, draft in seen[::3]:
        assert draft.tokens == generate(short, tokens, len(draft), eos=None), len(tokens)


def test_only_the_new_tokens_are_computed() -> None:
    """One row for the last token, then one for each node that goes on: the text is never read again."""
    e = engine(tiny.model(), CHAIN)
    batches, forward = [], e.runner.forward
    e.runner.forward = lambda batch: (batches.append(batch), forward(batch))[1]
    r = request(tiny.prompts(1)[0], max_tokens=10, eos=None)
    run(e, [r])
    drafts = [b for b in batches if b.layers is not None]
    assert drafts and all(len(b.tokens) == 1 and b.layers == 2 for b in drafts)
    whole = [b for b in batches if b.layers is None]
    assert len(whole) == r.stats.steps and len(drafts) <= 4 * r.stats.steps


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_all_layers_foresee_every_token(spec: dict, temperature: float) -> None:
    rs = [request(p, seed=i, max_tokens=16, temperature=temperature, eos=None) for i, p in enumerate(tiny.prompts(4))]
    assert run(engine(tiny.model(), spec | {"exit_layer": 3}), rs) == plain_texts_of(rs)
    for r in rs:
        stats = r.stats
        assert (
            stats.accepted_by_position[0] == stats.drafts > 2
        )  # in a tree, the likeliest child of the last token is right
        if spec is CHAIN:  # 4 drafted tokens and 1 more in each step behind the first
            assert stats.accepted == stats.drafted == 12 and stats.steps == 4


def plain_texts_of(rs: list[Any]) -> list[list[int]]:
    params = dict(max_tokens=rs[0].params.max_tokens, temperature=rs[0].params.temperature)
    return run(engine(tiny.model()), [request(r.prompt, seed=r.seed, eos=None, **params) for r in rs])


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("fuse", [True, False])
def test_greedy_text_is_that_of_transformers(spec: dict, count: int, fuse: bool) -> None:
    rs = asked(count)
    found, model = run(engine(tiny.model(), spec, fuse=fuse), rs, arrivals=1), tiny.model()
    for r, text in zip(rs, found, strict=True):
        assert_same(model, r.prompt, text, generate(model, r.prompt, 12))
    assert all(r.stats.drafted for r in rs if r.stats.steps > 2)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "gpt_oss"])
def test_other_architectures_draft_too(name: str) -> None:
    rs, model = asked(2), tiny.model(name)
    found = run(engine(tiny.model(name), TREE), rs)
    for r, text in zip(rs, found, strict=True):
        assert_same(model, r.prompt, text, generate(model, r.prompt, 12))
    assert all(r.stats.drafted for r in rs if r.stats.steps > 2)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_sampled_text_is_that_of_plain_sampling(spec: dict) -> None:
    rs = asked(5, temperature=0.9, top_p=0.95)
    assert run(engine(tiny.model(), spec), rs, arrivals=2) == plain_texts(rs)
    assert sum(r.stats.accepted for r in rs)


@pytest.mark.parametrize("arrivals", [0, 1])
def test_texts_that_begin_alike_share_pages(arrivals: int) -> None:
    """Also those that arrive together: a page that is computed in the same step is not drafted from."""
    prompt = (tiny.prompts(1)[0] * 3)[:41]  # ten pages and one token
    rs = [request(prompt, seed=i, max_tokens=10, temperature=0.8, eos=None) for i in range(4)]
    e = engine(tiny.model(), CHAIN | {"exit_layer": 3})
    assert run(e, rs, arrivals) == plain_texts_of(rs)
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in rs)
    assert [r.stats.cached_prompt_tokens for r in rs] == [0, 40, 40, 40]


def test_rejection_runs(capsys) -> None:
    rs = asked(3, temperature=1.0)
    run(engine(tiny.model(), TREE | {"verification": "rejection"}), rs)
    assert sum(r.stats.accepted for r in rs) and "without drafts" not in capsys.readouterr().err


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_no_more_slots_are_used_than_were_reserved(nodes: int) -> None:
    """A wide tree and a small budget: what is expanded stays within it."""
    e = engine(tiny.model(), TREE | {"num_draft_nodes": nodes, "max_branches": 8, "top_k": 8}, pages=60)
    most, forward = [], e.runner.forward

    def watch(batch: Batch) -> Any:
        for s in batch.segments if batch.layers is not None else ():
            most.append(len(s.slots) - s.context)
            assert len(set(s.slots.tolist())) == len(s.slots)
        return forward(batch)

    e.runner.forward = watch
    rs = asked(4)
    assert run(e, rs) == plain_texts(rs)
    assert max(most) <= 1 + nodes


# ------------------------------------------------------------------ what is said
@pytest.mark.parametrize(("layers", "wanted"), [(None, 1), (2, 2), (3, 3)])
def test_the_layer_is_a_third_unless_said(layers: int | None, wanted: int) -> None:
    drafter = engine(tiny.model(), {"method": "early_exit", "exit_layer": layers}).drafting.drafters["early_exit"]
    assert drafter.layers == wanted and drafter.describe() == f"the first {wanted} of 3 layers, chains"


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="exit_layer=4 is not usable: the target has 3 layers"):
        engine(tiny.model(), CHAIN | {"exit_layer": 4})
    with pytest.raises(ConfigError, match="exit_layer=0 is not usable"):
        engine(tiny.model(), CHAIN | {"exit_layer": 0})


def test_a_runner_that_cannot_is_refused() -> None:
    from headstart.models.base import Runner
    from headstart.models.llamacpp.runner import LlamaRunner

    assert LlamaRunner.num_layers == Runner.num_layers == 0
    runner = make_runner(tiny.model())
    runner.num_layers = 0
    with pytest.raises(ConfigError, match="use runner='torch'"):
        engine(runner, CHAIN)


def test_from_python_and_the_command_line(tmp_path) -> None:
    from typer.testing import CliRunner

    from headstart import LLM, SamplingParams
    from headstart.cli import app

    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(tiny.loaded(), speculative={"method": "early_exit", "assistant_early_exit": 2}) as llm:
        drafted = llm.generate("the quick brown", params)[0]
        plain = llm.generate("the quick brown", params, speculative=False)[0]
    assert drafted.token_ids == plain.token_ids and drafted.stats.drafted > 0
    out = CliRunner().invoke(app, ["generate", "hello", "--drafter", "early_exit", "--draft-model", "x"])
    assert out.exit_code == 2 and "--draft-model has no effect" in out.output
