"""What speculation would be worth, reckoned before anything is loaded: acceptance by what is known of a pair, time by bytes.

The tokens of a step are those of Leviathan et al. (2023): every drafted token is accepted with the same chance α, and the first
that is not ends the draft. A forward takes as long as its weights take to be read and its products to be computed.
"""

from __future__ import annotations

import functools
import json
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.advise.facts import Facts
from headstart.errors import BadInput, nearest
from headstart.models.builtin import cache_dir
from headstart.policy.costs import Costs

MOST = 8  # tokens of a draft that are looked at
AT_ONCE = ("medusa", "mlp_speculator", "peagle")  # heads that draft all tokens in one forward
LAYER = {"cpu": 2e-5, "cuda": 1e-5}  # seconds that a layer takes however small it is
REAL = 0.8, 0.6  # of what makers say of a GPU: the bandwidth and the arithmetic that forwards reach
SLACK = 1.25  # how far costs that were not measured may be off, either way
GPUS = {  # GB and thousands of billions of operations a second (16 bits, without sparsity), as their makers say
    "B200": (8000, 2250), "H200": (4800, 989), "H100 PCIE": (2000, 756), "H100 NVL": (3900, 835), "H100": (3350, 989),
    "GH200": (4000, 989), "A100 40GB": (1555, 312), "A100": (2039, 312), "A30": (933, 165), "A10": (600, 125),
    "A40": (696, 150), "A6000": (768, 155), "A5000": (768, 111), "L40S": (864, 362), "L40": (864, 181), "L4": (300, 121),
    "6000 ADA": (960, 364), "5090": (1792, 210), "5080": (960, 113), "5070": (672, 62), "5060": (448, 39), "4090": (1008, 165),
    "4080": (717, 97), "4070": (504, 58), "4060": (272, 30), "3090": (936, 71), "3080": (760, 60), "3070": (448, 41),
    "3060": (360, 25), "2080": (448, 40), "T4": (320, 65), "V100": (900, 125), "P100": (732, 19), "MI300X": (5300, 1307),
}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    name: str
    bandwidth: float  # bytes a second
    flops: float  # operations a second
    layer: float  # seconds that a layer takes however small it is
    here: bool = False  # it is this machine: what was measured on it counts

    @property
    def key(self) -> str:
        """As `policy.store` names the device."""
        return self.name if not self.name.startswith("CPU") else f"{platform.machine()} {platform.processor()}"


def this_machine() -> Hardware:
    """Its GPU, or else its CPU: measured for about a second."""
    import torch

    from headstart.bench import roofline
    from headstart.models.load import pick_device, pick_dtype

    device = pick_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    try:
        speed, peak = roofline.bandwidth(device), roofline.peak(device, pick_dtype("auto", device))
    except (RuntimeError, MemoryError) as error:
        raise BadInput(f"This machine's memory cannot be measured now ({error}): name a GPU with --gpu.") from error
    return Hardware(name, speed, peak, LAYER[device.type], here=True)


def by_name(gpu: str) -> Hardware:
    """A GPU as people call it, with its maker's numbers."""
    told = re.sub(r"NVIDIA|GEFORCE|TESLA|RTX|GTX|[^A-Z0-9]", " ", gpu.upper())
    fitting = [n for n in GPUS if all(re.search(rf"(?<![A-Z0-9]){word}(?!\d)", told) for word in n.split())]
    if not fitting:
        raise BadInput(f"--gpu {gpu} is not known here.{nearest(gpu.upper(), GPUS)}")
    name = max(fitting, key=len)
    speed, peak = GPUS[name]
    return Hardware(gpu, speed * 1e9 * REAL[0], peak * 1e12 * REAL[1], LAYER["cuda"])


# ------------------------------------------------------------------ tokens and time
def expected_tokens(alpha: float, gamma: int) -> float:
    """Of a step with a draft of γ tokens: (1 - α^(γ+1)) / (1 - α)."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


@dataclass(frozen=True)
class Experts:
    """Of a mixture: a token goes through some of them, several tokens through more."""

    count: int
    used: int
    share: float  # of all weights

    def read(self, rows: int) -> float:
        """Share of all experts that at least one of so many tokens needs, if they choose evenly."""
        return 1 - (1 - self.used / self.count) ** rows


def experts_of(model: Facts) -> Experts | None:
    """None: every token goes through all weights, or the config does not tell."""
    kind = str(model.config.get("general.architecture", ""))
    count = _told(model, "num_experts", "num_local_experts", "n_routed_experts", f"{kind}.expert_count")
    used = _told(model, "num_experts_per_tok", "experts_per_token", f"{kind}.expert_used_count")
    wide = _told(model, "moe_intermediate_size", "intermediate_size", f"{kind}.expert_feed_forward_length")
    if not 0 < used < count or not model.parameters:
        return None
    weights = 3 * model.hidden * (wide or model.intermediate) * count * model.layers
    return Experts(count, used, min(0.98, weights / model.parameters))


def _told(model: Facts, *names: str) -> int:
    """The first of these that the config has, of the text part where there are several."""
    inner = model.config.get("text_config")
    for config in (inner if isinstance(inner, dict) else {}, model.config):
        for name in names:
            if isinstance(value := config.get(name), int) and value > 0:
                return value
    return 0


def seconds(model: Facts, rows: int, hardware: Hardware, read: float | None = None) -> float:
    """Of a forward of so many rows. `read`: bytes that it reads, where that is not all but the input embeddings."""
    experts = experts_of(model)
    idle = experts.share * (1 - experts.read(rows)) if experts is not None else 0.0
    work = 1 - experts.share * (1 - experts.used / experts.count) if experts is not None else 1.0
    whole = weights_read(model) if read is None else read
    arithmetic = 2 * rows * model.parameters * work / hardware.flops
    return whole * (1 - idle) / hardware.bandwidth + arithmetic + max(1, model.layers) * hardware.layer


def weights_read(model: Facts) -> float:
    """All weights but the rows of the input embeddings that nobody asked for."""
    rows = 0.0 if model.tied or model.head else model.vocab_size * model.hidden * model.bits / 8
    return max(model.weight_bytes - rows, model.weight_bytes / 2)


def kept_costs(names: Iterable[str], device: str) -> Costs | None:
    """Seconds of the target's forwards by rows, as the engine measured and kept them on this machine; the newest."""
    wanted = set(names)
    files = sorted((cache_dir() / "costs").glob("*.json"), key=_age)
    return next((costs for file in files if (costs := _costs(file, wanted, device)) is not None), None)


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:
        return 0.0


def _costs(file: Path, names: set[str], device: str) -> Costs | None:
    try:
        kept = _kept(file, _age(file))
        facts = kept["facts"]
        return Costs.from_dict(kept) if facts["model"] in names and facts["device"] == device else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@functools.lru_cache(1024)
def _kept(file: Path, age: float) -> Any:
    """What such a file holds; read again where it has changed."""
    return json.loads(file.read_text(encoding="utf-8"))


# ------------------------------------------------------------------ forecasts
@dataclass(frozen=True)
class Guess:
    """How likely a drafted token is accepted."""

    alpha: float
    spread: float  # more or less
    why: str

    @property
    def low(self) -> float:
        return max(0.02, self.alpha - self.spread)

    @property
    def high(self) -> float:
        return min(0.98, self.alpha + self.spread)


@dataclass(frozen=True)
class Forecast:
    gamma: int  # tokens of a draft that are best
    tokens: float  # of a step, expected
    speedup: float
    low: float
    high: float
    measured: bool  # the target's forwards were measured on this machine


@dataclass(frozen=True)
class Times:
    """Seconds of what a step consists of."""

    target: Callable[[int], float]  # a forward of so many rows
    draft: float  # one forward of the draft or head
    at_once: bool = False  # which gives all tokens
    deepest: int = MOST  # tokens that it can draft
    measured: bool = False

    def step(self, gamma: int, slack: float = 1.0) -> float:
        """With a draft of γ tokens; `slack` on what it takes more than plain decoding."""
        drafting = self.draft * (1 if self.at_once else gamma)
        return self.target(1) + (drafting + self.target(gamma + 1) - self.target(1)) * slack


def times(
    target: Facts, draft: Facts, hardware: Hardware, read: float | None = None, at_once: bool = False, depth: int | None = None,
) -> Times:  # fmt: skip
    """From what was measured here, where something was; then the draft's time is in proportion."""
    kept = kept_costs((target.name, str(target.path)), hardware.key) if hardware.here else None
    own, deepest = seconds(draft, 1, hardware, read), min(MOST, depth or MOST)
    if kept is None:
        return Times(lambda rows: seconds(target, rows, hardware), own, at_once, deepest)
    ratio = kept.of(1) / seconds(target, 1, hardware)
    mine = None if draft.head else kept_costs((draft.name, str(draft.path)), hardware.key)
    return Times(kept.of, mine.of(1) if mine is not None else own * ratio, at_once, deepest, measured=True)


def forecast(guess: Guess, spent: Times) -> Forecast:
    """The length of drafts that is best for the middle of the guess, and what it brings over the whole range."""

    def speedup(alpha: float, gamma: int, slack: float = 1.0) -> float:
        return expected_tokens(alpha, gamma) * spent.target(1) / spent.step(gamma, slack)

    best = max(range(1, spent.deepest + 1), key=lambda gamma: speedup(guess.alpha, gamma))
    slack = 1.0 if spent.measured else SLACK
    return Forecast(
        best,
        expected_tokens(guess.alpha, best),
        speedup(guess.alpha, best),
        speedup(guess.low, best, slack),
        speedup(guess.high, best, 1 / slack),
        spent.measured,
    )
