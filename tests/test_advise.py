"""What is known of models without their weights, and what follows from it: whether they fit."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headstart.advise import plan as planning
from headstart.advise.facts import Facts, look
from headstart.advise.plan import Device, Wish, advice, lay_out, limits, parse_devices
from headstart.cli import app
from headstart.errors import BadInput, ModelError

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "eos_token_id": [128001, 128009],
}  # fmt: skip
LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


def tensors(config: dict[str, Any]) -> dict[str, list[int]]:
    """Of a Llama."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config.get("num_key_value_heads", config["num_attention_heads"])
    out = {
        "model.embed_tokens.weight": [vocab, hidden],
        "lm_head.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
    }
    for i in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [keys, hidden], "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden],
            "mlp.down_proj": [hidden, wide], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
        }  # fmt: skip
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    return out


def pretend(folder: Path, config: dict[str, Any], shards: int = 1, dtype: str = "BF16") -> Path:
    """A folder with all its headers, and weights that are holes in the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    every, index = list(tensors(config).items()), {}
    for k in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{k + 1:05}-of-{shards:05}.safetensors"
        header, at = {}, 0
        for tensor, shape in every[k::shards]:
            size = math.prod(shape) * 2
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            index[tensor], at = name, at + size
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + at)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretend(tmp_path_factory.mktemp("models") / "large", LLAMA_70B, shards=30)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretend(tmp_path_factory.mktemp("models") / "small", LLAMA_8B)


# ------------------------------------------------------------------ facts
def test_a_large_folder_is_known_from_its_headers(large) -> None:
    facts = look(str(large))
    assert facts.parameters == 70_553_706_496 and facts.weight_bytes == 2 * facts.parameters  # as its makers say
    assert facts.bits == 16 and facts.dtype == "BF16" and facts.chat_template and not facts.problems and not facts.head
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.max_len) == (80, 8, 128, 131072)


@pytest.mark.parametrize(("config", "kib"), [(LLAMA_70B, 320), (LLAMA_8B, 128), (LLAMA2_7B, 512)])
def test_kv_of_a_token_is_what_papers_say(tmp_path, config, kib) -> None:
    assert look(str(pretend(tmp_path / "m", config))).kv_bytes() == kib * 1024


def test_all_that_is_wrong_is_told_at_once(tmp_path) -> None:
    folder = pretend(tmp_path / "m", LLAMA2_7B, shards=3)
    first, second, _ = sorted(folder.glob("*.safetensors"))
    with first.open("r+b") as stream:
        stream.truncate(first.stat().st_size - 1)
    second.write_bytes(b"\xff" * 100)
    facts = look(str(folder))
    assert (
        len(facts.problems) == 2 and "truncated" in facts.problems[0] and "ends inside its header" in facts.problems[1]
    )
    second.unlink()
    assert "lacks model-00002-of-00003.safetensors" in look(str(folder)).problems[0]


def test_weights_that_are_pickles(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "tokenizer.json").write_text("{}")
    facts = look(str(tmp_path))
    assert facts.form == "pickle" and "pickles" in facts.problems[0] and facts.layers == 32


def test_a_type_that_nobody_knows(tmp_path) -> None:
    facts = look(str(pretend(tmp_path / "m", LLAMA2_7B | {"num_hidden_layers": 1}, dtype="F3")))
    assert any("type F3" in problem for problem in facts.problems)


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "a/b/c"])
def test_no_model_at_all_is_a_mistake(name) -> None:
    with pytest.raises(ModelError, match="no model"):
        look(name)


def test_a_hub_id_is_looked_for_in_the_cache_only(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="not in the local hub cache"):
        look("owner/never-heard-of")


@pytest.mark.parametrize("kind", ["bpe", "spm", "unigram"])
def test_the_vocabulary_of_a_folder(tmp_path, kind) -> None:
    """As the tokenizers library writes it, with a token that was added behind the others."""
    from tokenizers import Tokenizer, models

    known = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    pieces = {
        "bpe": lambda: models.BPE(known, []),
        "spm": lambda: models.BPE(known, [], byte_fallback=True),
        "unigram": lambda: models.Unigram([(text, 0.0) for text in known], 0, False),
    }
    tokenizer = Tokenizer(pieces[kind]())
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    found = look(str(tmp_path)).vocabulary
    assert found is not None and list(found.texts) == ["<s>", "</s>", "a", "b", "<tool>"]
    assert (found.kind, found.bos, found.eos) == ("bpe" if kind == "bpe" else "spm", 0, (1,))
    assert (found.adds_bos, found.adds_eos) == (True, False)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert look(str(tmp_path)).vocabulary is None


@pytest.mark.parametrize(
    ("more", "mib"),
    [
        ({}, 2 * 62 * 16 * 128 * 2 * 131072 / 2**20),
        ({"sliding_window": 1024, "layer_types": ["sliding_attention"] * 52 + ["full_attention"] * 10}, 10656),
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, 10656),
        ({"sliding_window": 1024, "use_sliding_window": False}, 63488),
        ({"sliding_window": 1024}, 63488),
        ({"sliding_window": 1024, "model_type": "mistral"}, 496),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 62 * 576 * 2 * 131072 / 2**20),
    ],
)
def test_kv_of_layers_that_look_back_some_way_or_keep_less(tmp_path, more, mib) -> None:
    """Gemma-3-27B's numbers, and others'. What is not sure counts in full."""
    config = {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"vocab_size": 8, "max_position_embeddings": 131072} | more)
    )
    found = planning.kv_bytes(look(str(tmp_path)), Wish(131072, gamma=-1))
    assert found / 2**20 == pytest.approx(mib, rel=1e-6)


def test_quantised_weights_are_counted_as_they_were(tmp_path) -> None:
    """Several of them share a number; scales and what is not quantised are counted as they are."""
    told = LLAMA2_7B | {"num_hidden_layers": 1, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    header = {"q.qweight": {"dtype": "I32", "shape": [512, 64], "data_offsets": [0, 131072]},
              "e.weight": {"dtype": "F16", "shape": [10, 10], "data_offsets": [131072, 131272]}}  # fmt: skip
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(131272))
    found = look(str(tmp_path))
    assert (found.parameters, found.quantized) == (8 * 512 * 64 + 100, "gptq")


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1e400, 10**400, True, [1, 2]])
@pytest.mark.parametrize("key", ["architectures", "hidden_size", "num_attention_heads", "text_config", "sliding_window",
                                 "rope_scaling", "layer_types", "quantization_config", "head_dim"])  # fmt: skip
def test_configs_may_hold_anything(tmp_path, key, value) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B | {key: value}))
    assert look(str(tmp_path)).problems and look(str(tmp_path)).kv_bytes() >= 0


def test_devices_have_copies_where_there_are_fewer_kv_heads(small) -> None:
    plan = lay_out(look(str(small)), None, parse_devices("16x A:24GB"), Wish(4096, tensor_parallel=True))
    every = sum(p.bytes for layout in plan.layouts for p in layout.parts if p.name == planning.KV)
    assert every == pytest.approx(2 * planning.kv_bytes(look(str(small)), Wish(4096))), "8 KV heads on 16 devices"


# ------------------------------------------------------------------ plans
def test_devices_are_read_as_people_write_them() -> None:
    found = parse_devices("RTX 4090:24GB, 2x A100 : 80 GiB,16g, T4:15360MB")
    assert [(d.name, d.bytes / (1 << 30)) for d in found] == [
        ("RTX 4090", 24), ("A100", 80), ("A100", 80), ("GPU", 16), ("T4", 15),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "RTX", "RTX:lots", "0x A:1GB", "A:0GB", "A:24TB", ":"])
def test_what_is_no_device_is_said(text) -> None:
    with pytest.raises(BadInput, match=r"device"):
        parse_devices(text)


def test_what_is_known_to_fit_fits_and_what_does_not_does_not(large, small) -> None:
    """An 8B model in 16 bits runs on 24 GB and not on 16; a 70B model in 4 bits on 48, in 16 on 2 x 80 with a short context."""
    eight, seventy = look(str(small)), look(str(large))
    cards = {gb: [Device("card", gb * (1 << 30))] for gb in (16, 24, 48)}
    assert lay_out(eight, None, cards[24], Wish(8192)).fits and not lay_out(eight, None, cards[16], Wish(8192)).fits
    assert lay_out(eight, None, cards[16], Wish(8192, bits=8)).fits
    assert (
        lay_out(seventy, None, cards[48], Wish(4096, bits=4)).fits
        and not lay_out(seventy, None, cards[48], Wish(4096)).fits
    )
    assert lay_out(seventy, None, [Device("H100", 80 * (1 << 30))] * 2, Wish(4096)).fits
    assert not lay_out(seventy, eight, [Device("A100", 80 * (1 << 30))] * 2, Wish(8192, batch=4)).fits, (
        "with a draft of 16 GB"
    )


@given(st.integers(1, 200_000), st.integers(1, 256), st.integers(0, 16), st.sampled_from([4.5, 8.5, 16.0]))
def test_limits_are_exact_and_advice_helps(context: int, batch: int, gamma: int, bits: float) -> None:
    facts = Facts("m", Path("m"), "safetensors", parameters=8 * 10**9, weight_bytes=16 * 10**9, layers=32, hidden=4096,
                  heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab_size=128256, max_len=131072)  # fmt: skip
    draft = Facts("d", Path("d"), "safetensors", parameters=10**9, weight_bytes=2 * 10**9, layers=16, hidden=2048, heads=32,
                  kv_heads=8, head_dim=64, intermediate=8192, vocab_size=128256, max_len=131072)  # fmt: skip
    devices = [Device("a", 24 * (1 << 30)), Device("b", 16 * (1 << 30))]
    plan = lay_out(facts, draft, devices, Wish(context, batch, gamma, bits))
    bound = limits(plan)

    def fits(**change: Any) -> bool:
        return lay_out(
            facts,
            draft,
            devices,
            Wish(**({"context": context, "batch": batch, "gamma": gamma, "kv_bits": bits} | change)),
        ).fits

    assert plan.fits == (plan.missing == 0.0) == (not advice(plan))
    for name, value, top in (
        ("context", bound.context, 131072),
        ("batch", bound.batch, planning.MOST_BATCH),
        ("gamma", bound.gamma, 32),
    ):
        if value is not None:
            assert fits(**{name: value}) and (value == top or not fits(**{name: value + 1}))
    for layout in plan.layouts:
        assert math.isclose(layout.used + layout.free, layout.device.usable)
    weights = sum(p.bytes for layout in plan.layouts for p in layout.parts if p.name == "target weights")
    assert math.isclose(weights, 16e9)


def test_shares_of_a_tensor_parallel_target_are_equal(small) -> None:
    plan = lay_out(look(str(small)), None, parse_devices("A:24GB,B:80GB"), Wish(4096, tensor_parallel=True))
    one, two = ({p.name: p.bytes for p in layout.parts} for layout in plan.layouts)
    assert one["target weights"] == two["target weights"] and one["target KV"] == two["target KV"]


# ------------------------------------------------------------------ the command
def test_the_command_draws_and_counts(small, large) -> None:
    asked = ["--gpu", "RTX 4090:24GB,RTX 5090:32GB", "--context", "16384", "--kv-dtype", "q4", "--batch", "8"]
    done = CliRunner().invoke(app, ["plan", str(large), str(small), *asked])
    assert done.exit_code == 1 and "It does not fit" in done.output and "RTX 5090, 32.0 GiB" in done.output
    done = CliRunner().invoke(app, ["plan", str(small), "--gpu", "24GB", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["fits"] and told["most"]["context"] > 8192
    assert sum(told["devices"][0]["parts"].values()) + told["devices"][0]["free"] <= told["devices"][0]["bytes"]
    done = CliRunner().invoke(app, ["plan", str(small), "--gpu", "24GB"])
    assert "It fits." in done.output and "The most that fits" in done.output and "target weights" in done.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--context", "0"], "--context 0"),
        (["--kv-dtype", "q99"], "no type for keys and values"),
        (["--bits", "99"], "--bits 99"),
        (["--gpu", "what"], "is no device"),
        (["-k", "-1"], "--num-speculative-tokens -1"),
        (["--context", "200000"], "more than the 131072 tokens"),
    ],
)
def test_mistakes_are_said_in_one_sentence(small, more, said) -> None:
    done = CliRunner().invoke(app, ["plan", str(small), *more])
    assert done.exit_code == 2 and said in done.stderr


def test_a_plan_with_a_broken_model_says_so(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpu", "24GB"])
    assert done.exit_code == 2 and "no weights that can be read" in done.stderr
