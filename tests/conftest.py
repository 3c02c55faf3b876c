"""One thread and no surprises: every run of the tests draws the same examples."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from headstart import progress
from headstart.models.llamacpp import native

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


@pytest.fixture(autouse=True, scope="module")
def _torch_runs(request):
    """Whoever has llama-cpp-python gets torch all the same, in subprocesses too; but not in a module marked `llamacpp`."""
    if request.node.get_closest_marker("llamacpp") is not None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: "the tests leave it out")
        patch.setenv("LLAMA_CPP_LIB_PATH", "no such folder")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that nobody waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_interpreted.py")
