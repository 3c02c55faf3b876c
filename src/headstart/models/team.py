"""Products of a few rows on CPUs, by threads that wait for each other in the loop.

Such a product takes the time of reading its weights; what is computed with them in between is nearly free. torch's take twice
as long for two rows as for one. Here weights are read once, in the order in which they lie, and used for all rows; each thread
has its share of the outputs. Between the products of one forward the helpers spin, since waking a thread takes as long as a
small product; where others need the cores, they step aside.

The threads are not OpenMP's: a second runtime beside torch's would slow down the products that stay with torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headstart.models.loops import FAST, F

ROWS = 4  # that share one reading of the weights
SPINS = 2000  # looks before a waiting thread steps aside
LINE = 16  # numbers in a cache line, or two
GENERATION, STOP, TASK, DONE = (
    0,
    LINE,
    2 * LINE,
    3 * LINE,
)  # places in the board: which task it is, what it is, who is done


# ------------------------------------------------------------------ memory that threads share
@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _look(typing: Any, address: Any) -> Any:
    """The number at this address; what its writer wrote before can be seen afterwards."""
    from llvmlite import ir

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _tell(typing: Any, address: Any, value: Any) -> Any:
    """Write a number; whoever sees it sees what was written before."""
    from llvmlite import ir

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_step_aside = types.ExternalFunction("sched_yield", types.int32())


# ------------------------------------------------------------------ one row of weights, with one to four rows of x
@numba.njit(fastmath=FAST, error_model="numpy")
def _one(x: Any, w: Any, out: Any, n: Any) -> None:
    a, row, s = x[0], w[n], F(0)
    for k in range(len(row)):
        s += a[k] * row[k]
    out[0, n] = s


@numba.njit(fastmath=FAST, error_model="numpy")
def _two(x: Any, w: Any, out: Any, n: Any) -> None:
    a, b, row = x[0], x[1], w[n]
    s, t = F(0), F(0)
    for k in range(len(row)):
        s += a[k] * row[k]
        t += b[k] * row[k]
    out[0, n], out[1, n] = s, t


@numba.njit(fastmath=FAST, error_model="numpy")
def _three(x: Any, w: Any, out: Any, n: Any) -> None:
    a, b, c, row = x[0], x[1], x[2], w[n]
    s, t, u = F(0), F(0), F(0)
    for k in range(len(row)):
        s += a[k] * row[k]
        t += b[k] * row[k]
        u += c[k] * row[k]
    out[0, n], out[1, n], out[2, n] = s, t, u


@numba.njit(fastmath=FAST, error_model="numpy")
def _four(x: Any, w: Any, out: Any, n: Any) -> None:
    a, b, c, d, row = x[0], x[1], x[2], x[3], w[n]
    s, t, u, v = F(0), F(0), F(0), F(0)
    for k in range(len(row)):
        s += a[k] * row[k]
        t += b[k] * row[k]
        u += c[k] * row[k]
        v += d[k] * row[k]
    out[0, n], out[1, n], out[2, n], out[3, n] = s, t, u, v


@numba.njit(error_model="numpy")
def _share(x: Any, w: Any, out: Any, me: Any, count: Any) -> None:
    """The outputs of one thread. Weights are read once, in the order in which they lie: the memory is fastest then."""
    rows, outputs = x.shape[0], w.shape[0]
    for n in range(me * outputs // count, (me + 1) * outputs // count):
        if rows == 1:
            _one(x, w, out, n)
        elif rows == 2:
            _two(x, w, out, n)
        elif rows == 3:
            _three(x, w, out, n)
        else:
            _four(x, w, out, n)


@numba.njit(error_model="numpy")
def _do(task: Any, me: Any, count: Any) -> None:
    rows, outputs, inputs = task[3], task[4], task[5]
    x = numba.carray(_pointer(task[0]), (rows, inputs), np.float32)  # type: ignore[call-arg]
    w = numba.carray(_pointer(task[1]), (outputs, inputs), np.float32)
    out = numba.carray(_pointer(task[2]), (rows, outputs), np.float32)
    _share(x, w, out, me, count)


# ------------------------------------------------------------------ threads
@numba.njit(["void(i8, i8, i8)"], cache=True, nogil=True, error_model="numpy")
def help_out(board: Any, me: Any, count: Any) -> None:
    """Do this helper's share of each task, until the forward is over."""
    task = numba.carray(_pointer(board), (DONE,), np.int64)[TASK:]  # type: ignore[call-arg]
    mine = board + 8 * (DONE + LINE * me)
    seen, spins = _look(mine), 0
    while True:
        now = _look(board + 8 * GENERATION)
        if now != seen:
            _do(task, me, count)
            _tell(mine, now)
            seen, spins = now, 0
        elif _look(board + 8 * STOP) != 0:
            return
        else:
            spins += 1
            if spins > SPINS:
                _step_aside()
                spins = 0


@numba.njit(["void(i8, i8, i8, i8, i8, i8, i8, i8)"], cache=True, nogil=True, error_model="numpy")
def lead(board: Any, count: Any, x: Any, w: Any, out: Any, rows: Any, outputs: Any, inputs: Any) -> None:
    """One product: the leader's own share, and the end of all others."""
    task = numba.carray(_pointer(board), (DONE,), np.int64)[TASK:]  # type: ignore[call-arg]
    task[0], task[1], task[2], task[3], task[4], task[5] = x, w, out, rows, outputs, inputs
    now = _look(board + 8 * GENERATION) + 1
    _tell(board + 8 * GENERATION, now)
    _do(task, 0, count)
    for other in range(1, count):
        spins = 0
        while _look(board + 8 * (DONE + LINE * other)) != now:
            spins += 1
            if spins > SPINS:
                _step_aside()
                spins = 0


class Team:
    """So many threads, the caller's among them. Between forwards the helpers sleep; they end with the team."""

    most_rows = 2 * ROWS  # weights are read twice then; who has it measures whether torch's product takes less time

    def __init__(self, count: int) -> None:
        self.count, self.working = count, False
        self._board = np.zeros(DONE + LINE * count, np.int64)
        self._board[STOP] = 1
        self._address = self._board.ctypes.data
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._wake = [threading.Event() for _ in range(1, self.count)]
        over = threading.Event()
        for i, wake in enumerate(self._wake, 1):
            how = (self._board, i, self.count, wake, over)
            threading.Thread(target=_help, args=how, name=f"product-{i}", daemon=True).start()
        weakref.finalize(self, _end, self._wake, over).atexit = False  # an engine may still compute then

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Around the products of one forward."""
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._start()
        self._board[STOP] = 0
        for wake in self._wake:
            wake.set()
        self.working = True
        try:
            yield
        finally:
            self.working = False
            self._board[STOP] = 1

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x W^T, for x (rows, inputs) and weight (outputs, inputs) in float32, while at work."""
        (rows, inputs), outputs = x.shape, weight.shape[0]
        x = x if x.is_contiguous() else x.contiguous()
        out = torch.empty(rows, outputs, dtype=torch.float32, device="cpu")
        for r in range(0, rows, ROWS):
            own, where = x.data_ptr() + 4 * r * inputs, out.data_ptr() + 4 * r * outputs
            lead(self._address, self.count, own, weight.data_ptr(), where, min(ROWS, rows - r), outputs, inputs)
        return out


def _help(board: np.ndarray, me: int, count: int, wake: threading.Event, over: threading.Event) -> None:
    while True:
        wake.wait()
        wake.clear()
        if over.is_set():
            return
        help_out(board.ctypes.data, me, count)


def _end(wakes: list[threading.Event], over: threading.Event) -> None:
    over.set()
    for wake in wakes:
        wake.set()
