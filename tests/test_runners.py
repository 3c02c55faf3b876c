"""Which runner a model gets: kernels where they can run, the reference path with a word about it where they cannot."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.errors import ConfigError
from headstart.models import lean, runners
from headstart.models.kernels import launch
from headstart.models.runner import TorchRunner
from tests import tiny
from tests.test_quantized import logits, small_model

REASON = "they are on strike"


def standing_on(device: str) -> Any:
    """Something with parameters on this device."""
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device))]))


@pytest.fixture
def _unusable(monkeypatch) -> None:
    monkeypatch.setattr(runners, "unusable", lambda device: REASON)
    monkeypatch.setattr(runners, "TorchRunner", lambda model, fuse, wide, quantize: ("reference", fuse, wide))
    runners._say.cache_clear()


@pytest.mark.usefixtures("_unusable")
def test_a_gpu_without_kernels_takes_the_reference_path_and_says_so_once(capsys) -> None:
    for _ in range(3):
        assert runners.make_runner(standing_on("cuda"), True, False) == ("reference", True, False)
    said = capsys.readouterr().err
    assert said.count(REASON) == 1 and "slower reference path" in said


@pytest.mark.usefixtures("_unusable")
def test_nothing_is_said_on_a_cpu_or_where_kernels_were_switched_off(capsys) -> None:
    assert runners.make_runner(standing_on("cpu"), False, True) == ("reference", False, True)
    assert runners.make_runner(standing_on("cuda"), kernels=False)[0] == "reference"
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_unusable")
def test_deterministic_without_kernels_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=REASON):
        runners.make_runner(standing_on("cuda"), deterministic=True)
    with pytest.raises(ConfigError, match="switched off"):
        runners.make_runner(standing_on("cuda"), kernels=False, deterministic=True)


def test_a_cpu_runs_the_reference_path() -> None:
    if launch.interpreted():
        pytest.skip("Triton's interpreter was asked for")
    assert launch.unusable(torch.device("cpu")) == "they need a CUDA GPU"
    assert type(runners.make_runner(tiny.model().cpu())) is TorchRunner


def test_engines_over_one_model_share_its_weights_in_both_orders(monkeypatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("a torch without oneDNN")
    monkeypatch.setattr(lean, "wide_pays", lambda weight: True)
    model, tokens = small_model(), [3, 141, 59, 26, 5]
    narrow, first, second = TorchRunner(model), TorchRunner(model, wide=True), TorchRunner(model, wide=True)
    assert narrow.lean and first.lean and second.lean
    for a, b, c in zip(narrow.lean.products, first.lean.products, second.lean.products, strict=True):
        assert a.weight.data_ptr() == b.weight.data_ptr() == c.weight.data_ptr()
        assert a.packed is None and b.packed is c.packed is not None
    assert torch.equal(logits(first, tokens), logits(second, tokens))
    assert torch.allclose(logits(narrow, tokens), logits(second, tokens), atol=1e-5)
    held = [p.is_packed for p in narrow.lean.products]
    del first, second, b, c
    gc.collect()
    assert all(held) and not any(p.is_packed for p in narrow.lean.products), "with the last engine it goes"


def test_engines_over_one_model_go_by_what_was_measured_once(monkeypatch) -> None:
    """Else what disturbs the machine while one of them is made would set them apart for as long as they live."""
    said = iter((True, False))
    monkeypatch.setattr(lean, "wide_pays", lambda weight: next(said) and torch.backends.mkldnn.is_available())
    model, other = small_model(), small_model()
    wide = [TorchRunner(m, wide=True).lean.products[1].packed is not None for m in (model, model, other)]
    assert wide == [torch.backends.mkldnn.is_available()] * 2 + [False]


def test_the_fastest_of_some_tries_counts(monkeypatch) -> None:
    now, took = [0.0], iter([3, 2, 9, 2, 1, 2])
    monkeypatch.setattr(lean, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def way(x: None) -> None:
        now[0] += next(took)

    assert lean.race([way, way], None, tries=3) == [1, 2]


def test_weights_are_taken_out_of_their_file_once() -> None:
    model = small_model()
    weights = [p for layer in model.model.layers for p in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)]
    in_file = [p.data for p in weights]  # held, or others could take their place
    TorchRunner(model)
    own = [p.data_ptr() for p in weights]
    assert not {*own} & {t.data_ptr() for t in in_file}
    TorchRunner(model)
    assert [p.data_ptr() for p in weights] == own


def test_weights_that_took_the_place_of_others_are_fused_anew() -> None:
    model, other, tokens = small_model(), small_model(), [3, 141, 59, 26, 5]
    before = TorchRunner(model)
    for layer in other.model.layers:
        layer.mlp.up_proj.weight.data.mul_(2)
    model.load_state_dict(other.state_dict(), assign=True)
    expected = logits(TorchRunner(other), tokens)
    assert torch.equal(logits(TorchRunner(model), tokens), expected)
    assert not torch.allclose(logits(before, tokens), expected)
