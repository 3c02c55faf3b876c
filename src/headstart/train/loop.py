"""The steps of a run: until the time or the steps are over or nothing is gained any more. On the way it looks at held-out text,
tries the drafter in the engine, and keeps checkpoints."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headstart.progress import note
from headstart.train import checkpoints, stopping
from headstart.train.board import Log, open_board
from headstart.train.optimizer import Optimizer, rate_scale
from headstart.train.packing import Batch
from headstart.train.scores import Scores
from headstart.train.trial import SHARE, Trials


@dataclass(frozen=True)
class Limits:
    """When a run ends, and what it does how often."""

    steps: int | None = None
    minutes: float | None = None
    warmup: int = 100
    schedule: str = "cosine"
    eval_every: int = 200
    trial_every: int | None = None  # looks from one trial to the next; 0: none, None: as their share of time allows
    patience: int = 0  # measurements without a gain that end a run; 0: none do
    gain: float = 0.0  # tokens per target forward
    log_every: int = 20
    save_seconds: float = 120.0


@dataclass
class Progress:
    """Where a run stands; all of it is in a checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    trial_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def share(self, limits: Limits) -> float:
        """How much of the run is over, from 0 to 1."""
        by_step = self.step / limits.steps if limits.steps else 0.0
        by_time = self.seconds / (60 * limits.minutes) if limits.minutes else 0.0
        return min(1.0, max(by_step, by_time))

    def over(self, limits: Limits) -> bool:
        return self.share(limits) >= 1 or self.flat(limits)

    def flat(self, limits: Limits) -> bool:
        return stopping.flat(self.history, limits.patience, limits.gain)

    def trial_due(self, limits: Limits) -> bool:
        """At the look that is being made."""
        if limits.trial_every is not None:
            return limits.trial_every > 0 and (len(self.history) + 1) % limits.trial_every == 0
        done = sum("engine" in look for look in self.history)
        return self.trial_seconds + self.trial_seconds / max(1, done) <= SHARE * self.seconds


class Loop:
    """Takes steps. `losses(batch)` gives the loss of each level, `weights` adds them up, `look()` scores held-out text, and
    `trials` score the drafter in the engine."""

    def __init__(
        self,
        optimizer: Optimizer,
        losses: Callable[[Batch], torch.Tensor],
        weights: torch.Tensor,
        look: Callable[[], Scores] | None,
        limits: Limits,
        folder: Path,
        fingerprint: str,
        trials: Trials | None = None,
        tensorboard: bool | None = None,
    ) -> None:
        self.optimizer, self.losses, self.weights, self.look = optimizer, losses, weights, look
        self.limits, self.folder, self.fingerprint = limits, folder, fingerprint
        self.trials, self.tensorboard = trials, tensorboard
        self.progress = Progress()
        self.logger: Log = lambda step, values: None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def best(self) -> Path:
        return self.folder / "best.pt"

    def run(self, batches: Callable[[int], Iterator[Batch]], device: torch.device) -> bool:
        """Go on to the end; `batches(step)` begins at a step. False where someone stopped the run before."""
        source = batches(self.progress.step)
        self.logger = open_board(self.folder, self.tensorboard, self.progress.step)
        began, saved = time.monotonic() - self.progress.seconds, time.monotonic()
        mark = (time.monotonic(), self.progress.tokens)
        with stop_requests() as stopped:
            while not self.progress.over(self.limits) and not stopped():
                levels = self._step(next(source).to(device))
                self.progress.seconds = time.monotonic() - began
                if self.progress.step % self.limits.log_every == 0:
                    mark = self._log(levels, mark)
                if self.progress.step % self.limits.eval_every == 0:
                    self._evaluate()
                if time.monotonic() - saved > self.limits.save_seconds:
                    self.save()
                    saved = time.monotonic()
            ended = self.progress.over(self.limits)
        if ended and (not self.progress.history or self.progress.history[-1]["step"] != self.progress.step):
            self._evaluate()
        if self.progress.flat(self.limits):
            self._say_flat()
        self.save()
        return ended

    def _step(self, batch: Batch) -> torch.Tensor:
        scale = rate_scale(
            self.limits.schedule, self.progress.step, self.limits.warmup, self.progress.share(self.limits)
        )
        levels = self.losses(batch)
        (levels * self.weights).sum().backward()
        self.optimizer.step(scale)
        self.progress.step += 1
        self.progress.tokens += sum(p.length for p in batch.where)
        return levels.detach()

    def _log(self, levels: torch.Tensor, mark: tuple[float, int]) -> tuple[float, int]:
        """A line for people; the loss of each level, and tokens per second since the mark. Returns the next mark."""
        values, now, p = levels.tolist(), time.monotonic(), self.progress
        speed = (p.tokens - mark[1]) / max(1e-9, now - mark[0])
        losses = " ".join(f"{v:.3f}" for v in values)
        note(f"step {p.step} ({100 * p.share(self.limits):.0f}%): loss {losses}, {speed:,.0f} tokens/s")
        self.logger(p.step, {f"loss/{i}": v for i, v in enumerate(values)} | {"tokens_per_second": speed})
        return now, p.tokens

    def _evaluate(self) -> None:
        if self.look is None:
            return
        scores, p = self.look(), self.progress
        note(f"step {p.step}, {scores.line()}")
        self.logger(p.step, _curves("held_out", scores.block_efficiency, "agreement", scores.agreement))
        look = {"step": p.step, "tokens": p.tokens, "seconds": round(p.seconds, 1)} | scores.to_dict()
        p.history.append(look | (self._try() if p.trial_due(self.limits) else {}))
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(p.history[-1]) + "\n")
        if scores.block_efficiency > p.best:
            p.best = scores.block_efficiency
            checkpoints.save(self.best, {"masters": self.optimizer.state()["masters"], "scores": p.history[-1]})

    def _try(self) -> dict[str, Any]:
        """What the engine says of the drafter as it is, for the history."""
        outcome, p = self.trials.run() if self.trials else None, self.progress
        if outcome is None:
            return {}
        note(f"step {p.step}, {outcome.line()}")
        curves = _curves("engine", outcome.block_efficiency, "acceptance", outcome.acceptance)
        self.logger(p.step, curves | {"engine/speedup": outcome.speedup})
        p.trial_seconds += outcome.seconds
        return {"engine": outcome.to_dict()}

    def try_best(self) -> None:
        """A trial of what is exported, unless there was one: the drafter has the best weights now."""
        best = stopping.best_look(self.progress.history)
        if best is not None and "engine" not in best and self.limits.trial_every != 0:
            best.update(self._try())

    def _say_flat(self) -> None:
        values, limits = stopping.measured(self.progress.history), self.limits
        note(
            f"Stopped at step {self.progress.step}: the last {limits.patience} measurements brought less than {limits.gain:g} "
            f"to a block efficiency of {max(values[: -limits.patience]):.3f}."
        )

    def save(self) -> None:
        state = {"progress": vars(self.progress), "random": checkpoints.random_state(), "options": self.fingerprint}
        checkpoints.save(self.checkpoint, self.optimizer.state() | state)

    def resume(self) -> None:
        """Stand where the last checkpoint was written, if there is one."""
        if not self.checkpoint.exists():
            return
        kept = checkpoints.load(self.checkpoint)
        checkpoints.check_same(self.checkpoint, kept["options"], self.fingerprint)
        self.optimizer.restore(kept)
        self.progress = Progress(**kept["progress"])
        checkpoints.restore_random_state(kept["random"])
        note(f"Going on at step {self.progress.step}, after {self.progress.seconds / 60:.1f} minutes of training.")


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end a run after the step at hand; a second Ctrl-C ends it at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def hear(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        note("Stopping after this step; a checkpoint is written.")

    old = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _curves(group: str, block_efficiency: float, name: str, values: list[float]) -> dict[str, float]:
    return {f"{group}/block_efficiency": block_efficiency} | {f"{group}/{name}/{i}": v for i, v in enumerate(values)}
