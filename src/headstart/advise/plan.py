"""Will it fit? Weights, KV, activations and what a runtime takes, by device; and the most that fits: tokens, requests, drafts.

All of it is arithmetic on facts that are known without the weights. What a runtime takes for itself is a rule of thumb, stated
here, and left as head-room on every device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headstart.advise.facts import Facts
from headstart.errors import BadInput

GB, GIB = 1e9, float(1 << 30)
RUNTIME = 0.75 * GIB  # of each device: the driver's context, libraries, workspaces
GRAPHS = 0.4 * GIB  # of the first device, for CUDA graphs
SPARE = 0.03  # of each device: what allocators lose
CHUNK = 2048  # rows of a forward that reads prompts
DTYPES = {  # bits of a key or a value, with the scales of blocks
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "auto": 16.0, "fp8": 8.0, "q8": 8.5, "q8_0": 8.5, "int8": 8.5,
    "q6": 6.5, "q5": 5.5, "q5_0": 5.5, "q5_1": 6.0, "q4": 4.5, "q4_0": 4.5, "q4_1": 5.0, "int4": 4.5,
}  # fmt: skip
MOST_DRAFT, MOST_BATCH = 32, 4096  # how far is looked


@dataclass(frozen=True)
class Device:
    name: str
    bytes: float

    @property
    def usable(self) -> float:
        return max(0.0, self.bytes * (1 - SPARE) - RUNTIME)


@dataclass(frozen=True)
class Wish:
    """What is to run."""

    context: int  # tokens of each request
    batch: int = 1
    gamma: int = 5  # tokens of a draft
    kv_bits: float = 16.0
    bits: float | None = None  # of a weight; None: as the files are
    draft_bits: float | None = None
    tensor_parallel: bool = False  # every device has its share of every layer; else layers go to devices


@dataclass(frozen=True)
class Part:
    """One thing that memory goes to."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Layout:
    """One device, and what lies on it."""

    device: Device
    parts: tuple[Part, ...]

    @property
    def used(self) -> float:
        return sum(part.bytes for part in self.parts)

    @property
    def free(self) -> float:
        return self.device.usable - self.used


@dataclass(frozen=True)
class Plan:
    target: Facts
    draft: Facts | None
    wish: Wish
    layouts: tuple[Layout, ...]

    @property
    def fits(self) -> bool:
        return all(layout.free >= 0 for layout in self.layouts)

    @property
    def missing(self) -> float:
        return sum(max(0.0, -layout.free) for layout in self.layouts)


def parse_devices(text: str) -> list[Device]:
    """`RTX 4090:24GB,RTX 5090:32GB`, `2x A100:80GB`, or `24GB`."""
    out: list[Device] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(
            r"(?:(\d+)\s*[x×]\s*)?(?:(.*?)\s*:)?\s*(\d+(?:\.\d+)?)\s*(GiB|GB|G|MiB|MB|M)?", item, re.IGNORECASE
        )
        if match is None:
            raise BadInput(f"{item!r} is no device: write NAME:24GB, several with commas, or 2x NAME:24GB.")
        count, name, size, unit = match.groups()
        each = float(size) * (
            GIB if (unit or "GB").lower().startswith("g") else GIB / 1024
        )  # makers say GB, and mean GiB
        if not 0 < each < 1e15 or not 0 < int(count or 1) <= 1024:
            raise BadInput(f"{item!r} is no device that could be: check its memory and number.")
        out += [Device(name or "GPU", each)] * int(count or 1)
    if not out:
        raise BadInput("No device was named: --gpu 'RTX 4090:24GB'.")
    return out


def kv_bits(name: str) -> float:
    if (found := DTYPES.get(name.lower())) is None:
        raise BadInput(f"{name!r} is no type for keys and values: choose from {', '.join(DTYPES)}.")
    return found


# ------------------------------------------------------------------ arithmetic
def weight_bytes(facts: Facts, bits: float | None) -> float:
    """As the files are, or with so many bits a weight; embeddings and output stay at 16 then, as quantisers leave them."""
    if bits is None:
        return float(facts.weight_bytes)
    matrices = 1 if facts.tied else 2
    whole = min(facts.parameters, matrices * facts.vocab_size * facts.hidden) if bits < 16 else 0
    return (whole * 16 + (facts.parameters - whole) * bits) / 8


def kv_bytes(facts: Facts, wish: Wish) -> float:
    """Every request may be as long as it may; layers with a window keep no more than that."""
    tokens = wish.context + wish.gamma + 1
    short = min(tokens, facts.window) if facts.window else tokens
    whole = facts.kv_bytes(wish.kv_bits, facts.layers - facts.windowed) * tokens
    return (whole + facts.kv_bytes(wish.kv_bits, facts.windowed) * short) * wish.batch


def activation_bytes(facts: Facts, wish: Wish) -> float:
    """The widest layer of a forward, twice, and logits in 32 bits."""
    rows = max(CHUNK, wish.batch * (wish.gamma + 1))
    width = 2 * facts.intermediate + 4 * facts.hidden
    return rows * width * 2 + wish.batch * (wish.gamma + 1) * facts.vocab_size * 4


def lay_out(target: Facts, draft: Facts | None, devices: Sequence[Device], wish: Wish) -> Plan:
    """The draft goes to one device, where most is free; the target is spread over all of them by what is left."""
    spread = {"target weights": weight_bytes(target, wish.bits), KV: kv_bytes(target, wish)}
    every = activation_bytes(target, wish)
    whole = {} if draft is None else _of_draft(draft, wish)
    parts: list[dict[str, float]] = [{"activations": every} for _ in devices]
    parts[0]["graphs"] = GRAPHS
    if whole:
        most = max(range(len(devices)), key=lambda i: devices[i].usable - sum(parts[i].values()))
        parts[most] |= whole
    room = [max(0.0, device.usable - sum(own.values())) for device, own in zip(devices, parts, strict=True)]
    shares = (
        [1 / len(devices)] * len(devices) if wish.tensor_parallel or not sum(room) else [r / sum(room) for r in room]
    )
    least = 1 / target.kv_heads if wish.tensor_parallel and target.kv_heads and not target.latent else 0.0
    for own, share in zip(
        parts, shares, strict=True
    ):  # a KV head is not divided: where there are fewer, devices have copies
        own |= {name: size * (max(share, least) if name == KV else share) for name, size in spread.items()}
    layouts = [
        Layout(device, tuple(Part(name, size) for name, size in sorted(own.items(), key=lambda p: ORDER.index(p[0]))))
        for device, own in zip(devices, parts, strict=True)
    ]
    return Plan(target, draft, wish, tuple(layouts))


KV = "target KV"
ORDER = ("target weights", "draft weights", KV, "draft KV", "activations", "graphs")


def _of_draft(draft: Facts, wish: Wish) -> dict[str, float]:
    return {"draft weights": weight_bytes(draft, wish.draft_bits), "draft KV": kv_bytes(draft, wish)}


# ------------------------------------------------------------------ the most that fits
def most(change: Callable[[int], Plan], least: int, limit: int) -> int | None:
    """The largest number for which the plan fits; None where not even the least does. Needs grow with the number."""
    if not change(least).fits:
        return None
    low, high = least, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if change(middle).fits else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Limits:
    """Each with the others as they were asked for."""

    context: int | None
    batch: int | None
    gamma: int | None


def limits(plan: Plan) -> Limits:
    devices = [layout.device for layout in plan.layouts]

    def with_(**change: int) -> Plan:
        return lay_out(plan.target, plan.draft, devices, replace(plan.wish, **change))  # type: ignore[arg-type]

    longest = plan.target.max_len or 1 << 20
    return Limits(
        most(lambda n: with_(context=n), 1, longest),
        most(lambda n: with_(batch=n), 1, MOST_BATCH),
        most(lambda n: with_(gamma=n), 0, MOST_DRAFT),
    )


# ------------------------------------------------------------------ advice
def advice(plan: Plan) -> list[str]:
    """What to change so that it fits, the least first; each one alone is enough."""
    if plan.fits:
        return []
    devices, found = [layout.device for layout in plan.layouts], []
    bound = limits(plan)

    def fits(draft: Facts | None = plan.draft, **change: object) -> bool:
        return lay_out(plan.target, draft, devices, replace(plan.wish, **change)).fits  # type: ignore[arg-type]

    for bits, name in ((8.5, "8 bits"), (4.5, "4 bits")):
        if plan.wish.kv_bits > bits and fits(kv_bits=bits):
            found.append(f"keys and values in {name} (--kv-dtype q{name[0]})")
            break
    if bound.context is not None and bound.context >= 512:
        found.append(f"a context of at most {bound.context:,} tokens")
    if bound.batch is not None:
        found.append(f"at most {bound.batch} requests at once")
    for bits in (8.0, 6.0, 5.0, 4.0, 3.0):
        if (plan.wish.bits or plan.target.bits) > bits + 0.5 and fits(bits=bits):
            found.append(f"the target in {bits:.0f} bits a weight (--bits {bits:.0f})")
            break
    if plan.draft is not None and fits(draft=None):
        found.append("no draft model: ngram and suffix need no memory, and a head needs little")
    if not found:
        found.append(f"{plan.missing / GB:.1f} GB more memory, or a smaller model: no single change is enough")
    return found
