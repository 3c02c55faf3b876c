"""`headstart doctor`: what this machine has, and what can be used on it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from headstart.cli.options import Json, Quiet, option
from headstart.progress import set_quiet, status

if TYPE_CHECKING:
    from headstart.advise.doctor import Diagnosis


def doctor(
    fast: Annotated[bool, option("--fast", help="Measure nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What does this machine have, and what can be used on it?

    CPU with the features that speed depends on, GPUs with memory and compute capability, how fast memory really is, versions;
    and for everything that cannot be used, what to do about it.

    Example: `headstart doctor`
    """
    from headstart.advise.doctor import examine
    from headstart.cli.show import print_json

    set_quiet(quiet)
    with status("Measuring memory" if not fast else "Looking around"):
        found = examine(measured=not fast)
    if as_json:
        print_json(asdict(found) | {"headstart": found.headstart})
    else:
        _print(found)


def _print(found: Diagnosis) -> None:
    from headstart.cli.show import out

    console = out()
    speed = f", {found.bandwidth / 1e9:.1f} GB/s" if found.bandwidth else ""
    console.print(f"Headstart {found.headstart}, Python {found.python}, {found.system}", markup=False)
    console.print(
        f"{found.cores} cores of {found.cpu}, {found.memory / (1 << 30):.1f} GiB of memory{speed}", markup=False
    )
    console.print(f"CPU features: {', '.join(found.features) or 'none that matter here'}", markup=False)
    for gpu in found.gpus:
        speed = f", {gpu.bandwidth / 1e9:.0f} GB/s" if gpu.bandwidth else ""
        console.print(
            f"{gpu.name}, {gpu.bytes / (1 << 30):.1f} GiB, compute capability {gpu.capability}{speed}", markup=False
        )
    console.print(
        ", ".join(f"{name} {version}" for name, version in found.versions.items() if name != "python"), markup=False
    )
    for ability in found.abilities:
        mark, style = ("✓", "green") if ability.usable else ("·", "dim")
        console.print(
            f"  {mark} {ability.name}" + (f": {ability.missing}" if ability.missing else ""), style=style, markup=False
        )
