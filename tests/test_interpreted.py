"""The tests of the kernels, in processes of their own: Triton's interpreter is chosen when Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))
SLOW = ("test_ahead.py", "test_deciding.py", "test_growth.py", "test_kernel_engine.py")  # have a process each
GROUPS = {name: [name] for name in SLOW} | {"others": [name for name in FILES if name not in SLOW]}
ALONE = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HEADSTART_TEST_DEVICE": "cpu"}


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: its kernels cannot run"
)
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_in_the_interpreter(group: str) -> None:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    files = [str(HERE / "interpreted" / name) for name in GROUPS[group]]
    command = [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=HERE.parent, env=plain | ALONE, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
