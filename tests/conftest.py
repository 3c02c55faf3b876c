"""One thread and no surprises: every run of the tests draws the same examples."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from headstart import progress

torch.set_num_threads(1)
settings.register_profile(
    "headstart",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("headstart")


@pytest.fixture(autouse=True)
def _heard():
    """`--quiet` of one command must not silence the next test."""
    progress.set_quiet(False)
