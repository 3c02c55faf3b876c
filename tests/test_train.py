"""Training: what a head computes while it learns is what it computes at inference, and runs survive kills and bad files."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from headstart import LLM, SamplingParams
from headstart.cli import app
from headstart.errors import BadInput, ConfigError
from headstart.models.heads.eagle import Eagle3Flags
from headstart.models.heads.load import TargetFacts, load_head
from headstart.models.heads.save import save_eagle3
from headstart.models.load import load
from headstart.train import checkpoints, eagle3, losses
from headstart.train.data import Answer, read_answers, read_file, read_prompts, write_answers
from headstart.train.loop import Loop
from headstart.train.optimizer import rate_scale
from headstart.train.packing import Document, batches, collate, documents, epochs, pack, split
from headstart.train.run import fit, train
from headstart.train.scores import Tally, evaluate
from headstart.train.target import Teacher
from tests import tiny

LENGTH, TAPS = 24, (1, 2, 3)


def docs(sizes=((4, 9), (3, 7), (5, 12), (2, 3)), seed=0, vocab=tiny.VOCAB):
    """Documents of random tokens: (prompt, answer) sizes."""
    made = torch.Generator().manual_seed(seed)
    return [
        Document(torch.randint(1, vocab, (p + a,), generator=made).tolist(), p, i % 2 == 0)
        for i, (p, a) in enumerate(sizes)
    ]


def make_head(target, layers=1, size=60, flags=None):
    torch.manual_seed(1)
    choices = torch.arange(3, 3 + 2 * size, 2)
    config = eagle3.layer_config(target.config, layers, None, None)
    head = eagle3.make_head(target, config, flags or Eagle3Flags(True, True, False, True), TAPS, choices, "tiny")
    with torch.no_grad():  # so that attention matters
        for layer in head.layers:
            layer.self_attn.o_proj.weight.mul_(8)
    return head, choices


# ------------------------------------------------------------------ the same states as at inference
class Cache:
    """Keys and values of one text, one row at a time: the plainest attention there is."""

    def __init__(self, layers):
        self.entries = [[] for _ in range(layers)]

    def attend(self, layer, q, k, v, scale):
        self.entries[layer].append((k[0], v[0]))
        keys, values = (
            torch.stack(x).repeat_interleave(q.shape[1] // k.shape[1], 1)
            for x in zip(*self.entries[layer], strict=True)
        )
        weights = (torch.einsum("hd,shd->hs", q[0], keys) * scale).softmax(-1)
        return torch.einsum("hs,shd->hd", weights, values)[None]

    def fork(self):
        out = Cache(len(self.entries))
        out.entries = [list(e) for e in self.entries]
        return out


def drafts_at_inference(head, features, tokens, levels):
    """States by (row, level): level 0 is kept, what a chain adds is thrown away after it."""
    out, cache = {}, Cache(len(head.layers))
    for t in range(len(tokens) - 1):
        state = head.advance(
            0, head.begin(features[t : t + 1]), torch.tensor([tokens[t + 1]]), torch.tensor([t]), cache
        )
        own = cache.fork()
        out[t, 0] = state[0]
        for k in range(1, min(levels, len(tokens) - 1 - t)):
            state = head.advance(k, state, torch.tensor([tokens[t + 1 + k]]), torch.tensor([t + k]), own)
            out[t, k] = state[0]
    return out


@torch.no_grad()
@pytest.mark.parametrize("layers, attention", [(1, "eager"), (2, "sdpa")])
@pytest.mark.parametrize("flags", [Eagle3Flags(True, True, False, True), Eagle3Flags(False, False, True, False)])
def test_training_computes_what_inference_computes(layers, attention, flags):
    target = tiny.model("llama").float()
    target.set_attn_implementation(attention)
    head, choices = make_head(target, layers, flags=flags)
    batch = collate(pack(docs(), LENGTH), LENGTH, 4)
    assert len(batch.tokens) == 2 and len(batch.where) == 4
    features = Teacher(target, TAPS, choices).teach(batch).features
    trained = list(eagle3.Eagle3Student(head, options("")).rows(features, batch, 4))
    for place in batch.where:
        tokens = batch.tokens.flatten()[place.start : place.start + place.length].tolist()
        alone = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        own = torch.cat([alone[i][0] for i in TAPS], -1)
        assert torch.allclose(own, features[place.start : place.start + place.length], atol=1e-4), "documents mix"
        states = drafts_at_inference(head, own, tokens, 4)
        assert len(states) > 4
        for (t, k), state in states.items():
            assert torch.allclose(trained[k][place.start + t], state, atol=1e-4), (t, k)


@torch.no_grad()
def test_rows_that_count():
    """At level k, row t is compared with the target at t + 1 + k, and what comes next there is the answer's."""
    made = docs()
    batch = collate(pack(made, LENGTH), LENGTH, 5)
    for k, (rows, places) in enumerate(batch.levels):
        expected = {
            p.start + t for p in batch.where for t in range(p.length) if t + 2 + k < p.length and t + 2 + k >= p.answer
        }
        assert set(rows.tolist()) == expected and len(rows) == len(expected)
        assert torch.equal(batch.asked[places], rows + 1 + k)
    assert torch.equal(batch.tokens_after(2).view(2, LENGTH)[:, :-2], batch.tokens[:, 2:])


@torch.no_grad()
def test_the_teacher_says_what_the_target_says():
    target = tiny.model("llama").float()
    choices = torch.arange(0, 100)
    doc = docs([(4, 9)])[0]
    batch = collate([[doc]], LENGTH, 1)
    lesson = Teacher(target, TAPS, choices).teach(batch)
    logits = target(torch.tensor([doc.tokens])).logits[0, 3:12]
    assert torch.equal(lesson.best, logits.argmax(-1))
    assert torch.allclose(lesson.log_probs, logits[:, :100].log_softmax(-1), atol=1e-4)


def test_losses():
    torch.manual_seed(0)
    a, b = (torch.randn(5, 7).log_softmax(-1) for _ in range(2))
    kl = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (b, a)))
    assert torch.allclose(losses.find("kl")(a, b), kl, atol=1e-6)
    assert torch.allclose(losses.find("rkl")(b, a), kl, atol=1e-6)
    assert torch.allclose(losses.find("tv")(a, b), 1 - torch.minimum(a.exp(), b.exp()).sum(-1), atol=1e-6)
    assert torch.allclose(losses.find("kl+tv")(a, b), kl + losses.tv(a, b), atol=1e-6)
    for name in losses.LOSSES:
        assert (losses.find(name)(a, b) > losses.find(name)(b, b)).all() or name == "ce"
    with pytest.raises(ConfigError, match="Did you mean 'kl'"):
        losses.find("k")


# ------------------------------------------------------------------ packing
def test_packing_keeps_every_document_once():
    made = docs([(3, i % 17 + 2) for i in range(200)])
    sequences = pack(made, LENGTH)
    assert sorted(map(id, (d for s in sequences for d in s))) == sorted(map(id, made))
    used = sum(len(d.tokens) for d in made)
    assert all(sum(len(d.tokens) for d in s) <= LENGTH for s in sequences) and used > 0.8 * LENGTH * len(sequences)


def test_epochs_go_on_where_they_were():
    made = docs([(3, i % 9 + 2) for i in range(60)])
    source, after = epochs(made, LENGTH, 4, 2, 0), epochs(made, LENGTH, 4, 2, 0, 13)
    whole = [next(source) for _ in range(20)]
    for batch in whole[13:]:
        assert torch.equal(next(after).tokens, batch.tokens)


def test_split_is_by_prompt():
    made = [Answer(f"{i:04x}-{s}", [1], [2, 3]) for i in range(2000) for s in range(2)]
    train, held = split(made, 0.02)
    assert len(train) + len(held) == 4000 and 40 < len(held) < 140
    assert not {a.id[:4] for a in train} & {a.id[:4] for a in held}


def test_documents_are_cut_and_those_without_an_answer_left_out():
    made = documents([Answer("a", [1] * 30, [2] * 5), Answer("b", [1] * 4, [2] * 50), Answer("c", [1], [])], LENGTH)
    assert [(len(d.tokens), d.answer) for d in made] == [(LENGTH, 4)]


def test_draft_vocabulary_has_the_frequent_and_the_special():
    doc = Document([9, 9, 1, 5, 5, 5, 7, 7, 0], 2, True)
    assert eagle3.draft_vocabulary([doc], 3, 12, [0, 11]).tolist() == [0, 5, 7]  # 11 does not occur


# ------------------------------------------------------------------ scores
def test_the_walk_counts_as_the_engine_does():
    doc = docs([(3, 10)])[0]
    batch = collate([[doc]], LENGTH, 2)
    tally = Tally(2, True)
    for level in range(2):
        rows = batch.levels[level][0]
        right = rows % 2 == 0 if level == 0 else torch.ones(len(rows), dtype=torch.bool)
        tally.add(batch, level, 0.0, right, right)
    tally.walk(batch)
    # token 1 of the prefill; row 2 drafts 2 right (4 tokens), row 5 none (5), row 6 two (8), row 9 none (9), row 10 one (11)
    assert (tally.steps, tally.written) == (6, 10)
    scores = tally.scores()
    assert scores.chained == [0.5, 1.0] and math.isclose(scores.estimate, 2.0)


def test_rates():
    assert rate_scale("cosine", 0, 10, 0.0) == pytest.approx(0.1)
    assert rate_scale("cosine", 50, 10, 0.5) == pytest.approx(0.51)
    assert rate_scale("linear", 50, 10, 1.0) == pytest.approx(0.02) == rate_scale("cosine", 50, 10, 1.0)


@pytest.mark.parametrize(
    "warmup, steps, expected", [(None, None, 100), (None, 5000, 100), (None, 60, 6), (None, 3, 0), (40, 60, 40)]
)
def test_a_short_run_warms_up_for_a_tenth_of_its_steps(warmup, steps, expected):
    assert options("", warmup=warmup, steps=steps).warmup_steps() == expected


# ------------------------------------------------------------------ learning
@pytest.fixture(scope="module")
def answers():
    """A few texts that the tiny target writes greedily."""
    prompts = [[5 + i, 9, 30 + i] for i in range(8)]
    with LLM(tiny.loaded(layers=3), max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    return [Answer(f"{i:x}-0", p, list(o.token_ids)) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]


def options(out, **more):
    base = dict(
        target="tiny", out=str(out), answers=("answers.jsonl",), draft_vocab=300, levels=3, length=64, batch=4,
        minutes=None, steps=120, rate=1e-2, warmup=5, held_out=0.0, eval_every=1000, trial_every=0, device="cpu",
        dtype="float32",
    )  # fmt: skip
    return eagle3.Eagle3Options(**base | more)


def score(folder, answers):
    """Of the head in a folder, on these answers."""
    target = tiny.loaded(layers=3)
    facts = TargetFacts(target.name, 48, target.vocab_size, 3, target.model.get_input_embeddings().weight)
    head = load_head(folder, facts, torch.device("cpu"), torch.float32)
    views = [collate(g, 64, 3) for g in batches(documents(answers, 64), 64, 4)]
    student = eagle3.Eagle3Student(head, options(folder))
    return evaluate(student, Teacher(target.model, TAPS, head.targets), views, losses.kl, torch.device("cpu"))


@pytest.mark.parametrize("device, dtype", [("cpu", "float32"), pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)])
def test_a_head_learns(tmp_path, answers, device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    target = tiny.loaded(layers=3)
    target.model.to(device, getattr(torch, dtype))
    begun = fit(options(tmp_path, steps=1, rate=1e-9), target, answers, tmp_path / "before")
    report = fit(options(tmp_path), target, answers, tmp_path / "after")
    assert begun.ended and report.ended and report.steps == 120
    before, after = (score(tmp_path / name, answers) for name in ("before", "after"))
    assert after.loss[0] < 0.5 * before.loss[0] and after.loss[2] < 0.5 * before.loss[2]
    assert after.agreement[0] > before.agreement[0] + 0.3
    assert after.block_efficiency > before.block_efficiency + 0.5


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(tmp_path, answers, monkeypatch):
    how = options(tmp_path, steps=12, noise=0.1, held_out=0.3, eval_every=5)
    whole = fit(how, tiny.loaded(layers=3), answers, tmp_path / "whole")

    taken = Loop._step

    def interrupted(self, batch):
        out = taken(self, batch)
        if self.progress.step == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", interrupted)
        part = fit(how, tiny.loaded(layers=3), answers, tmp_path / "parts")
    assert not part.ended and part.steps == 7
    torch.manual_seed(5)  # whatever else happened in between
    rest = fit(how, tiny.loaded(layers=3), answers, tmp_path / "parts")
    assert rest.ended and rest.steps == whole.steps == 12
    one, other = (
        checkpoints.load(tmp_path / name / "work" / "checkpoint.pt")["masters"] for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [h["loss"] for h in rest.history] == [h["loss"] for h in whole.history]
    assert all(torch.equal(t, weights(tmp_path / "parts")[n]) for n, t in weights(tmp_path / "whole").items())


def test_a_checkpoint_of_another_run_is_refused(tmp_path, answers):
    fit(options(tmp_path, steps=2), tiny.loaded(layers=3), answers, tmp_path)
    with pytest.raises(BadInput, match="levels was 3 and is 2"):
        fit(options(tmp_path, steps=2, levels=2), tiny.loaded(layers=3), answers, tmp_path)
    (tmp_path / "work" / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(BadInput, match="remove it to begin anew"):
        fit(options(tmp_path, steps=2), tiny.loaded(layers=3), answers, tmp_path)


def test_answers_of_another_model(tmp_path):
    with pytest.raises(BadInput, match=r"token 5000, but .* has 400"):
        fit(options(tmp_path), tiny.loaded(layers=3), [Answer("a-0", [1, 2], [5000, 1, 2])], tmp_path)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"loss": "kk"}, "Did you mean"),
        ({"answers": ()}, "nothing to train on"),
        ({"steps": None}, "needs an end"),
        ({"fc_norm": True}, "exclude each other"),
        ({"levels": 0}, "levels=0"),
        ({"lean": True}, "add --no-learn-output"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
    ],
)
def test_options_are_checked_first(tmp_path, wrong, message):
    with pytest.raises((BadInput, ConfigError), match=message):
        train(options(tmp_path, **wrong))


# ------------------------------------------------------------------ the target's answers
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": f"the number {i} and the sea"}) + "\n" for i in range(12)))
    return path


def test_answers_are_written_once_and_torn_ones_again(tmp_path, folder, prompt_file):
    out, prompts = tmp_path / "answers.jsonl", read_prompts([prompt_file])
    with LLM(folder, device="cpu", dtype="float32") as llm:
        first = write_answers(llm, prompts, out, max_tokens=6, chunk=5)
        text = out.read_text()
        assert len(first) == 12 and {a.temperature for a in first} == {0.0, 1.0}
        assert first[0].prompt_ids == llm.tokenizer.chat([{"role": "user", "content": "the number 0 and the sea"}])
        assert all(len(a.answer_ids) == 6 or a.answer_ids[-1] == 0 for a in first), "the end of the text belongs to it"
        assert write_answers(llm, prompts, out, max_tokens=6) == first and out.read_text() == text
        out.write_text(text[: len(text) - 20])  # killed while writing
        assert len(read_answers(out)) == 11
        again = write_answers(llm, prompts, out, max_tokens=6)
        assert {a.id: a for a in again} == {a.id: a for a in first}
        more = write_answers(llm, prompts[:2], tmp_path / "more", max_tokens=6, samples=3, max_prompt=1000)
        assert [a.temperature for a in more] == [0, 1, 1] * 2
        none = write_answers(llm, prompts, tmp_path / "long", max_prompt=2)
        assert len(none) == 12 and documents(none, LENGTH) == []


def test_a_broken_answer_in_the_middle_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"id": "a-0", "prompt_ids": [1], "answer_ids": [2, 3]})
    path.write_text(f"{good}\n{{}}\n{good}\n")
    with pytest.raises(BadInput, match="line 2: this is no answer"):
        read_answers(path)
    path.write_text(good.replace("[2, 3]", "[-2]") + "\n")
    with pytest.raises(BadInput, match="line 1: a token id"):
        read_answers(path)


def test_the_whole_way_from_the_command_line(tmp_path, folder, prompt_file):
    args = ["train", "eagle3", "-m", folder, "-p", str(prompt_file), "-o", str(tmp_path), "--max-tokens", "16"]
    args += [
        "--steps",
        "6",
        "--levels",
        "2",
        "--length",
        "64",
        "--batch",
        "2",
        "--held-out",
        "0.3",
        "--eval-every",
        "3",
    ]
    args += ["--draft-vocab", "200", "--device", "cpu", "--dtype", "float32", "--name", "us/tiny", "--no-embeddings"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "6 steps" in result.output and "tokens per target forward" in result.output
    assert "In the engine: " in result.output and "predicted speed-up" in result.output
    assert "embed_tokens.weight" not in weights(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "us/tiny" and config["draft_vocab_size"] == 200
    card = (tmp_path / "README.md").read_text()
    assert "us/tiny" in card and "Block efficiency" in card and "prompts.jsonl" in card and "torch" in card
    log = [json.loads(line) for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [3, 6] and log[0]["tokens"] < log[1]["tokens"]


def test_the_card_says_where_the_answers_come_from_and_nothing_of_the_machine(tmp_path, folder, answers):
    lines = [vars(a) | {"temperature": float(i % 2)} for i, a in enumerate(answers)]
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["train", "eagle3", "-m", folder, "--answers", str(tmp_path / "known.jsonl"), "-o", str(tmp_path / "out")]
    args += ["--steps", "1", "--warmup", "0", "--length", "64", "--draft-vocab", "200", "--device", "cpu"]
    args += ["--dtype", "float32", "--lean", "--no-learn-output"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    card, name = (tmp_path / "out" / "README.md").read_text(), Path(folder).name
    assert f"# EAGLE-3 head for {name}\n" in card and f"--model {name} " in card and f"| target | {name} |" in card
    assert str(Path(folder).parent) not in card and str(tmp_path) not in card
    assert "| files of answers | known.jsonl |" in card and "files of prompts" not in card
    assert "this run did not write them" in card and "own answers" not in card
    assert "| greedy among them | 4, the others at temperature 1 |" in card and "| longest answer | 20 tokens |" in card
    assert "max_tokens" not in card and "samples" not in card and "| warmup | 0 |" in card
    check_lean(tmp_path / "out", folder)


def check_lean(out, folder):
    """The file has neither matrix; what is read back has the target's."""
    assert not {"embed_tokens.weight", "lm_head.weight"} & weights(out).keys()
    target = load(folder, "cpu", "float32", runner="torch").model
    head = load_head(out, TargetFacts.of("tiny", target), torch.device("cpu"), torch.float32)
    assert torch.equal(head.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[head.targets])


def test_a_head_that_kept_the_targets_matrices_is_converted_to_a_lean_one(tmp_path, folder):
    target = load(folder, "cpu", "float32", runner="torch").model
    head, _ = make_head(target)
    for name in ("kept", "learned"):
        save_eagle3(head, tmp_path / name, "tiny", 5)
        with torch.no_grad():
            head.lm_head.weight.mul_(2)
    verb = ["convert", "--target", folder, "--dtype", "float32", "--lean", "--out", str(tmp_path / "out")]
    wrong = CliRunner().invoke(app, [*verb, str(tmp_path / "learned")])
    assert wrong.exit_code == 2 and "has its own output matrix, not the target's" in wrong.output
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, [*verb, str(tmp_path / "kept")])
    assert result.exit_code == 0, result.output
    check_lean(tmp_path / "out", folder)


# ------------------------------------------------------------------ prompts
def prompts_of(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [p.messages for p in read_file(path)]


def user(text):
    return (("user", text),)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.jsonl", '{"question": "Q", "answer": "A"}\n\n{"prompt": "P"}', [user("Q"), user("P")]),
        ("b.jsonl", '{"prompt": "P\u2028Q"}\r\n{"prompt": "R\x85S"}\r\n', [user("P\u2028Q"), user("R\x85S")]),
        ("a.json", '[{"instruction": "I", "input": "x", "response": "r"}, {"text": "T"}]', [user("I\n\nx"), user("T")]),
        ("a.jsonl", '{"instruction": "I", "instances": [{"input": "x", "output": "o"}]}', [user("I\n\nx")]),
        ("a.jsonl", '{"instruction": "I", "instances": []}', [user("I")]),
        ("a.txt", "one\n\n two \n", [user("one"), user("two")]),
        ("a", '{"text": "T"}\n', [user("T")]),
        ("a.jsonl", '{"conversations": [{"from": "human", "value": "H"}, {"from": "gpt", "value": "G"}]}', [user("H")]),
        (
            "a.jsonl",
            '{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}',
            [(("system", "S"), ("user", "U"))],
        ),
    ],
)
def test_prompts_in_all_shapes(tmp_path, name, content, expected):
    assert prompts_of(tmp_path, name, content) == expected


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "", "a.txt is empty"),
        ("a.jsonl", " \n", "is empty"),
        ("a.txt", b"fine\n\xff\xfe\n", "line 2: this is not text"),
        ("a.txt", b"fine\nno\0\n", "line 2: this is not text"),
        ("a.jsonl", '{"prompt": "P"}\n{"prompt": \n', "line 2: broken JSON"),
        ("a.json", '[{"prompt": "P"},\n]', "a.json, line 2: broken JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: this JSON cannot be read"),
        ("a.json", '{"prompt": "P"}', "not a JSON list"),
        ("a.json", "[]", "holds no prompts"),
        ("a.jsonl", "[1]", "line 1: expected an object"),
        ("a.jsonl", '{"turns": ["x"]}', "line 1: no prompt in it.*found turns"),
        ("a.jsonl", '{"prompt": " "}', "line 1: no prompt"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "A"}]}', "line 1: no turn of the user"),
        ("a.jsonl", '{"messages": "hello"}', "line 1: a turn should"),
        ("a.jsonl", '{"messages": [{"role": "robot", "content": "A"}]}', "line 1: a turn should"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(tmp_path, name, content, message):
    with pytest.raises(BadInput, match=message):
        prompts_of(tmp_path, name, content)


def test_missing_and_repeated_prompts(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        read_prompts([tmp_path / "nothing.txt"])
    with pytest.raises(BadInput, match="No file"):
        read_prompts([])
    (tmp_path / "a.txt").write_text("one\ntwo\none\n")
    assert len(read_prompts([tmp_path / "a.txt", tmp_path / "a.txt"])) == 2


def test_training_needs_no_command_line():
    """Where it runs there may be torch and transformers, and little else."""
    code = "import sys; sys.modules['typer'] = None; sys.modules['gguf'] = None; import headstart.train.run"
    subprocess.run([sys.executable, "-c", code], check=True)
