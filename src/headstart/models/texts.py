"""Texts on the device: the tokens of running requests, each in a seat of its own.

The walk appends what it chose, so the device knows a text before the host does; the host writes what it alone knew: the
prompt, and tokens that it chose itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch

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
        self._asked: tuple[tuple[int, ...], torch.Tensor] = (), torch.empty(0)

    def find(self, request_id: str) -> int:
        """The seat of this request; -1: it has none."""
        return self._seats.get(request_id, -1)

    def sit(self, request_id: str, tokens: Sequence[int], temperature: float = 0.0, seed: int = 0) -> int:
        """A seat with these tokens in it, for a text that is sampled so."""
        if request_id not in self._seats:
            if not self._free:
                self.leave(next(iter(self._seats)))
            self._seats[request_id] = self._free.pop()
            self._known[request_id] = 0
        self._seats.move_to_end(request_id)
        seat, known = self._seats[request_id], self._known[request_id]
        if known != len(tokens):
            self._write(seat, known if known < len(tokens) else 0, tokens, temperature, seed)
            self._known[request_id] = len(tokens)
        return seat

    def _write(self, seat: int, known: int, tokens: Sequence[int], temperature: float, seed: int) -> None:
        """In one copy and one launch: the host has little time while a step runs."""
        new, header = len(tokens) - known, ahead.HEADER.value
        host, array = self._out.take(header + new)
        array[:4] = seat, known, new, len(tokens)
        array[4:5].view(np.float32)[0] = temperature
        array[5:header].view(np.uint32)[:] = words(seed)
        array[header : header + new] = tokens[known:]
        told = host[: header + new].to(self.lengths.device, non_blocking=True, copy=True)
        self._out.mark()
        ahead.sit(self, told, new)

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
