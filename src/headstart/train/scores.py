"""What held-out text says about a student: agreement with the target, and the tokens per step that a greedy chain would get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from headstart.train.losses import Loss
from headstart.train.packing import Batch, Place
from headstart.train.student import Student
from headstart.train.target import Teacher


@dataclass(frozen=True)
class Scores:
    """Lists are by level: 0 is the first drafted token.

    `estimate` is 1 + the sum of the products of `chained`. `block_efficiency` is tokens per target forward along the texts,
    as the engine counts it: from a rejected token on, the next draft begins. Both are of texts that were written greedily,
    where there are any.
    """

    loss: list[float]
    agreement: list[float]  # the student's first choice == target's first choice, whatever came before
    chained: list[float]  # the same, where all earlier levels were right
    estimate: float
    block_efficiency: float
    places: int  # that were to be foreseen at level 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        def percent(values: list[float]) -> str:
            return " ".join(f"{100 * v:.1f}" for v in values)

        return (
            f"held-out: block efficiency {self.block_efficiency:.3f} (estimate {self.estimate:.3f}), "
            f"agreement % {percent(self.agreement)}, chained % {percent(self.chained)}, loss {self.loss[0]:.3f}"
        )


class Tally:
    """Counts over batches."""

    def __init__(self, levels: int, only_greedy: bool) -> None:
        self.levels, self.only_greedy = levels, only_greedy
        self.rows, self.losses, self.agreed, self.reached, self.hit = (np.zeros(levels) for _ in range(5))
        self.steps = self.written = 0
        self.right = np.zeros((0, 0), dtype=bool)  # (levels, T) of the batch at hand: the chain's token is the text's
        self.alive = np.zeros(0, dtype=bool)  # (T,) rows whose chain was right so far

    def add(self, batch: Batch, level: int, loss: float, agreed: torch.Tensor, right: torch.Tensor) -> None:
        """One level of a batch, of its rows in `batch.levels[level]`."""
        rows = batch.levels[level][0].numpy()
        if level == 0:
            self.right = np.zeros((self.levels, batch.tokens.numel()), dtype=bool)
            self.alive = self._countable(batch)
        self.rows[level] += len(rows)
        self.losses[level] += loss
        self.agreed[level] += agreed.sum().item()
        self.right[level, rows] = right.numpy()
        alive = self.alive[rows]
        self.reached[level] += alive.sum()
        self.hit[level] += right.numpy()[alive].sum()
        self.alive &= self.right[level]

    def _countable(self, batch: Batch) -> np.ndarray:
        """(T,) rows of the texts that chains are counted on."""
        out = np.zeros(batch.tokens.numel(), dtype=bool)
        for p in batch.where:
            out[p.start : p.start + p.length] = p.greedy or not self.only_greedy
        return out

    def walk(self, batch: Batch) -> None:
        """Go along each text as the engine would, after all levels of a batch were added."""
        lengths = np.logical_and.accumulate(self.right, axis=0).sum(
            0
        )  # (T,) tokens of a draft from this row that are right
        for p in batch.where:
            if p.greedy or not self.only_greedy:
                self.steps += _steps(p, lengths)
                self.written += p.length - p.answer

    def scores(self) -> Scores:
        some = np.maximum(self.rows, 1)
        chained = self.hit / np.maximum(self.reached, 1)
        return Scores(
            (self.losses / some).tolist(),
            (self.agreed / some).tolist(),
            chained.tolist(),
            1 + float(np.cumprod(chained).sum()),
            self.written / max(1, self.steps),
            int(self.rows[0]),
        )


def _steps(place: Place, lengths: np.ndarray) -> int:
    """Target forwards that write the answer: the first one reads the prompt and gives one token."""
    steps, have, total = 1, 1, place.length - place.answer
    while have < total:
        have += 1 + int(lengths[place.start + place.answer + have - 2])
        steps += 1
    return steps


@torch.no_grad()
def evaluate(student: Student, teacher: Teacher, groups: Sequence[Batch], loss: Loss, device: torch.device) -> Scores:
    """Losses and agreement by level, and tokens per step of a greedy chain as long as the batches have levels.

    Drafts are read along the text. That is exact for chains: as long as a draft is right, its tokens are those of the text, and
    what it would have said behind a wrong one does not count.
    """
    tally = Tally(len(groups[0].levels), any(p.greedy for batch in groups for p in batch.where))
    for cpu_batch in groups:
        batch = cpu_batch.to(device)
        lesson = teacher.teach(batch)
        for level, state in enumerate(student.states(lesson.features, batch, tally.levels)):
            places = batch.levels[level][1]
            logits = student.logits(level, state).float()
            guess = student.guesses(logits)
            losses = loss(logits.log_softmax(-1), lesson.log_probs[places])
            text = batch.tokens.flatten()[batch.asked[places] + 1]
            tally.add(
                cpu_batch, level, losses.sum().item(), (guess == lesson.best[places]).cpu(), (guess == text).cpu()
            )
        tally.walk(cpu_batch)
    return tally.scores()
