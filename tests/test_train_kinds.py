"""Training of all kinds of drafters: each learns, its losses are the papers', and what is written drafts in the engine."""

from __future__ import annotations

import functools
import inspect
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from headstart import LLM, SamplingParams
from headstart.cli import app
from headstart.cli import train as commands
from headstart.errors import BadInput, ConfigError
from headstart.models.heads.load import TargetFacts, load_head
from headstart.train import losses
from headstart.train.data import Answer
from headstart.train.draft import DraftOptions
from headstart.train.eagle3 import Eagle3Options
from headstart.train.loop import Loop
from headstart.train.medusa import MedusaOptions
from headstart.train.mlp import MlpOptions
from headstart.train.packing import batches, collate, documents
from headstart.train.run import fit, train
from headstart.train.scores import evaluate
from headstart.train.target import Teacher
from tests import tiny

CPU = torch.device("cpu")
CYCLE = torch.arange(10, 50)
KINDS = {
    "medusa": (MedusaOptions, {"levels": 3}),
    "mlp": (MlpOptions, {"levels": 3}),
    "draft": (DraftOptions, {"layers": 2, "hidden": 24}),
}


def counting(seed=0):
    """A tiny target that counts from 10 to 49 and begins anew, and errs now and then by what it read before."""
    out = tiny.loaded(seed=seed)
    with torch.no_grad():
        for layer in out.model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.03)
            layer.mlp.down_proj.weight.mul_(0.03)
        out.model.lm_head.weight[CYCLE.roll(-1)] = 2 * out.model.get_input_embeddings().weight[CYCLE]
    return out


@functools.cache
def answers():
    """What it writes greedily, by transformers' own generate."""
    prompts = torch.tensor([[10 + 7 * i % 40, 10 + 11 * i % 40, 10 + (13 * i + i // 40) % 40] for i in range(48)])
    texts = counting().model.generate(prompts, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [Answer(f"{i:x}-0", t[:3], t[3:]) for i, t in enumerate(texts.tolist())]


def options(kind, **more):
    made, own = KINDS[kind]
    base = dict(
        target="tiny", out="out", answers=("answers.jsonl",), length=64, batch=4, minutes=None, steps=50, rate=1e-2,
        warmup=5, held_out=0.25, eval_every=1000, trial_every=0, device="cpu", dtype="float32",
    )  # fmt: skip
    return made(**base | own | more)


def learner(kind, docs=None, **more):
    """A student that knows a little: its weights are not those of the start."""
    torch.manual_seed(1)
    target = counting()
    student = options(kind, **more).begin(target, docs or documents(answers(), 64))
    with torch.no_grad():
        for p in student.module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return target.model, student


# ------------------------------------------------------------------ learning, and drafting with what was learned
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_learns_and_drafts(tmp_path, kind):
    begun = fit(options(kind, steps=1, rate=1e-9), counting(), answers(), tmp_path / "begun").history[-1]
    report = fit(options(kind, name="us/tiny"), counting(), answers(), tmp_path / "out")
    learned = report.history[-1]
    for before, after in zip(begun["agreement"], learned["agreement"], strict=True):
        assert before < 0.1 and after > before + 0.3
    assert learned["block_efficiency"] > begun["block_efficiency"] + 0.7
    method = {"mlp": "mlp_speculator", "draft": "draft_model"}.get(kind, kind)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "for us/tiny" in card and f"headstart train {kind}" in card and f"--drafter {method}" in card

    params, prompts = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), [[12, 30, 17], [44, 45, 46, 47]]
    with LLM(counting(), speculative={"method": method, "model": str(tmp_path / "out")}) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        plain = counting().model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(output.token_ids) == plain[0, len(prompt) :].tolist()
        assert output.stats.accepted > 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not(tmp_path, kind, monkeypatch):
    """Killed without a word after its last checkpoint, in the middle of a step."""
    how = options(kind, steps=9, eval_every=4, save_seconds=0, **({} if kind == "draft" else {"noise": 0.1}))
    torch.manual_seed(3)
    whole = fit(how, counting(), answers(), tmp_path / "whole")
    taken = Loop._step

    def killed(self, batch):
        if self.progress.step == 6:
            raise SystemExit("killed")
        return taken(self, batch)

    torch.manual_seed(3)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Loop, "_step", killed)
        fit(how, counting(), answers(), tmp_path / "parts")
    torch.manual_seed(5)  # whatever else happened in between
    rest = fit(how, counting(), answers(), tmp_path / "parts")
    assert [h["loss"] for h in rest.history] == [h["loss"] for h in whole.history] and len(rest.history) == 3
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------ the losses of a step, by hand
def by_hand(target, docs, levels, guess, divergence):
    """(levels,) means of a divergence between the target at t + 1 + k and the guess from row t, document by document."""
    sums = [[] for _ in range(levels)]
    for doc in docs:
        out = target(torch.tensor([doc.tokens]), output_hidden_states=True)
        last, logits = out.hidden_states[-1][0].double(), out.logits[0].double()
        for t in range(len(doc.tokens)):
            for k in range(levels):
                if doc.answer <= t + 2 + k < len(doc.tokens):
                    p, q = (x.softmax(-1) for x in (logits[t + 1 + k], guess(last, doc.tokens, t, k)))
                    sums[k].append(divergence(p, q))
    return torch.stack([torch.stack(s).mean() for s in sums])


def forward_kl(p, q):
    return (p * (p.log() - q.log())).sum()


DIVERGENCES = {
    "kl": forward_kl,
    "rkl": lambda p, q: forward_kl(q, p),
    "tv": lambda p, q: 1 - torch.minimum(p, q).sum(),
    "ce": lambda p, q: -q[p.argmax()].log(),
}


def step(target, student, docs, loss):
    batch = collate(batches(docs, 64, 4)[0], 64, student.levels)
    assert len(batch.where) == len(docs)
    lesson = Teacher(target, student.taps, student.targets).teach(batch)
    return losses.step_losses(student, lesson, batch, losses.find(loss))


@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_the_step_of_medusa(loss):
    docs = documents(answers()[:5], 64)
    target, student = learner("medusa", blocks=2)
    w = {n: p.detach().double() for n, p in student.module.named_parameters()}

    def guess(last, tokens, t, k):
        x = last[t]
        for j in range(2):
            y = w[f"heads.{k}.{j}.linear.weight"] @ x + w[f"heads.{k}.{j}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        return w[f"heads.{k}.2.weight"] @ x

    expected = by_hand(target, docs, 3, guess, DIVERGENCES[loss])
    assert torch.allclose(step(target, student, docs, loss).double(), expected, atol=1e-3)


@pytest.mark.parametrize("loss, tie, scale", [("kl", True, True), ("rkl", False, False), ("ce", True, False)])
def test_the_step_of_an_mlp_speculator(loss, tie, scale):
    docs = documents(answers()[:5], 64)
    target, student = learner("mlp", tie=tie, scale_input=scale, inner=20)
    w = {n: p.detach().double() for n, p in student.module.state_dict().items()}
    assert (w["emb.0.weight"] is not w["emb.1.weight"]) and torch.equal(w["emb.0.weight"], w["emb.1.weight"]) == tie
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = math.sqrt((1 - state_weight**2) * 10) / state_weight

    def guess(last, tokens, t, k):
        x = last[t] / last[t].pow(2).mean().add(1e-6).sqrt() / math.sqrt(2) if scale else last[t]
        for i in range(k + 1):  # it reads the text's own tokens
            x = w[f"proj.{i}.weight"] @ x + token_weight * w[f"emb.{i}.weight"][tokens[t + 1 + i]]
            x = x / x.pow(2).mean().add(1e-6).sqrt() * w[f"ln.{i}.weight"] + w[f"ln.{i}.bias"]
            x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return w[f"head.{k}.weight"] @ x

    expected = by_hand(target, docs, 3, guess, DIVERGENCES[loss])
    assert torch.allclose(step(target, student, docs, loss).double(), expected, atol=1e-3)


@pytest.mark.parametrize("loss", ["kl", "rkl", "tv"])
def test_the_step_of_a_draft(loss):
    docs = documents(answers()[:5], 64)
    target, student = learner("draft", layers=2, hidden=None)

    def guess(last, tokens, t, k):
        return student.module(torch.tensor([tokens[: t + 2]])).logits[0, -1].double()

    with torch.no_grad():
        expected = by_hand(target, docs, 1, guess, DIVERGENCES[loss])
    assert torch.allclose(step(target, student, docs, loss).double(), expected, atol=1e-3)


def test_the_built_in_target_has_its_own_name_in_the_result():
    target = counting()
    target.name = "smollm2"
    assert options("medusa").begin(target, []).module.spec.target == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_levels_count_less_and_less():
    assert torch.allclose(losses.level_weights(3, 0.5), torch.tensor([4.0, 2.0, 1.0]) / 7)


def test_logits_computed_again_give_the_same_gradients():
    docs = documents(answers()[:5], 64)
    target, student = learner("medusa")
    found = []
    for student.recompute in (True, False):
        student.module.zero_grad()
        step(target, student, docs, "kl").sum().backward()
        found.append([p.grad.clone() for p in student.module.parameters()])
    assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(*found, strict=True))


# ------------------------------------------------------------------ held-out text
def test_a_draft_is_scored_by_its_own_greedy_chains():
    """The walk along the text counts what a loop of drafting with generate, and checking, counts."""
    target, student = learner("draft", layers=2, hidden=None)
    docs = documents(answers()[:3], 64)
    views = [collate(group, 64, student.chain(5)) for group in batches(docs, 64, 4)]
    scores = evaluate(student, Teacher(target, (), None), views, losses.kl, CPU)
    steps = written = accepted = 0
    for doc in docs:
        have = doc.answer + 1  # the prefill gives one token
        steps, written = steps + 1, written + len(doc.tokens) - doc.answer
        while have < len(doc.tokens):
            prefix = torch.tensor([doc.tokens[:have]])
            chain = student.module.generate(
                prefix, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, have:].tolist()
            right = next((i for i, (a, b) in enumerate(zip(chain, doc.tokens[have:], strict=False)) if a != b), 5)
            accepted += right
            have, steps = have + 1 + right, steps + 1
    assert accepted > 5
    assert scores.block_efficiency == pytest.approx(written / steps)


# ------------------------------------------------------------------ what is written
def facts():
    return TargetFacts.of("us/tiny", counting().model)


@pytest.mark.parametrize("dialect, file", [("vllm", "model.safetensors"), ("medusa", "medusa_lm_head.pt")])
def test_medusa_in_both_dialects(tmp_path, dialect, file, capsys):
    _, student = learner("medusa", blocks=2, dialect=dialect)
    (tmp_path / "model.safetensors").write_bytes(b"of an earlier run")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"of an earlier run")
    student.save(tmp_path, "us/tiny")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["config.json", file])
    own, again = student.module.state_dict(), load_head(tmp_path, facts(), CPU, torch.float32)
    assert again.spec.max_depth == 3 and "was trained for" not in capsys.readouterr().err
    assert all(torch.equal(tensor, own[name]) for name, tensor in again.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    if dialect == "vllm":  # whose loader passes over names that it does not know
        parts = [f"{i}.layers.{j}" for i in range(3) for j in range(2)]
        names = {f"blocks.{p}.{kind}" for p in parts for kind in ("weight", "bias")}
        assert set(load_file(tmp_path / file)) == names | {f"lm_heads.{i}.weight" for i in range(3)}
        expected = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True}
        assert config.items() >= (expected | {"hidden_size": 48, "vocab_size": 400}).items()
    else:
        expected = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "us/tiny"}
        assert config == expected and "2.1.linear.bias" in torch.load(tmp_path / file, weights_only=True)


@pytest.mark.parametrize("tie", [True, False])
def test_an_mlp_speculator_as_ibm_names_it(tmp_path, tie):
    _, student = learner("mlp", tie=tie, inner=20)
    student.save(tmp_path, "us/tiny")
    own, again = student.module.state_dict(), load_head(tmp_path, facts(), CPU, torch.float32)
    assert again.tied == tie and again.scale_input
    assert all(torch.equal(tensor, own[name]) for name, tensor in again.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "mlp_speculator" and config["tie_weights"] == tie
    assert len(config["top_k_tokens_per_head"]) == config["n_predict"] == 3 and config["inner_dim"] == 20
    names = set(load_file(tmp_path / "model.safetensors"))
    firsts = {f"speculator.{n}" for n in ("emb.0.weight", "head.0.weight", "ln.0.weight", "ln.0.bias")}
    firsts |= {"speculator.proj.0.weight", "speculator.proj.1.weight"}
    assert names == firsts if tie else len(names) == 15 and names > firsts


def test_a_new_draft_begins_with_the_targets_first_layers():
    torch.manual_seed(0)
    target = counting()
    student = options("draft", layers=1, hidden=None).begin(target, documents(answers(), 64))
    theirs = target.model.state_dict()
    own = student.module.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in own.items())
    assert "model.layers.0.mlp.up_proj.weight" in own and "model.layers.1.mlp.up_proj.weight" not in own
    assert student.module.generation_config.eos_token_id == target.model.generation_config.eos_token_id
    narrow = options("draft", layers=2, hidden=24).begin(target, documents(answers(), 64)).module.config
    assert (narrow.hidden_size, narrow.num_attention_heads, narrow.num_key_value_heads) == (24, 3, 1)
    assert narrow.intermediate_size == 48 and narrow.vocab_size == 400


def test_a_given_draft_goes_on_learning(tmp_path):
    """Also where its matrices have other rows behind the tokens: what both have is compared."""
    _, student = learner("draft", layers=1, hidden=None)
    student.module.resize_token_embeddings(416)
    student.save(tmp_path / "small", "us/tiny")
    how = options("draft", layers=None, hidden=None, draft=str(tmp_path / "small"), rate=None, steps=25)
    assert how.default_rate(576) == pytest.approx(1e-4)
    begun = fit(options("draft", **vars_of(how) | {"steps": 1, "rate": 1e-9}), counting(), answers(), tmp_path / "a")
    report = fit(options("draft", **vars_of(how) | {"rate": 5e-3}), counting(), answers(), tmp_path / "b")
    assert report.history[-1]["loss"][0] < 0.8 * begun.history[-1]["loss"][0]
    assert (tmp_path / "b" / "tokenizer.json").exists()


def vars_of(made):
    return {name: getattr(made, name) for name in ("draft", "layers", "hidden", "steps", "rate")}


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    "kind, wrong, message",
    [
        ("medusa", {"dialect": "vlm"}, "Did you mean 'vllm'"),
        ("medusa", {"blocks": 0}, "blocks=0 is not usable: expected at least 1"),
        ("medusa", {"decay": 0.0}, "decay=0.0 is not usable"),
        ("medusa", {"rate": -1.0}, "rate=-1.0 is not usable"),
        ("mlp", {"levels": 1}, "no weights to share"),
        ("mlp", {"inner": 0}, "inner=0"),
        ("mlp", {"held_out": 1.0}, "held_out=1.0"),
        ("mlp", {"eval_every": 0}, "eval_every=0"),
        ("mlp", {"eval_depth": 0}, "eval_depth=0"),
        ("draft", {"trial_tokens": 7}, "trial_tokens=7 is not usable: expected at least 8"),
        ("medusa", {"warmup": -1}, "warmup=-1"),
        ("draft", {"layers": None}, "no student yet"),
        ("draft", {"draft": "x"}, "has its shape already"),
        ("draft", {"draft": "out", "layers": None, "hidden": None}, "is the folder of the draft itself"),
        ("draft", {"loss": "reverse"}, "loss='reverse' is not known"),
        ("draft", {"answers": ()}, "nothing to train on"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(kind, wrong, message):
    with pytest.raises((BadInput, ConfigError), match=message) as found:
        train(options(kind, **wrong))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "wrong, message",
    [({"layers": 4}, "has 3: a draft has at most as many"), ({"hidden": 25}, "use a multiple of 8")],
)
def test_shapes_that_a_draft_cannot_have(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        fit(options("draft", **wrong), counting(), answers(), tmp_path)


def test_a_draft_with_other_tokens_or_too_few_positions(tmp_path):
    given = {"layers": None, "hidden": None, "draft": str(tmp_path)}
    tiny.folder(tmp_path, size=350)
    with pytest.raises(ConfigError, match="has other tokens than"):
        fit(options("draft", **given), counting(), answers(), tmp_path / "out")
    tiny.folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"up to 23 tokens, but .* takes 16: lower the length"):
        fit(options("draft", **given), counting(), answers(), tmp_path / "out")


def test_another_kind_in_the_same_folder_is_refused(tmp_path):
    fit(options("medusa", steps=1), counting(), answers(), tmp_path)
    with pytest.raises(BadInput, match=r"of a run with other options \(.*tie was None and is True"):
        fit(options("mlp", steps=1), counting(), answers(), tmp_path)


# ------------------------------------------------------------------ the command line
@pytest.mark.parametrize("made", [Eagle3Options, MedusaOptions, MlpOptions, DraftOptions])
def test_the_command_line_has_the_defaults_of_the_options(made):
    verb = getattr(commands, f"train_{made.kind}")
    own = {n: p.default for n, p in inspect.signature(made).parameters.items()}
    told = {n: p.default for n, p in inspect.signature(verb).parameters.items()}
    shared = own.keys() & told.keys() - {"prompts", "answers", "minutes", "out", "target"}
    assert len(shared) > 12 and {n: own[n] for n in shared} == {n: told[n] for n in shared}
    assert told.keys() - own.keys() == {"quiet"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("extra", [["draft", "--layers", "2", "--loss", "rkl"], ["medusa", "--levels", "2"]])
def test_from_prompts_to_text_by_the_command_line(tmp_path, folder, extra):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("".join(f"the number {i} and the sea\n" for i in range(8)))
    args = ["train", *extra, "-m", folder, "-p", str(prompts), "-o", str(out), "--max-tokens", "12", "--steps", "3"]
    args += ["--length", "64", "--batch", "2", "--held-out", "0.3", "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "3 steps" in result.output and "tokens per target forward" in result.output
    method = {"draft": "draft_model"}.get(extra[0], extra[0])
    ask = ["generate", "the sea", "-m", folder, "--max-tokens", "8", "--device", "cpu", "--temperature", "0", "-q"]
    plain, ours = (
        CliRunner().invoke(app, ask + more) for more in ([], ["--drafter", method, "--draft-model", str(out)])
    )
    assert ours.exit_code == plain.exit_code == 0 and ours.output == plain.output


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([], "There is no student yet"),
        (["--layers", "9"], "layers=9, but "),
        (["--layers", "2", "--hidden", "25"], "hidden=25 cannot be split into heads of 8"),
        (["--draft", "/no/such/model"], "There is no model '/no/such/model'"),
    ],
)
def test_a_bad_option_is_one_sentence_before_the_target_writes(tmp_path, folder, wrong, message):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the sea")
    args = ["train", "draft", "-m", folder, "-p", str(prompts), "-o", str(tmp_path / "out"), *wrong]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert result.stderr.startswith(f"headstart: {message}") and result.stderr.count("\n") == 1
