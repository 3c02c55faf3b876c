"""Texts on the device: the tokens of running requests, each in a seat of its own.

The walk appends what it chose, so the device knows a text before the host does; the host writes what it alone knew: the
prompt, and tokens that it chose itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from headstart.core import Sitter
from headstart.models.kernels import ahead
from headstart.models.pinned import Ring
from headstart.noise import words

SPARE = 256  # numbers behind the longest text, for steps that run on behind its end


class Texts:
    def __init__(self, seats: int, max_len: int, device: torch.device) -> None:
        self.width = max_len + SPARE
        self.tokens = torch.zeros(seats, self.width, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(seats, dtype=torch.int32, device=device)
        self.heats = torch.zeros(seats, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(2, seats, dtype=torch.int32, device=device)
        self._seats: OrderedDict[str, int] = OrderedDict()  # request -> seat, the longest unused first
        self._known: dict[str, int] = {}  # request -> tokens that the device has, or will have when it is done
        self._free = list(range(seats))
        self._out, self._back = Ring(64, 1 << 10, device), Ring(64, 1 << 10, device)
        self._together = Ring(4, 1 << 16, device)  # for many texts at once
        self._asked: tuple[tuple[int, ...], torch.Tensor] = (), torch.empty(0)

    def find(self, request_id: str) -> int:
        """The seat of this request; -1: it has none."""
        return self._seats.get(request_id, -1)

    def sit(self, sitters: Iterable[Sitter]) -> list[int]:
        """Seats with these texts in them; no more than there are seats."""
        seats, new = [], []
        for sitter in sitters:
            seat = self._seat(sitter.id)
            seats.append(seat)
            known, length = self._known[sitter.id], len(sitter.tokens)
            if known != length:
                new.append((seat, known if known < length else 0, sitter))
                self._known[sitter.id] = length
        if new:
            self._write(new)
        return seats

    def _seat(self, request_id: str) -> int:
        if request_id not in self._seats:
            if not self._free:
                self.leave(next(iter(self._seats)))
            self._seats[request_id] = self._free.pop()
            self._known[request_id] = 0
        self._seats.move_to_end(request_id)
        return self._seats[request_id]

    def _write(self, texts: Sequence[tuple[int, int, Sitter]]) -> None:
        """To a seat, from a token on, what is new of each: in one copy and one launch, since the host has little time while a
        step runs."""
        header, count = ahead.HEADER.value, len(texts)
        sizes = [len(sitter.tokens) - known for _, known, sitter in texts]
        size = sum(sizes) + count * (1 + header)
        ring = self._out if count == 1 else self._together
        host, array = ring.take(size)
        at = count
        for i, ((seat, known, sitter), new) in enumerate(zip(texts, sizes, strict=True)):
            array[i] = at
            own = array[at : at + header + new]
            own[:4] = seat, known, new, len(sitter.tokens)
            own[4:5].view(np.float32)[0] = sitter.temperature
            own[5:header].view(np.uint32)[:] = words(sitter.seed)
            own[header:] = sitter.tokens[known:]
            at += header + new
        told = host[:size].to(self.lengths.device, non_blocking=True, copy=True)
        ring.mark()
        ahead.sit(self, told, count, max(sizes))

    def grew(self, request_id: str, length: int) -> None:
        """A walk on the device has appended: the text has so many tokens now."""
        if request_id in self._known:
            self._known[request_id] = length

    def leave(self, request_id: str) -> None:
        """The seat is free."""
        if (seat := self._seats.pop(request_id, None)) is not None:
            self._free.append(seat)
            del self._known[request_id]

    def on_device(self, seats: Sequence[int]) -> torch.Tensor:
        """(B,) int32; the same seats are mostly asked for again."""
        key = tuple(seats)
        if key != self._asked[0]:
            host, array = self._out.take(len(key))
            array[: len(key)] = key
            self._asked = key, host[: len(key)].to(self.lengths.device, non_blocking=True, copy=True)
            self._out.mark()
        return self._asked[1]

    def read(self, numbers: torch.Tensor) -> Callable[[], np.ndarray]:
        """Bring numbers to the host; the answer waits for them."""
        host, array = self._back.take(numbers.numel())
        host[: numbers.numel()].copy_(numbers.view(-1), non_blocking=True)
        ready = self._back.mark()

        def wait() -> np.ndarray:
            if ready is not None:
                ready.synchronize()
            return array[: numbers.numel()].reshape(numbers.shape)

        return wait
