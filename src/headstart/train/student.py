"""What learns: one contract for all kinds of drafters, so that data, steps, held-out looks and checkpoints are said once.

A kind says how its student is made (the `begin` of its options), what it computes from a batch (`states` and `logits`), and how
it is written (`save`). Level k of row t is the token that a draft from there has at place k: the one behind row t + 1 + k.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from headstart.models.heads import Head
from headstart.models.load import Loaded
from headstart.train.chains import Chains
from headstart.train.packing import Batch


class Student:
    """A module in training, and what the pipeline has to know of it."""

    title: str  # for people
    method: str  # as the engine calls it
    format: str  # who reads the result
    recompute = False  # logits are computed again on the way back instead of being kept, since a level of them is large

    def __init__(
        self,
        module: torch.nn.Module,
        vocab: int,
        taps: tuple[int, ...] = (),
        targets: torch.Tensor | None = None,
        levels: int = 1,
        decay: float = 1.0,
        noise: float = 0.0,
        depth: int | None = None,
    ) -> None:
        self.module = module
        self.vocab = vocab  # tokens that it can say
        self.taps = taps  # of the target's hidden states: the features that it reads
        self.targets = targets  # (vocab,) the target's token for each of its own; None: the same
        self.levels = levels  # that are trained
        self.decay = decay  # of the weight of a level's loss, to the next level
        self.noise = noise  # on features while it learns, in parts of their deviation
        self.depth = depth  # tokens of its longest draft; None: any number

    @property
    def drafter(self) -> Head | Loaded:
        """As the engine takes it; its weights are those in training."""
        raise NotImplementedError

    def states(self, features: torch.Tensor, batch: Batch, levels: int) -> Iterator[torch.Tensor]:
        """(R, S) for each level: what logits are made of, at the rows that count (`batch.levels`)."""
        raise NotImplementedError

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        """(R, vocab)."""
        raise NotImplementedError

    def activations(self, batch: int, length: int) -> int:
        """Bytes that a step keeps for the way back, without logits."""
        raise NotImplementedError

    def save(self, folder: Path, target_name: str) -> None:
        raise NotImplementedError

    def chain(self, asked: int) -> int:
        """Tokens of a chain: as many as asked, or as it can draft."""
        return asked if self.depth is None else min(asked, self.depth)

    def guesses(self, logits: torch.Tensor) -> torch.Tensor:
        """(R,) first choices, as the target's tokens."""
        best = logits.argmax(-1)
        return best if self.targets is None else self.targets[best]


class HeadStudent(Student):
    """Any head: at level 0 it reads the target's features, at level k its own state of level k - 1, and always the text."""

    module: Head

    def __init__(self, head: Head, levels: int, decay: float, noise: float) -> None:
        spec = head.spec
        super().__init__(head, spec.draft_vocab_size, spec.taps, head.targets, levels, decay, noise, spec.max_depth)

    @property
    def drafter(self) -> Head:
        return self.module

    def rows(self, features: torch.Tensor, batch: Batch, levels: int) -> Iterator[torch.Tensor]:
        """(T, S) states of all rows by level: that of row t at level k has read the tokens up to t + 1 + k."""
        head, positions = self.module, batch.positions.flatten()
        context = Chains(batch.docs) if head.shapes else None
        state = head.begin(features.to(next(head.parameters()).dtype))
        for level in range(levels):
            state = head.advance(level, state, batch.tokens_after(level + 1), positions + level, context)
            yield state

    def states(self, features: torch.Tensor, batch: Batch, levels: int) -> Iterator[torch.Tensor]:
        for level, state in enumerate(self.rows(features, batch, levels)):
            yield state.index_select(0, batch.levels[level][0])

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return self.module.logits(level, state)


def place(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move to a device, weights in a dtype; buffers such as the angles of positions stay as they are."""
    for p in module.parameters():
        p.data = p.data.to(dtype)
    module.to(device)
