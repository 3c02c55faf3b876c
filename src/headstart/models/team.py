"""Products of two to eight rows on CPUs, by threads that wait for each other in the loop.

A product of one row takes the time of reading its weights, and torch's does. For two rows torch takes twice that, and
oneDNN nearly as much. Read once and used for all rows, the weights cost little more than for one. Each thread has its share
of the outputs. Between the products of one forward the helpers spin, since waking a thread takes as long as a small product;
where others need the cores, they step aside.

The threads are not OpenMP's: a second runtime beside torch's would slow down the products that stay with torch.
"""

from __future__ import annotations

import contextlib
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

OUTPUTS = 4  # of a tile
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


# ------------------------------------------------------------------ tiles
def _tile(rows: int) -> Any:
    """out[r + i, n + j] = x[r + i] · w[n + j] for so many rows i and OUTPUTS outputs j, written out so that all sums stay in
    registers: for two rows and outputs, x0 = x[r], ..., s00 += a0 * b0, ..., out[r, n] = s00."""
    each, outputs = range(rows), range(OUTPUTS)
    pairs = [(i, j) for i in each for j in outputs]
    lines = ["def tile(x, w, out, r, n):"]
    lines += [f"    x{i} = x[r + {i}]" for i in each] + [f"    w{j} = w[n + {j}]" for j in outputs]
    lines += [f"    s{i}{j} = F(0)" for i, j in pairs]
    lines += ["    for k in range(len(x0)):"]
    lines += [f"        a{i} = x{i}[k]" for i in each] + [f"        b{j} = w{j}[k]" for j in outputs]
    lines += [f"        s{i}{j} += a{i} * b{j}" for i, j in pairs]
    lines += [f"    out[r + {i}, n + {j}] = s{i}{j}" for i, j in pairs]
    names: dict[str, Any] = {"F": F}
    exec("\n".join(lines), names)
    return numba.njit(names["tile"], fastmath=FAST, error_model="numpy")


_one, _two, _three, _four = (_tile(rows) for rows in (1, 2, 3, 4))


@numba.njit(error_model="numpy")
def _share(x: Any, w: Any, out: Any, me: Any, count: Any) -> None:
    """The outputs of one thread; a last tile that would reach beyond the end begins before it."""
    outputs, rows = w.shape[0], x.shape[0]
    each = (outputs // OUTPUTS + count - 1) // count * OUTPUTS
    stop = outputs if me == count - 1 else min(outputs, (me + 1) * each)
    for start in range(me * each, stop, OUTPUTS):
        n, r = min(start, outputs - OUTPUTS), 0
        while rows - r >= 4:
            _four(x, w, out, r, n)
            r += 4
        if rows - r == 3:
            _three(x, w, out, r, n)
        elif rows - r == 2:
            _two(x, w, out, r, n)
        elif rows - r == 1:
            _one(x, w, out, r, n)


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

    most_rows = 8

    def __init__(self, count: int) -> None:
        self.count = count
        self._board = np.zeros(DONE + LINE * count, np.int64)
        self._board[STOP] = 1
        self._address = self._board.ctypes.data
        self._wake = [threading.Event() for _ in range(1, count)]
        over = threading.Event()
        for i, wake in enumerate(self._wake, 1):
            how = (self._board, i, count, wake, over)
            threading.Thread(target=_help, args=how, name=f"product-{i}", daemon=True).start()
        weakref.finalize(self, _end, self._wake, over)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Around the products of one forward."""
        self._board[STOP] = 0
        for wake in self._wake:
            wake.set()
        try:
            yield
        finally:
            self._board[STOP] = 1

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x W^T, for x (rows, inputs) and weight (outputs, inputs) in float32, while at work. At least four outputs."""
        (rows, inputs), outputs = x.shape, len(weight)
        x = x if x.is_contiguous() else x.contiguous()
        out = torch.empty(rows, outputs)
        lead(self._address, self.count, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, outputs, inputs)
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
