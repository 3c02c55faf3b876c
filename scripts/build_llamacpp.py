#!/usr/bin/env python3
"""Build llama-cpp-python for this CPU, so that speculation on it gives the same bits as plain decoding. 10 to 20 minutes.

    make llamacpp

The package on the index is a source that pip builds as it is. Two small changes make a token's result independent of how many
others share its forward, on CPUs:

  a multiply and an add are fused in the products of several tokens too, as they are in the product of one (ARM)
  attention of one token reads its keys in one run from 512 keys on too, as attention of several tokens does

Neither makes anything slower here; docs/llamacpp.md has the figures. A build without them works as well, with outputs that may
differ at near-ties.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
HEADER = """\
#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define vmlaq_f32 vfmaq_f32
#define vmlaq_n_f32 vfmaq_n_f32
#endif
"""
ATTENTION = ("vendor/llama.cpp/ggml/src/ggml-cpu/ops.cpp", "q->type == GGML_TYPE_F32 && nek1 >= 512;")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = fetch(Path(folder))
        change(source)
        header = Path(folder) / "one_result.h"
        header.write_text(HEADER)
        install(source, header)
    print("llama.cpp is ready: headstart generate --runner llamacpp -m FILE.gguf ...")


def fetch(folder: Path) -> Path:
    print(f"Fetching llama-cpp-python {VERSION} ...", flush=True)
    pip("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), f"llama-cpp-python=={VERSION}")
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as bundle:
        bundle.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def change(source: Path) -> None:
    path, condition = source / ATTENTION[0], ATTENTION[1]
    text = path.read_text()
    if text.count(condition) != 1:
        sys.exit(f"llama-cpp-python {VERSION} is not as expected: {ATTENTION[0]} was changed by its authors.")
    path.write_text(text.replace(condition, condition.replace("nek1 >= 512", "false")))


def install(source: Path, header: Path) -> None:
    print("Building it for this CPU, which takes 10 minutes or more ...", flush=True)
    flags = (
        f"-DGGML_NATIVE=ON -DLLAMA_CURL=OFF '-DCMAKE_C_FLAGS=-include {header}' '-DCMAKE_CXX_FLAGS=-include {header}'"
    )
    extra = os.environ.get("CMAKE_ARGS", "")
    pip(
        "install",
        "--no-cache-dir",
        "--force-reinstall",
        "--no-deps",
        str(source),
        CMAKE_ARGS=f"{flags} {extra}".strip(),
    )
    pip("install", "-q", "diskcache>=5.6", "jinja2", "typing_extensions")


def pip(*args: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    if subprocess.run(command, env=os.environ | environment).returncode:
        sys.exit(f"pip could not do this: {' '.join(args)}")


if __name__ == "__main__":
    main()
