"""Weights of 8 and 4 bits: close to the float products, the same for a row in any company, and refused where they cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.core import Batch, Segment
from headstart.errors import ConfigError
from headstart.models import quantized
from headstart.models.quantized import Int4Product, Int8Product
from headstart.models.runner import TorchRunner
from headstart.models.runners import make_runner
from tests import harness, tiny


def small_model(kind: str = "llama", hidden: int = 64):
    torch.manual_seed(0)
    sizes = dict(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, vocab_size=211)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    config = AutoConfig.for_model(kind, **sizes, **heads)
    return AutoModelForCausalLM.from_config(config).eval()


def logits(runner: TorchRunner, tokens: list[int]) -> torch.Tensor:
    runner.allocate(len(tokens))
    where = np.arange(len(tokens))
    return runner.forward(Batch(np.array(tokens), where, [Segment(0, len(tokens), 0, where)], where)).logits.clone()


@pytest.mark.parametrize(("make", "loss"), [(Int8Product, 0.01), (Int4Product, 0.12)])
def test_products_are_close_to_those_of_the_float_weights(make, loss: float):
    torch.manual_seed(1)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(5, 64)
    exact = x @ weight.t() + bias
    error = (make(weight, bias)(x) - exact).norm() / exact.norm()
    assert 0 < error < loss


def test_four_bits_keep_what_four_bits_can_say():
    """Weights that are whole multiples of their group's scale come through exactly."""
    torch.manual_seed(2)
    whole = torch.randint(-7, 8, (32, 64)).float()
    whole[:, ::32] = -8.0
    x = torch.eye(64)[:7] * 127  # inputs that 8 bits hold exactly
    assert torch.allclose(Int4Product(whole * 0.5)(x), x @ (whole * 0.5).t(), rtol=1e-5)


@pytest.mark.parametrize("make", [Int8Product, Int4Product])
def test_zero_weights_stay_zero(make):
    assert not make(torch.zeros(32, 32))(torch.randn(2, 32)).any()


@pytest.mark.parametrize("make", [Int8Product, Int4Product])
def test_a_row_has_the_same_bits_in_every_company(make):
    torch.manual_seed(3)
    product, x = make(torch.randn(160, 96)), torch.randn(17, 96)
    alone = torch.cat([product(x[i : i + 1]) for i in range(17)])
    for count in (2, 3, 4, 5, 8, 9, 16, 17):
        assert torch.equal(product(x[:count]), alone[:count])


@pytest.mark.parametrize("kind", quantized.FORMATS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_quantised_model_says_nearly_the_same_in_less_memory(kind: str, architecture: str):
    plain, small = TorchRunner(small_model(architecture)), TorchRunner(small_model(architecture), quantize=kind)
    exact, rounded = (logits(r, list(range(3, 60))) for r in (plain, small))
    assert 0 < (rounded - exact).norm() / exact.norm() < {"int8": 0.03, "int4": 0.3}[kind]
    assert small.weight_bytes < 0.6 * plain.weight_bytes


@pytest.mark.parametrize("kind", quantized.FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_do_not_change_the_text_of_a_quantised_model(kind: str, temperature: float):
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
    texts = []
    for spec in (None, {"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"}):
        engine = harness.engine(TorchRunner(small_model(), quantize=kind), spec)
        texts.append(harness.run(engine, [harness.request(p, temperature=temperature) for p in prompts]))
    assert texts[0] == texts[1] == texts[2]


def test_what_cannot_be_quantised_is_refused_in_one_sentence():
    for kind, device, dtype, word in [
        ("int3", "cpu", torch.float32, "int8 or int4"),
        ("int8", "cuda", torch.float32, "for CPUs"),
        ("int4", "cpu", torch.bfloat16, "float32"),
    ]:
        with pytest.raises(ConfigError, match=word):
            quantized.refuse(kind, torch.device(device), dtype)
    with pytest.raises(ConfigError, match="lean forward"):
        make_runner(tiny.model("gpt2"), quantize="int8")
    with pytest.raises(ConfigError, match="lean forward"):
        make_runner(small_model(), fuse=False, quantize="int8")
    with pytest.raises(ConfigError, match="multiple of 32"):
        make_runner(small_model(hidden=48), quantize="int4")


def test_a_network_stays_as_it_is_where_eight_bits_are_slower(monkeypatch) -> None:
    monkeypatch.setattr(quantized, "race", lambda products, x: [1.0, 2.0])
    network = torch.nn.Sequential(torch.nn.Linear(64, 96))
    quantized.shrink(network)
    assert type(network[0]) is torch.nn.Linear


def test_a_small_network_says_nearly_the_same(monkeypatch) -> None:
    monkeypatch.setattr(quantized, "race", lambda products, x: [2.0, 1.0])
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 40, bias=False))
    odd = torch.nn.Sequential(torch.nn.Linear(30, 8))
    x = torch.randn(5, 64)
    with torch.inference_mode():
        before = network(x)
        quantized.shrink(network)
        quantized.shrink(odd)
        after = network(x)
    assert isinstance(network[0], quantized.SmallLinear) and isinstance(odd[0], torch.nn.Linear)
    assert not torch.equal(before, after) and (before - after).abs().max() < 0.05 * before.abs().max()


@pytest.mark.parametrize(("small", "told"), [(3.0, True), (1.1, False)])
def test_a_chip_without_fast_products_is_told(small: float, told: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(quantized, "race", lambda products, x: [1.0, small])
    make_runner(small_model(), quantize="int8")
    assert ("takes 3.0 times as long as float32" in capsys.readouterr().err) == told
