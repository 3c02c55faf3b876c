"""Trials in the engine while training: they tell the truth, leave no trace, and end runs that gain nothing any more."""

from __future__ import annotations

import gc
import importlib.util
import json

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.errors import ConfigError, ModelError
from headstart.train import board, checkpoints, eagle3, trial
from headstart.train.data import Answer
from headstart.train.loop import Limits, Progress
from headstart.train.packing import documents, split
from headstart.train.run import fit, prompts_of, train
from headstart.train.stopping import best_look, flat
from headstart.train.trial import Trials
from tests import test_train_kinds as kinds
from tests import tiny
from tests.test_train import answers, make_head, options  # noqa: F401

HELD, TOKENS, DEPTH = 0.4, 16, 3


@pytest.fixture(scope="module")
def texts(answers):  # noqa: F811
    """Each text several times, under other names: what is held out is known, so that drafts are often right."""
    return [Answer(f"{name}{a.id}", a.prompt_ids, a.answer_ids) for a in answers[:4] for name in "abcdef"]


def how(out, **more):
    base = dict(held_out=HELD, eval_every=4, steps=12, trial_every=1, trial_tokens=TOKENS, eval_depth=DEPTH)
    return options(out, **base | more)


@pytest.fixture(scope="module")
def run(tmp_path_factory, texts):
    """A run with a trial at each look."""
    out = tmp_path_factory.mktemp("run")
    return fit(how(out, noise=0.02, steps=40, eval_every=20), tiny.loaded(layers=3), texts, out)


# ------------------------------------------------------------------ the truth
def check_against_the_engine(report, target, method, prompts):
    """Forwards and tokens, counted by the pieces that come out of a stream of the exported drafter: each is one forward."""
    assert len(prompts) > 2 and len({tuple(p) for p in prompts}) == len(prompts)
    how = {"method": method, "model": str(report.folder), "num_speculative_tokens": DEPTH, "draft_dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM(target, speculative=how) as llm:
        pieces = [c.token_ids for prompt in prompts for c in llm.stream(prompt, params)]
        drafts = sum(o.stats.drafts for o in llm.generate(prompts, params))
    tried = report.best["engine"]
    assert tried["prompts"] == len(prompts) and tried["depth"] == DEPTH
    assert tried["tokens"] == sum(map(len, pieces))
    assert tried["block_efficiency"] == sum(map(len, pieces)) / len(pieces) > 1.5
    accepted = [sum(len(tokens) - 1 > i for tokens in pieces) for i in range(DEPTH)]
    assert tried["acceptance"] == [n / drafts for n in accepted] and accepted[-1] > 0
    assert tried["speedup"] == tried["block_efficiency"] * tried["plain_step"] / tried["drafted_step"] > 0


def test_a_trial_counts_what_the_engine_does_with_the_exported_head(run, texts):
    prompts = prompts_of(documents(split(texts, HELD)[1], 64))
    check_against_the_engine(run, tiny.loaded(layers=3), "eagle3", prompts)


@pytest.mark.parametrize("kind, method", [("medusa",) * 2, ("mlp", "mlp_speculator"), ("draft", "draft_model")])
def test_other_kinds_are_tried_as_truly_and_learn_the_same(tmp_path, kind, method):
    """Medusa and MLP draft as many tokens as they have levels, though more were asked for."""
    asked = dict(
        steps=30, eval_every=10, trial_tokens=TOKENS, trial_prompts=4, eval_depth=DEPTH if kind == "draft" else 9
    )

    def learn(name, **more):
        torch.manual_seed(3)
        how = kinds.options(kind, **asked, **more)
        return fit(how, kinds.counting(), kinds.answers(), tmp_path / name)

    tried, plain = learn("tried", trial_every=1), learn("plain", trial_every=0)
    assert [("engine" in t, "engine" in p) for t, p in zip(tried.history, plain.history, strict=True)] == [
        (True, False)
    ] * 3
    prompts = prompts_of(documents(split(kinds.answers(), 0.25)[1], 64))[:4]
    check_against_the_engine(tried, kinds.counting(), method, prompts)
    check_same_weights(tried, plain)


def test_what_was_seen_is_written_down(run):
    assert all("engine" in look for look in run.history) and [look["step"] for look in run.history] == [20, 40]
    log = [json.loads(line) for line in (run.folder / "work" / "log.jsonl").read_text().splitlines()]
    assert log == run.history
    card = (run.folder / "README.md").read_text()
    assert f"**{run.best['engine']['block_efficiency']:.2f}** tokens per target forward" in card
    assert f"speed-up on the machine that trained: **{run.best['engine']['speedup']:.2f}**" in card


def test_what_is_exported_was_tried(tmp_path, texts):
    """Though no trial was due."""
    report = fit(how(tmp_path, trial_every=100), tiny.loaded(layers=3), texts, tmp_path)
    assert [look["step"] for look in report.history if "engine" in look] == [report.best["step"]]


# ------------------------------------------------------------------ no trace
def test_trials_do_not_change_what_is_learned(tmp_path, run, texts):
    plain = fit(
        how(tmp_path, trial_every=0, noise=0.02, steps=40, eval_every=20), tiny.loaded(layers=3), texts, tmp_path
    )
    check_same_weights(run, plain)
    assert not any("engine" in look for look in plain.history)
    assert [look | {"engine": 0, "seconds": 0} for look in plain.history] == [
        look | {"engine": 0, "seconds": 0} for look in run.history
    ]


def check_same_weights(*reports):
    one, other = (checkpoints.load(r.folder / "work" / "checkpoint.pt") for r in reports)
    assert all(torch.equal(one["masters"][name], other["masters"][name]) for name in one["masters"])
    assert torch.equal(one["random"]["cpu"], other["random"]["cpu"])


def tensor_bytes():
    """Of all tensors that are alive."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    alive = [t.untyped_storage() for t in tensors if not t.is_mkldnn]  # oneDNN's own, of other tests, have none
    return sum({s.data_ptr(): s.nbytes() for s in alive}.values())


def test_a_trial_leaves_nothing_behind():
    target = tiny.loaded(layers=3)
    target.model.set_attn_implementation("sdpa")
    target.model.requires_grad_(False)
    head, _ = make_head(target.model)
    head.train()
    weights = {n: p.clone() for n, p in (*target.model.named_parameters(), *head.named_parameters())}
    asked = torch.randint(1, 200, (1, 9))
    before, state = target.model(asked).logits, torch.get_rng_state()
    trials = Trials(target, head, [[3, 4, 5], [6, 7]], TOKENS, DEPTH)
    held = []
    for _ in range(3):
        assert trials.run().tokens > 0
        held.append(tensor_bytes())
    assert held[0] == held[1] == held[2]
    assert head.training and target.model.config._attn_implementation == "sdpa"
    assert torch.equal(target.model(asked).logits, before) and torch.equal(torch.get_rng_state(), state)
    now = dict((*target.model.named_parameters(), *head.named_parameters()))
    assert all(torch.equal(now[n], p) for n, p in weights.items()) and all(p.grad is None for p in now.values())
    assert all(p.requires_grad == (n != "embed_tokens.weight") for n, p in head.named_parameters())


def test_a_head_whose_weights_the_kernels_joined_can_still_learn():
    """As an engine on a GPU joins them: in inference mode."""
    fused = pytest.importorskip("headstart.models.heads.fused", reason="triton is not installed")
    head, _ = make_head(tiny.loaded(layers=3).model)
    layer = head.layers[0]
    with torch.inference_mode():
        joined = fused.Weights.of(layer)
    for product, own in ((layer.self_attn.k_proj, joined.qkv), (layer.mlp.up_proj, joined.gate_up)):
        product(torch.ones(2, product.in_features)).sum().backward()
        assert product.weight.grad.any()
        with torch.no_grad():
            product.weight.copy_(torch.full_like(product.weight, 7.0))  # as a step does
        assert int((own == 7).all(-1).sum()) == len(product.weight), "a view"


@pytest.mark.gpu
def test_a_trial_leaves_nothing_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    target = tiny.loaded(layers=3)
    target.model.to("cuda", torch.bfloat16).requires_grad_(False)
    head, _ = make_head(target.model)
    eagle3.place(head, target.model.device, torch.bfloat16)
    asked = torch.randint(1, 200, (1, 9), device="cuda")
    before, states = target.model(asked).logits, checkpoints.random_state()
    attention = target.model.config._attn_implementation
    trials = Trials(target, head, [[3, 4, 5], [6, 7]], TOKENS, DEPTH)
    held = []
    for _ in range(4):
        assert trials.run().speedup > 0
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[1:])) == 1, "the first one may compile"
    assert torch.equal(target.model(asked).logits, before)
    assert target.model.config._attn_implementation == attention and head.training
    assert all(torch.equal(state, states[name]) for name, state in checkpoints.random_state().items())


def test_a_target_that_the_engine_cannot_run_is_trained_for_without_trials(tmp_path, texts, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise ModelError("This one cannot be run.")

    monkeypatch.setattr(trial, "start_engine", refuse)
    report = fit(how(tmp_path), tiny.loaded(layers=3), texts, tmp_path)
    assert report.ended and report.steps == 12 and not any("engine" in look for look in report.history)
    assert capsys.readouterr().err.count("No trials in the engine from here on: This one cannot be run.") == 1


def test_a_head_that_breaks_in_the_engine_is_said(capsys):
    target = tiny.loaded(layers=3)
    head, _ = make_head(target.model)
    head.logits = None  # the engine goes on without drafts; a block efficiency of 1 would be no finding
    assert Trials(target, head, [[3, 4, 5]], TOKENS, DEPTH).run() is None
    assert "nothing was drafted" in capsys.readouterr().err


# ------------------------------------------------------------------ the end of a run
@pytest.mark.parametrize("trial_every", [0, 1])
def test_a_run_that_gains_nothing_stops(tmp_path, texts, capsys, trial_every):
    stuck = how(tmp_path, rate=1e-12, steps=100, patience=2, trial_every=trial_every, eval_every=2)
    report = fit(stuck, tiny.loaded(layers=3), texts, tmp_path)
    assert report.ended and report.steps == 6 and len(report.history) == 3
    assert "Stopped at step 6: the last 2 measurements brought less than 0.01" in capsys.readouterr().err
    again = fit(stuck, tiny.loaded(layers=3), texts, tmp_path)
    assert again.ended and again.steps == 6
    on = fit(how(tmp_path, rate=1e-12, steps=8, patience=0, trial_every=0), tiny.loaded(layers=3), texts, tmp_path)
    assert on.ended and on.steps == 8


def looks(*held, tried=()):
    out = [{"step": i, "block_efficiency": value} for i, value in enumerate(held)]
    for look, value in zip(out, tried, strict=False):
        look["engine"] = {"block_efficiency": value}
    return out


def test_flat():
    rising = (1.0, 1.1, 1.2, 1.3)
    assert not flat(looks(*rising), 2, 0.01) and flat(looks(*rising), 2, 0.21) and not flat(looks(*rising), 0, 9)
    assert flat(looks(1, 2, 1.9, 2.005), 2, 0.01) and not flat(looks(1, 2, 1.9, 2.005), 3, 0.01)
    assert not flat(looks(2, 2), 2, 0.01), "too early to say"
    assert flat(looks(*rising, tried=(1.5, 1.5, 1.5)), 2, 0.01), "what the engine says counts"
    assert not flat(looks(2, 2, 2, 2, tried=rising), 2, 0.01)
    assert best_look(looks(1, 3, 3, 2))["step"] == 1 and best_look([]) is None


def test_trials_take_a_tenth_of_the_time_unless_told():
    def due(seconds, spent, *tried, every=None):
        history = looks(*[1.0] * len(tried))
        for look, yes in zip(history, tried, strict=True):
            look |= {"engine": {}} if yes else {}
        return Progress(seconds=seconds, trial_seconds=spent, history=history).trial_due(Limits(trial_every=every))

    assert due(1, 0.0), "the first look"
    assert not due(100, 9.0, True) and due(180, 9.0, True, False) and not due(260, 18.0, True, False, True)
    assert [due(1, 50.0, *[True] * n, every=2) for n in range(4)] == [False, True, False, True]
    assert not due(1e9, 0.0, every=0)


# ------------------------------------------------------------------ TensorBoard
def test_curves_can_be_read_back(tmp_path, texts):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = fit(how(tmp_path, tensorboard=True), tiny.loaded(layers=3), texts, tmp_path)
    events = EventAccumulator(str(tmp_path / "work" / "tensorboard"))
    events.Reload()
    for tag, values in (
        ("engine/block_efficiency", [look["engine"]["block_efficiency"] for look in report.history]),
        ("engine/speedup", [look["engine"]["speedup"] for look in report.history]),
        (f"engine/acceptance/{DEPTH - 1}", [look["engine"]["acceptance"][-1] for look in report.history]),
        ("held_out/block_efficiency", [look["block_efficiency"] for look in report.history]),
        ("held_out/agreement/0", [look["agreement"][0] for look in report.history]),
    ):
        read = events.Scalars(tag)
        assert [e.step for e in read] == [4, 8, 12]
        assert [e.value for e in read] == pytest.approx(values)


def test_without_curves_nothing_is_written(run, tmp_path):
    board.open_board(tmp_path, False, 0)(1, {"x": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensorboard_is_said_first(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(board, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'headstart\[tensorboard\]'"):
        train(how(tmp_path, tensorboard=True))
    board.open_board(tmp_path, None, 0)(1, {"x": 1.0})  # nobody asked
    assert list(tmp_path.iterdir()) == []
