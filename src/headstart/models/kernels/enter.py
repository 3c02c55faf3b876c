"""The way into an EAGLE-3 layer: a token's embedding and a state, each normed, side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.models.kernels.launch import early_launch
from headstart.models.kernels.products import MOST_SQUARES, Stream


@triton.jit
def _rms(x, gain, col, K, eps):
    scale = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    return x * scale * tl.load(gain + col, mask=col < K, other=0.0).to(tl.float32)


@triton.jit
def _enter(
    tokens, table, states, parents, token_gain, state_gain, last_gain, both, rest, squares, K, eps,
    GATHER: tl.constexpr, NORMED: tl.constexpr, REST: tl.constexpr, MOST: tl.constexpr, PK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, PK)
    token = tl.load(tokens + row).to(tl.int64)
    source = row
    if GATHER:
        source = tl.load(parents + row).to(tl.int64)
    embedded = tl.load(table + token * K + col, mask=col < K, other=0.0).to(tl.float32)
    state = tl.load(states + source * K + col, mask=col < K, other=0.0).to(tl.float32)
    if NORMED:
        state = _rms(state, last_gain, col, K, eps)
    normed = _rms(state, state_gain, col, K, eps)
    kind = both.dtype.element_ty
    tl.store(both + row * 2 * K + col, _rms(embedded, token_gain, col, K, eps).to(kind), mask=col < K)
    tl.store(both + row * 2 * K + K + col, normed.to(kind), mask=col < K)
    if REST:
        tl.store(rest + row * K + col, normed.to(kind), mask=col < K)
    else:
        tl.store(rest + row * K + col, state.to(kind), mask=col < K)
    tl.store(squares + row * MOST, 2.0 * K)  # the norm of the pair is done: its scale is one


def enter(
    tokens: torch.Tensor,  # (T,)
    table: torch.Tensor,  # (V, K)
    states: torch.Tensor,  # (S, K)
    parents: torch.Tensor | None,  # (T,) the state of each row; None: its own
    gains: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],  # of token, state, and of a norm on the state before
    eps: float,
    normed_rest: bool,
) -> tuple[Stream, torch.Tensor]:
    """What the first product reads (T, 2K), as a stream that needs no norm; and the residual (T, K)."""
    t, k = len(tokens), table.shape[1]
    both = torch.empty(t, 2 * k, dtype=table.dtype, device=table.device)
    rest = torch.empty(t, k, dtype=table.dtype, device=table.device)
    squares = torch.empty(t, MOST_SQUARES, dtype=torch.float32, device=table.device)
    token_gain, state_gain, last_gain = gains
    _enter[(t,)](
        tokens, table, states, tokens if parents is None else parents, token_gain, state_gain,
        state_gain if last_gain is None else last_gain, both, rest, squares, k, eps, parents is not None,
        last_gain is not None, normed_rest, MOST_SQUARES, triton.next_power_of_2(k), **early_launch(), num_warps=4,
    )  # fmt: skip
    return Stream(both, both, squares, 0.0), rest
