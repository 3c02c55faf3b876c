"""Which runner a model gets: kernels where they can run, the reference path with a word about it where they cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.errors import ConfigError
from headstart.models import runners
from headstart.models.kernels import launch
from headstart.models.runner import TorchRunner
from tests import tiny

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
