"""What stands between the products of a Llama block when many rows share a forward: rotation and writing, SwiGLU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.models.kernels.launch import early_launch


@triton.jit
def _norm(value, other, gain, lane, half, eps, D: tl.constexpr):
    scale = tl.rsqrt((tl.sum(value * value, 0) + tl.sum(other * other, 0)) / D + eps)
    ok = lane < half
    return (
        value * scale * tl.load(gain + lane, mask=ok, other=0.0).to(tl.float32),
        other * scale * tl.load(gain + half + lane, mask=ok, other=0.0).to(tl.float32),
    )


@triton.jit
def _rotate(
    qkv, q_gain, k_gain, cos, sin, positions, slots, query, keys, values, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    lane = tl.arange(0, PAD)
    ok = lane < half
    here = qkv + row * ((HEADS + 2 * KV) * D) + head * D + lane
    first = tl.load(here, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(here + half, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        if head < HEADS:
            first, second = _norm(first, second, q_gain, lane, half, eps, D)
        elif head < HEADS + KV:
            first, second = _norm(first, second, k_gain, lane, half, eps, D)
    if head < HEADS + KV:
        angle = tl.load(positions + row).to(tl.int64) * half + lane
        c = tl.load(cos + angle, mask=ok, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=ok, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    if head < HEADS:
        at = query + row * (HEADS * D) + head * D + lane
        tl.store(at, first.to(query.dtype.element_ty), mask=ok)
        tl.store(at + half, second.to(query.dtype.element_ty), mask=ok)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        ok = ok & (lane < tl.where(slot >= 0, half, 0))
        if head < HEADS + KV:
            at = keys + slot * (KV * D) + (head - HEADS) * D + lane
        else:
            at = values + slot * (KV * D) + (head - HEADS - KV) * D + lane
        tl.store(at, first.to(keys.dtype.element_ty), mask=ok)
        tl.store(at + half, second.to(keys.dtype.element_ty), mask=ok)


@triton.jit
def _swiglu(x, out, N, BN: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    gate = tl.load(x + row * 2 * N + col, mask=col < N, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + col, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=col < N)


@triton.jit
def _write(source, stride, pool, slots, N, BN: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    slot = tl.load(slots + row).to(tl.int64)
    value = tl.load(source + row * stride + col, mask=col < N, other=0.0)
    tl.store(pool + slot * N + col, value.to(pool.dtype.element_ty), mask=col < tl.where(slot >= 0, N, 0))


def rotate(
    qkv: torch.Tensor,  # (T, (H + 2 KV) D)
    gains: tuple[torch.Tensor, torch.Tensor] | None,  # of a norm over each query and key head
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries (T, H, D); keys and values are written to their slots."""
    t, (_, kv, d) = len(qkv), keys.shape
    heads = qkv.shape[1] // d - 2 * kv
    query = torch.empty(t, heads, d, dtype=qkv.dtype, device=qkv.device)
    _rotate[(t, heads + 2 * kv)](
        qkv, *(gains or (qkv, qkv)), *angles, positions, slots, query, keys, values, eps, heads, kv, d, gains is not None,
        triton.next_power_of_2(d // 2), **early_launch(), num_warps=1,
    )  # fmt: skip
    return query


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """(T, 2N) -> (T, N): silu of the first half times the second."""
    t, n = len(x), x.shape[1] // 2
    out = torch.empty(t, n, dtype=x.dtype, device=x.device)
    _swiglu[(t, triton.cdiv(n, 1024))](x, out, n, 1024, **early_launch(), num_warps=4)
    return out


def write(source: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    """pool[slots] = source, for source (T, heads, dim); rows without a slot are left out."""
    size = pool.shape[1] * pool.shape[2]
    flat = source.reshape(len(source), size)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    _write[(len(source),)](
        flat, flat.stride(0), pool, slots, size, triton.next_power_of_2(size), **early_launch(), num_warps=4
    )
