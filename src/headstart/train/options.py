"""The options that all kinds of training share. Each kind adds its own, and says how its student begins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from headstart.errors import BadInput, ConfigError
from headstart.models.builtin import hub_id
from headstart.models.load import Loaded
from headstart.train import board, losses
from headstart.train.optimizer import check_schedule
from headstart.train.packing import Document
from headstart.train.student import Student

# Options that may change between a run and its continuation
FREE = {
    "out",
    "name",
    "embeddings",
    "lean",
    "dialect",
    "prompts",
    "answers",
    "more_prompts",
    "answer_batch",
    "minutes",
    "steps",
    "eval_every",
    "eval_batches",
    "trial_every",
    "trial_prompts",
    "trial_tokens",
    "patience",
    "min_gain",
    "tensorboard",
    "save_seconds",
}
WARMUP = 100  # steps, or a tenth of a run that is known to be short


@dataclass(frozen=True)
class Options:
    """Everything about a run. A folder that has a checkpoint goes on from there, with the same options."""

    kind: ClassVar[str]  # as in `headstart train KIND`
    least: ClassVar[dict[str, int]] = {
        "length": 16,
        "batch": 1,
        "samples": 1,
        "more_prompts": 0,
        "max_tokens": 2,
        "answer_batch": 1,
        "warmup": 0,
        "eval_every": 1,
        "eval_depth": 1,
        "trial_every": 0,
        "trial_prompts": 1,
        "trial_tokens": 8,
        "patience": 0,
        "min_gain": 0,
    }

    target: str
    out: str
    prompts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()  # files of answers that were written before; with these, no prompts are needed
    name: str | None = None  # of the target in what is written, where `target` is a folder
    # answers
    more_prompts: int = 0  # that the target writes itself, after the example of the others
    max_tokens: int = 512
    samples: int = 1  # answers to each prompt
    answer_batch: int = 256  # requests at a time
    # training
    loss: str = "kl"
    rate: float | None = None  # None: by the width of the student
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup: int | None = None  # steps until the rate is at its highest; None: 100, or a tenth of the steps if fewer
    schedule: str = "cosine"
    length: int = 1024  # tokens of a packed sequence
    batch: int = 8  # sequences of a step
    minutes: float | None = 10.0
    steps: int | None = None
    held_out: float = 0.02
    eval_every: int = 500
    eval_batches: int = 24
    eval_depth: int = 5  # tokens of a chain on held-out text and in the engine; a drafter that is less deep has its own
    trial_every: int | None = None  # looks from one trial in the engine to the next; 0: none, None: a tenth of the time
    trial_prompts: int = 16
    trial_tokens: int = 128  # at most, of each answer
    patience: int = 5  # measurements without a gain that end a run; 0: none do
    min_gain: float = 0.01  # tokens per target forward
    tensorboard: bool | None = None  # None: where it is installed
    save_seconds: float = 120.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def begin(self, target: Loaded, docs: Sequence[Document]) -> Student:
        """A student that has learned nothing yet. `docs` are what it will learn from."""
        raise NotImplementedError

    def target_name(self, target: Loaded) -> str:
        """For what is written: as given, or as everybody knows it."""
        return self.name or hub_id(target.name)

    def default_rate(self, hidden_size: int) -> float:
        """Wide students need smaller steps: 1e-3 at a width of 576, 1.5e-4 at 4096."""
        return min(1e-3, 0.6 / hidden_size)

    def warmup_steps(self) -> int:
        if self.warmup is not None:
            return self.warmup
        return WARMUP if self.steps is None else min(WARMUP, self.steps // 10)

    def check(self) -> None:
        """Say what cannot be before anything is loaded."""
        losses.find(self.loss)
        check_schedule(self.schedule)
        if not self.prompts and not self.answers:
            raise BadInput("Neither prompts nor answers were given: there is nothing to train on.")
        if self.more_prompts and not self.prompts:
            raise BadInput("More prompts are written after the example of others: give a file of prompts too.")
        if self.minutes is None and self.steps is None:
            raise ConfigError("A run needs an end: give minutes or steps.")
        board.check(self.tensorboard)
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"held_out={self.held_out} is not usable: expected a share from 0 to below 1.")
        for name, low in self.least.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise ConfigError(f"{name}={value} is not usable: expected at least {low}.")
        for name in ("rate", "minutes", "steps"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name}={value} is not usable: expected more than 0.")

    def check_target(self) -> None:
        """Say what does not fit this target, before it has written a word."""

    def fingerprint(self) -> str:
        """What has to be the same for a checkpoint to go on."""
        return json.dumps({k: v for k, v in asdict(self).items() if k not in FREE}, sort_keys=True)


@dataclass(frozen=True)
class HeadOptions(Options):
    """Of heads that draft several levels from one state of the target."""

    least = Options.least | {"levels": 1}

    levels: int = 5
    decay: float = 0.8  # of the weight of a level's loss, to the next level
    noise: float = 0.0  # on the target's features, in parts of their deviation

    def check(self) -> None:
        super().check()
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay} is not usable: expected more than 0 and at most 1.")
