"""Ways to draft: one file each, one contract, a registry of names. Nothing here knows the engine, or another drafter.

A drafter of your own is a class with `propose`; register it by name, or name it by dotted path:

    @register("echo")
    class Echo(Drafter):
        def propose(self, view):
            return Draft.chains([r.tokens[-r.budget:] for r in view.requests])
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headstart.config import AUTO, HEADS, SpeculativeConfig
from headstart.core import Draft, Reading, RequestView, Tree, Verdict, View
from headstart.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

    from headstart.models.base import Reader, Runner


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the engine besides tokens."""

    hidden_layers: tuple[int, ...] = ()  # of the target, as transformers counts them; handed to `read`
    own_kv: bool = False
    target_kv: bool = False  # it runs the target's own layers, on the slots of its requests


@dataclass
class Surroundings:
    """What a drafter may be built from: the target's vocabulary and tokenizer, and how large the engine runs."""

    vocab_size: int
    tokenizer: Any = None
    device: str = "auto"
    max_model_len: int = 1 << 20
    max_num_seqs: int = 32
    kv_memory: int | None = None
    page_size: int = 16
    fuse: bool = True  # whether a model of its own may take the lean forward
    kernels: bool = True  # and run through the GPU kernels
    hidden_states: bool = True  # whether the target's runner has them
    takes_mail: bool = False  # the target reads draft tokens from this device, so that nobody needs to wait for them
    target: Runner | None = None  # who runs the target, for a drafter that drafts with its layers
    extras: dict[str, Any] = field(default_factory=dict)  # "draft_model": a loaded one


class Drafter:
    """The contract. Only `propose` must be written."""

    needs = Needs()
    ahead = False  # whether it can draft from texts on the target's device, before the host knows their last tokens
    repeats = False  # whether it can be asked there once more, with the same view, for texts that have gone on: `again`
    reads_ahead = False  # whether it can read prompts there, before the step that computes them is over,
    reader: Reader | None = None  # and what does so as a part of the forward; None: nothing need be done

    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        self.config, self.around = config, around

    def propose(self, view: View) -> Draft:
        """One tree for each request of the view, within its budget; an empty tree is a fine answer."""
        raise NotImplementedError

    def again(self, view: View) -> Draft:
        """The same question as the last one. What the device keeps has changed; nothing else of the view is to be looked at."""
        return self.propose(view)

    def observe(self, view: View, trees: list[Tree], verdicts: list[Verdict]) -> None:
        """What became of the drafts of this view. The requests' tokens already include the verdict's."""

    def read(self, readings: Sequence[Reading], hidden: Mapping[int, torch.Tensor] | None) -> None:
        """What the target computed in this step, with the hidden states that `needs` asks for; valid during this call. None:
        the next step is on its way, and what was drafted for it on the device came from these."""

    def rest(self, request: str) -> int:
        """It need not read on. Returns how far it has read without a gap."""
        return 0

    def join(self, request: str, position: int) -> None:
        """It is to read this request's text from this token on. What it had read before is still there."""

    def read_ahead(self, readings: Sequence[Reading]) -> None:
        """The target's forward that comes next computes these rows of prompts, and its `reader` reads them: the token behind
        each of them is known."""

    def allocate(self, num_slots: int) -> None:
        """The target's KV has so many slots."""

    def release(self, request: RequestView) -> None:
        """The request is over: forget it. Its tokens are final."""

    def forget(self) -> None:
        """What it knows from requests that are over, if anything."""

    def describe(self) -> str:
        """One line for people."""
        return self.config.method

    def close(self) -> None:
        """The engine stops."""


Factory = Callable[[SpeculativeConfig, Surroundings], Drafter]
_factories: dict[str, Factory] = {}
BUILT_IN = {"ngram": "ngram:NgramDrafter", "suffix": "suffix:SuffixDrafter", "draft_model": "model:ModelDrafter"}
BUILT_IN |= dict.fromkeys(HEADS, "heads:HeadDrafter") | {"early_exit": "early_exit:EarlyExitDrafter"}
WEIGHTLESS = ("ngram", "suffix")  # a request may ask for these at any time


def register(name: str) -> Callable[[Factory], Factory]:
    """Make a drafter known by name: `speculative={"method": name}`."""

    def keep(factory: Factory) -> Factory:
        _factories[name] = factory
        return factory

    return keep


def build(config: SpeculativeConfig, around: Surroundings) -> Drafter | None:
    """The drafter that this config names; None for `none`."""
    if config.method == "none":
        return None
    drafter = find(config)(config, around)
    if drafter.needs.hidden_layers and not around.hidden_states:
        raise ConfigError(
            f"{config.method!r} needs hidden states of the target, which this runner has not: use runner='torch'."
        )
    return drafter


def find(config: SpeculativeConfig) -> Factory:
    name = config.method
    if name == "custom":
        name = config.model or ""
        if "." not in name:
            raise ConfigError("method 'custom' needs model='package.module.Class', the drafter's dotted path.")
    if name in _factories:
        return _factories[name]
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    if "." in name:
        return _dotted(name)
    raise ConfigError(f"Unknown drafting method {name!r}.{nearest(name, ['none', AUTO, *BUILT_IN, *_factories])}")


def _dotted(name: str) -> Factory:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"The drafter {name!r} cannot be imported: {error}.") from error
    except AttributeError as error:
        raise ConfigError(f"The module {module!r} has no drafter {attribute!r}.") from error
