"""The real engine on a device that is made up: what the host takes, and what a policy makes of it, without a GPU.

Engine, drafters and policy are the real ones, and so is all that the host does for a step but the launches: kernels do nothing,
and graphs only keep the device busy for as long as a machine of the simulator says (`headstart.simulate.machines`). What the
device chooses is made up too: drafts are right as often as a prompt's kind says. The kind of a prompt is its first token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headstart.config import EngineConfig, SpeculativeConfig, parse_speculative
from headstart.core import Batch, DeviceStep, Verdict
from headstart.drafters import WEIGHTLESS, Surroundings
from headstart.engine import Engine
from headstart.models.kernel_runner import KernelRunner
from headstart.models.packing import Shape
from headstart.policy import Errand
from headstart.policy.ahead import AheadPolicy
from headstart.simulate.entrants import Noise, rehearsed
from headstart.simulate.machines import Machine, read_machine

VOCAB, LAYERS, SIZE = 512, (1, 2, 3), 32
WIDER = 1.4  # tries for each token that a tree is worth
# that the next token is right, for some texts of the kind; how often n-grams are found, and right
KINDS: dict[str, dict[str, list[float]]] = {
    "code": {"eagle3": [0.5, 0.56, 0.62], "ngram": [0.05, 0.3]},
    "writing": {"eagle3": [0.3, 0.36, 0.42], "ngram": [0.25, 0.35]},
    "maths": {"eagle3": [0.42, 0.5], "ngram": [0.4, 0.5]},
    "extraction": {"eagle3": [0.3, 0.4], "ngram": [0.6, 0.6]},
    "noise": {"eagle3": [0.03], "ngram": [0.3, 0.0]},
}


@dataclass
class Device:
    """Works on what it is given, one after the other."""

    machine: Machine
    busy_until: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def work(self, seconds: float) -> None:
        self.busy_until = max(time.perf_counter(), self.busy_until) + seconds


@dataclass(frozen=True)
class Event:
    at: float

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        while time.perf_counter() < self.at:
            pass


@dataclass
class Landing:
    """Verdicts that are made up, and told when the device has come so far."""

    device: torch.Tensor
    told: list[Verdict | None]
    ready: Event

    @property
    def has_landed(self) -> bool:
        return self.ready.query()

    def verdicts(self) -> list[Verdict | None]:
        self.ready.synchronize()
        return self.told


class MadeUpRunner(KernelRunner):
    """Packs and sends as the real one, to a device that keeps nothing."""

    def __init__(self, model: Any, made_up: Device) -> None:
        super().__init__(model, fuse=False)
        self.made_up, self.graphs_allowed = made_up, True
        self._known: dict[Any, Any] = {}

    def allocate(self, *args: Any, **kwargs: Any) -> None:
        super().allocate(*args, **kwargs)
        self.graph_rows = 512
        self.logits = torch.empty(512, self.vocab_size)

    def _graph(self, shape: Shape, taps: tuple[int, ...], layers: int | None = None) -> Any:
        key = (shape, taps, layers)
        if key not in self.graphs:
            hidden = {layer: self._tapped(layer)[: shape.rows] for layer in taps}
            left = self._leave(self.block, hidden, fixed=True)
            self.graphs[key] = SimpleNamespace(  # type: ignore[assignment]
                replay=lambda: None, logits=self.logits[: shape.rows], hidden=hidden, left=left
            )
        return self.graphs[key]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        rows, taps = args[1].rows, args[3]
        return torch.empty(rows, self.vocab_size), {layer: torch.empty(rows, SIZE) for layer in taps}

    def _land(self, batch: Batch, shape: Shape) -> Landing | None:
        """A forward was launched: it takes the device so long."""
        machine, rows = self.made_up.machine, len(batch.tokens)
        reach = sum((s.stop - s.start) * s.context for s in batch.segments)
        seconds = machine.costs.of(rows, reach / rows) + machine.around
        if batch.behind is not None and (reading := machine.reading.get("eagle3")) is not None:
            seconds += reading.of(1, int((batch.behind >= 0).sum()))
        self.made_up.work(seconds)
        if batch.choice is None:
            return None
        told = [
            None if n < 0 else self._verdict_of(n, s.seat)
            for n, s in zip(batch.choice.nodes, batch.segments, strict=True)
        ]
        return Landing(self.verdict.view(1, -1), told, Event(self.made_up.busy_until))

    def _verdict_of(self, nodes: int, seat: int) -> Verdict:
        rng = self.made_up.rng
        accepted = 0
        if nodes > 0:
            kind, luck = _kind_of(self.texts.kinds.get(seat, 0))  # type: ignore[union-attr]
            chance, depth = _chance(kind, luck, nodes, rng)
            while accepted < depth and rng.random() < chance:
                accepted += 1
        return Verdict(list(range(accepted)), rng.randrange(16, VOCAB))


def _kind_of(token: int) -> tuple[str, int]:
    names = list(KINDS)
    return names[token % len(names)], token // len(names)


def _chance(kind: str, luck: int, nodes: int, rng: random.Random) -> tuple[float, int]:
    """That the next token is right, and how deep such a draft is: those of n-grams have sizes of their own."""
    own = KINDS[kind]
    if nodes in (3, 6, 7):
        found, right = own["ngram"]
        return (right, nodes) if rng.random() < found else (0.0, nodes)
    chance = own["eagle3"][luck % len(own["eagle3"])]
    return (1 - (1 - chance) ** WIDER, 5) if nodes == 15 else (chance, nodes)


@contextmanager
def no_kernels(costs: str) -> Iterator[Device]:
    """Launches do nothing; heads keep a device with such costs busy."""
    device = Device(read_machine(costs))
    from triton.runtime.jit import JITFunction

    from headstart.models.heads.grower import Grower
    from headstart.models.kernels import ahead
    from headstart.models.texts import Texts

    kept = JITFunction.run, Grower.grow, Texts.read, Texts.sit, Grower.remember
    looks = ahead.lookup

    def grow(self: Grower, step: DeviceStep, texts: Any, numbers: torch.Tensor, count: int) -> torch.Tensor:
        if numbers is not self._asked:
            self.field.numbers[: len(numbers)].copy_(numbers)
            self._asked = numbers
        g = self.growth
        errand = Errand.of("eagle3", [g.depth] * count).wider((g.nodes - g.depth) * count)
        device.work(device.machine.errand(errand, count))
        self.field.mail[:count, 0] = g.nodes
        parents = torch.tensor([i - 1 if i < g.depth else -1 for i in range(g.nodes)])
        self.field.mail[:count, 1 + g.nodes : 1 + 2 * g.nodes] = parents
        return self.field.mail[:count]

    def read(self: Texts, numbers: torch.Tensor) -> Any:
        event, told = Event(device.busy_until), numbers.numpy().copy()

        def wait() -> np.ndarray:
            event.synchronize()
            return told

        return wait

    def sit(self: Texts, sitters: Any) -> list[int]:
        sitters = list(sitters)
        seats = kept[3](self, sitters)
        for seat, sitter in zip(seats, sitters, strict=True):
            self.kinds[seat] = sitter.tokens[0]  # type: ignore[attr-defined]
        return seats

    def lookup(texts: Any, seats: torch.Tensor, shortest: int, longest: int, most: int) -> torch.Tensor:
        return torch.tensor(
            [[most] + [0] * most] * len(seats), dtype=torch.int32
        )  # whether they are right is told later

    JITFunction.run = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    Grower.grow, Texts.read, Texts.sit, Texts.kinds = grow, read, sit, {}  # type: ignore[method-assign, attr-defined]
    Grower.remember = lambda self, hidden, numbers: None  # type: ignore[method-assign]
    ahead.lookup = lookup
    try:
        yield device
    finally:
        JITFunction.run, Grower.grow, Texts.read, Texts.sit, Grower.remember = kept  # type: ignore[method-assign]
        ahead.lookup = looks


def model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=SIZE, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, max_position_embeddings=2048,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def head() -> Any:
    from transformers import LlamaConfig

    from headstart.models.heads import HeadSpec
    from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head

    config = LlamaConfig(
        hidden_size=SIZE, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=32, vocab_size=VOCAB, attn_implementation="eager",
    )  # fmt: skip
    return Eagle3Head(HeadSpec("eagle3", SIZE, VOCAB, VOCAB, LAYERS), config, Eagle3Flags()).eval()


def engine(spec: dict[str, Any], device: Device, most: int) -> Engine:
    """As `LLM` builds it, on that device. What a rehearsal would find is told."""
    config: SpeculativeConfig = parse_speculative(spec)[0]
    runner = MadeUpRunner(model(), device)
    extras = {} if config.method in ("none", *WEIGHTLESS) else {"head": head()}
    around = Surroundings(VOCAB, max_num_seqs=most, max_model_len=2048, takes_mail=True, target=runner, extras=extras)
    options = EngineConfig(max_num_seqs=most, max_batch_tokens=2048, share_prefixes=False)
    out = Engine(runner, options, 2048, 40_000 // 16, config, around)
    if isinstance(out.policy, AheadPolicy):
        rehearsed(out.policy, device.machine, Noise(0.02, 1))
    return out


def prompts(count: int) -> dict[str, list[tuple[list[int], float]]]:
    """Of each kind so many; noise is drawn at a high temperature."""
    names, rng = list(KINDS), random.Random(1)

    def one(k: int, luck: int) -> list[int]:
        return [k + len(names) * luck, *(rng.randrange(16, VOCAB) for _ in range(rng.randint(20, 200)))]

    return {
        name: [(one(k, rng.randrange(3)), 1.5 if name == "noise" else 0.0) for _ in range(count)]
        for k, name in enumerate(names)
    }
