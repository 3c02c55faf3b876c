"""What the engine asks of a model, whoever computes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from headstart.core import Batch, DeviceStep, Forward

if TYPE_CHECKING:
    from headstart.models.texts import Texts


class Reader(Protocol):
    """Reads prompts on the device, from what the target computes of them."""

    layers: tuple[int, ...]  # whose hidden states it reads

    def __call__(
        self, hidden: Mapping[int, torch.Tensor], behind: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rows of a forward (T, hidden size), the tokens behind them, where they stand, and their slots; slot -1: this row is
        not to be read."""
        ...


class Runner:
    """`forward(batch)` over a pool of KV slots. What a runner has no use for, it need not write."""

    chooses = False  # whether it chooses tokens itself where a batch says how
    lenient = False  # whether it may then choose among the likeliest tokens where that is not exact: fine for drafts
    max_texts: int | None = None  # of how many finished texts the KV can stay for others to find; None: any number
    most_paths: int | None = None  # that the trees of one forward may have in all; None: any number
    hidden_states = True  # whether a forward can tell them
    num_layers = 0  # of the model, where a forward may end behind some of them: `Batch.layers`; 0: it cannot
    runs_on = False  # whether one call can choose several tokens of one text, one after the other: `Batch.stops`
    reads_unwritten = True  # whether a forward may read slots that nothing was written to
    repeats = False  # whether it can run its last batch once more, every row one token further: `again`
    improvises = False  # whether it makes do with what was prepared, where a step would need something else
    prefers_chains = False  # whether a tree is worth its cost only where a user asks for it

    left: DeviceStep | None = None  # what the last forward left on the device, for runners that choose there
    reader: Reader | None = None  # who reads prompts as a part of the forward that computes them: `Batch.behind`
    usual_slots: int | None = None  # of KV, where nobody says how much memory it may take; None: as many as fit

    device: torch.device  # of the logits
    dtype: torch.dtype
    vocab_size: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of KV that one token takes."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Bytes that are held for the model."""
        raise NotImplementedError

    def allocate(self, num_slots: int, page_size: int = 16, max_rows: int = 512, max_segments: int = 64) -> None:
        """Make room for KV, and for forwards of up to so many rows and requests."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Forward:
        """One forward over packed rows. Logits for `batch.rows`, hidden states for `batch.hidden_layers`."""
        raise NotImplementedError

    def again(self, batch: Batch) -> Forward:
        """The last batch once more, with what the mail says now: every text has gone on by the token that was chosen for it,
        and by what it accepted."""
        raise NotImplementedError

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy slots: accepted tree nodes move up behind their context."""
        raise NotImplementedError

    # -------------------------------------------------------------- what only some need
    def open_texts(self, max_len: int) -> Texts | None:
        """Keep the texts of running requests on the device, so that steps can be launched ahead; None: it cannot."""
        return None

    def keep(self, slots: np.ndarray, length: int) -> None:
        """Of a request's slots, only the first `length` hold something from now on."""

    def freed(self, page: int) -> None:
        """Nobody will read the slots of this page before they are written anew."""

    def at_work(self) -> AbstractContextManager[Any]:
        """Entered for a whole step."""
        return contextlib.nullcontext()

    def needs_bytes(self, max_rows: int) -> int:
        """Memory that forwards of up to so many rows take besides weights and KV, where it is known."""
        return 0

    def prepare(self, drafts: Collection[tuple[int, bool]], taps: tuple[int, ...]) -> list[Callable[[], None]]:
        """What there is to do so that steps with drafts like these (nodes, and whether they branch) need no preparation."""
        return []

    def warm_up(self, nodes: int, trees: bool, taps: tuple[int, ...] = ()) -> None:
        """Prepare for steps of one request, plain and with drafts of so many nodes, that tell these hidden states."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def free_cached(self) -> None:
        """Memory is short: give back what is only kept at hand."""

    def release(self) -> None:
        """Let go of the KV."""
