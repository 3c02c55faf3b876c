"""`headstart plan`: will target and draft fit into the memory of these devices, and what is the most that does?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import Json, option
from headstart.errors import BadInput

if TYPE_CHECKING:
    from headstart.advise.plan import Device, Layout, Limits, Plan

WIDTH = 56  # characters of a bar
COLORS = {
    "target weights": "blue", "draft weights": "cyan", "target KV": "green", "draft KV": "bright_green",
    "activations": "yellow", "graphs": "magenta",
}  # fmt: skip


def plan(
    target: Annotated[
        str, typer.Argument(help="A folder, a GGUF file, a hub id in the cache, ollama:NAME, or a built-in name.")
    ],
    draft: Annotated[str | None, typer.Argument(help="The draft model, or the folder of a head.")] = None,
    gpu: Annotated[
        str | None,
        option("--gpu", help="Devices: 'RTX 4090:24GB,RTX 5090:32GB', '8x H100:80GB'. [default: those that are here]"),
    ] = None,
    context: Annotated[int, option("--context", help="Tokens of each request, prompt and answer.")] = 8192,
    batch: Annotated[int, option("--batch", help="Requests at once.")] = 1,
    gamma: Annotated[int, option("--num-speculative-tokens", "-k", help="Tokens of a draft.")] = 5,
    kv_dtype: Annotated[str, option("--kv-dtype", help="Of keys and values: f16, fp8, q8, q4, ...")] = "f16",
    bits: Annotated[
        float | None, option("--bits", help="Of the target's weights. [default: as its files are]", show_default=False)
    ] = None,
    draft_bits: Annotated[
        float | None, option("--draft-bits", help="The same of the draft's.", show_default=False)
    ] = None,
    tensor_parallel: Annotated[
        bool, option("--tensor-parallel", help="Every layer on every device, in equal shares.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Will it fit, and what is the most that does?

    Weights, keys and values of target and draft, activations and what a runtime takes, on each device; then the longest
    context, the most requests and the longest drafts that fit; and where it does not fit, what to change. Only headers are
    read. Exit code 1 means that it does not fit.

    Example: `headstart plan my-70b my-1b --gpu 'RTX 4090:24GB,RTX 5090:32GB' --context 16384 --kv-dtype q4 --batch 8`
    """
    from headstart.advise import plan as planning
    from headstart.advise.facts import look

    for flag, value in (("--context", context), ("--batch", batch)):
        if value < 1:
            raise BadInput(f"{flag} {value} is not usable: expected a whole number from 1 on.")
    for flag, size in (("--bits", bits), ("--draft-bits", draft_bits)):
        if size is not None and not 1 <= size <= 32:
            raise BadInput(f"{flag} {size:g} is not usable: expected 1 to 32.")
    if not 0 <= gamma <= 1024:
        raise BadInput(f"--num-speculative-tokens {gamma} is not usable: expected 0 to 1024.")
    wish = planning.Wish(context, batch, gamma, planning.kv_bits(kv_dtype), bits, draft_bits, tensor_parallel)
    devices = planning.parse_devices(gpu) if gpu else _here()
    facts = [look(name) for name in (target, draft) if name is not None]
    for one in facts:
        if not one.weight_bytes:
            raise BadInput(
                f"{one.name} cannot be planned with: {one.problems[0] if one.problems else 'it has no weights.'}"
            )
    if not facts[0].kv_bytes():
        raise BadInput(
            f"{target} does not tell its layers and heads in a way that is known here, so its KV cannot be reckoned."
        )
    if 0 < facts[0].max_len < context:
        raise BadInput(f"--context {context} is more than the {facts[0].max_len} tokens that {target} takes.")
    found = planning.lay_out(facts[0], facts[1] if draft is not None else None, devices, wish)
    bound, changes = planning.limits(found), planning.advice(found)
    if as_json:
        _print_json(found, bound, changes)
    else:
        _print(found, bound, changes)
    if not found.fits:
        raise typer.Exit(1)


def _here() -> list[Device]:
    """The GPUs of this machine, or its main memory."""
    import torch

    from headstart.advise.plan import Device
    from headstart.bench import meters

    if torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [Device(one.name, float(one.total_memory)) for one in every]
    return [Device("main memory", float(meters.memory_bytes()))]


# ------------------------------------------------------------------ what is told
def _print_json(plan: Plan, bound: Limits, changes: list[str]) -> None:
    from headstart.cli.show import print_json

    devices: list[dict[str, Any]] = [
        {
            "name": layout.device.name,
            "bytes": layout.device.bytes,
            "parts": {part.name: part.bytes for part in layout.parts},
            "free": layout.free,
        }
        for layout in plan.layouts
    ]
    print_json({"fits": plan.fits, "devices": devices, "most": bound, "advice": changes, "wish": plan.wish})


def _print(plan: Plan, bound: Limits, changes: list[str]) -> None:
    from headstart.cli.show import out

    console = out()
    for one in (plan.target, plan.draft):
        if one is not None:
            size = f"{one.parameters / 1e9:.2f} billion weights, {one.bits:.1f} bits each"
            each = f"{one.kv_bytes(plan.wish.kv_bits) / 1024:.0f} KiB of KV a token"
            console.print(f"{one.name}: {one.architecture}, {size}, {each}", markup=False)
    for layout in plan.layouts:
        console.print(picture(layout))
    console.print(
        "It fits." if plan.fits else f"It does not fit: {plan.missing / 1e9:.1f} GB are missing.", markup=False
    )
    told = [f"{name} {value:,}" for name, value in _named(bound) if value is not None]
    if plan.fits:
        console.print(f"The most that fits, each with the others as they are: {', '.join(told)}.", markup=False)
    for i, change in enumerate(changes):
        console.print(f"{'What would help, each alone: ' if not i else ' ' * 29}{change}", markup=False)


def _named(bound: Limits) -> list[tuple[str, int | None]]:
    return [("context", bound.context), ("requests at once", bound.batch), ("draft tokens", bound.gamma)]


def picture(layout: Layout) -> Any:
    """A bar as long as the device's memory, and what its parts are."""
    from rich.text import Text

    device, text = layout.device, Text()
    text.append(f"\n{device.name}, {device.bytes / (1 << 30):.1f} GiB\n", style="bold")
    scale = WIDTH / max(device.bytes, layout.used)
    for part in layout.parts:
        text.append("█" * max(1, round(part.bytes * scale)), style=COLORS.get(part.name, "white"))
    text.append("░" * max(0, round(layout.free * scale)), style="dim")
    for part in layout.parts:
        text.append("\n  █ ", style=COLORS.get(part.name, "white"))
        text.append(f"{part.name:16}{part.bytes / 1e9:8.2f} GB")
    left = "free" if layout.free >= 0 else "missing"
    text.append(f"\n  ░ {left:16}{abs(layout.free) / 1e9:8.2f} GB", style="" if layout.free >= 0 else "red")
    reserved = device.bytes - device.usable
    text.append(f"  ({reserved / 1e9:.2f} GB are kept for the runtime)\n", style="dim")
    return text
