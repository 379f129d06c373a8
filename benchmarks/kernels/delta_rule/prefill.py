# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportMissingParameterType=false
"""The gated delta-net of prompts, in chunks of 64 tokens on tensor cores.

With G the decay since the chunk's start, and L_ij = exp(G_i - G_j) for j <= i:

_mix (a program for each chunk and head of q and k) convolves and normalises.
_relate (for each chunk and key head) computes P = Q K^T L, and A = strictly lower(beta K K^T L).
invert() returns T = (I + A)^-1 beta.
_solve (for each chunk and value head) convolves v, and computes U = T V and W = T exp(G) K.
_scan (for each sequence, value head and some columns of its state) walks over the chunks: N = U - W S;
O = exp(G) Q S + P N; S = exp(G_last) S + K^T (exp(G_last - G) N).
_finish normalises the outputs and gates them.

Chunks begin at each row's first token. The last is filled up with tokens of beta = 0 and g = 0, which change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from delta_rule.invert import invert
from delta_rule.reference import CHUNK, Cache, Parameters, Projections, Rows


class Config(NamedTuple):
    """Sizes that decide the speed alone."""

    columns: int = 32  # of the state, of a program of _scan
    part: int = 128  # of a value head's columns, that _solve multiplies at once
    warps: int = 4
    scan_warps: int = 4
    scan_stages: int = 3


class _Chunks(NamedTuple):
    """What the kernels leave for those behind, a chunk's heads one after the other."""

    q: Tensor  # [chunks, nk, 64, dk]
    k: Tensor
    u: Tensor  # [chunks, nv, 64, dv]
    w: Tensor  # [chunks, nv, 64, dk]
    p: Tensor  # [chunks, nv, 64, 64]
    decays: Tensor  # [chunks, nv, 64], float32: G
    systems: Tensor  # [chunks, nv, 64, 64], float32: what lies below the diagonal of I + A
    betas: Tensor  # [chunks, nv, 64], float32


def prefill(
    x: Projections, cache: Cache, rows: Rows, parameters: Parameters, config: Config | None = None
) -> Tensor:
    """Return reference.advance() in the type of the inputs; of padding rows, anything."""
    config = config or Config()
    _, v_heads, k_dim, v_dim = cache.states.shape
    tokens, num_rows = x.qkv.shape[0], rows.slots.shape[0]
    assert all(part.stride(1) == 1 for part in x)
    most_chunks = tokens // CHUNK + min(num_rows, tokens)
    chunks = _allocate(most_chunks, parameters.k_heads, v_heads, k_dim, v_dim, x.qkv)
    out = x.qkv.new_empty(tokens, v_heads * v_dim)
    sizes = {
        "K_HEADS": parameters.k_heads,
        "V_HEADS": v_heads,
        "DK": k_dim,
        "DV": v_dim,
        "ROWS": triton.next_power_of_2(num_rows),
        "C": CHUNK,
    }
    is_exact = x.qkv.dtype == torch.float32
    precision = "tf32x3" if is_exact else "tf32"
    if is_exact or min(k_dim, v_dim) < 64:  # Triton 3.6 reads beside small operands of warpgroups' products
        config = config._replace(warps=2, scan_warps=2, scan_stages=1)
    strides = tuple(part.stride(0) for part in x)
    of_rows = (rows.slots, rows.positions, rows.starts)
    _mix[(most_chunks, 2 * parameters.k_heads)](
        *(x.qkv, cache.inputs, parameters.conv, *of_rows, *chunks[:2], strides[0], num_rows), **sizes, num_warps=8
    )
    _relate[(most_chunks, parameters.k_heads)](
        *(x.b, x.a, parameters.rate, parameters.dt_bias, *of_rows, *chunks[:2], *chunks[4:], strides[2], strides[3]),
        num_rows,
        **sizes,
        PRECISION=precision,
        num_warps=config.warps,
    )
    inverses = invert(chunks.systems, chunks.betas, x.qkv.dtype)
    _solve[(most_chunks, v_heads)](
        *(x.qkv, cache.inputs, parameters.conv, *of_rows, chunks.k, inverses, chunks.decays, *chunks[2:4], strides[0]),
        num_rows,
        **sizes,
        PART=min(config.part, v_dim),
        PRECISION=precision,
        num_warps=config.warps,
        num_stages=1,
    )
    columns = min(config.columns, v_dim)
    _scan[(v_dim // columns, v_heads, num_rows)](
        *(x.qkv, *cache, *of_rows, *chunks[:6], out, strides[0], num_rows),
        **sizes,
        COLUMNS=columns,
        PRECISION=precision,
        STAGES=config.scan_stages,
        num_warps=config.scan_warps,
    )
    _finish[(triton.cdiv(tokens, 16), v_heads)](
        out, x.z, parameters.norm, rows.starts, strides[1], parameters.eps, num_rows, V_HEADS=v_heads, DV=v_dim, TOKENS=16
    )
    return out


def _allocate(chunks: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, like: Tensor) -> _Chunks:
    return _Chunks(
        like.new_empty(chunks, k_heads, CHUNK, k_dim),
        like.new_empty(chunks, k_heads, CHUNK, k_dim),
        like.new_empty(chunks, v_heads, CHUNK, v_dim),
        like.new_empty(chunks, v_heads, CHUNK, k_dim),
        like.new_empty(chunks, v_heads, CHUNK, CHUNK),
        *(torch.empty(chunks, v_heads, *size, device=like.device) for size in ((CHUNK,), (CHUNK, CHUNK), (CHUNK,))),
    )


@triton.jit
def _count_chunks(starts, num_rows, ROWS: tl.constexpr, C: tl.constexpr):
    """Return how many chunks each row has."""
    row = tl.arange(0, ROWS)
    first = tl.load(starts + row, row < num_rows, other=0)
    end = tl.load(starts + row + 1, row < num_rows, other=0)
    return (end - first + C - 1) // C


@triton.jit
def _convolve(qkv, inputs, conv, stride, start, position, token, count, channel, CHANNELS: tl.constexpr):
    """Return the convolved values of some channels of a row's tokens, in float32; zeros where there is no token.

    qkv: of the row's first token; token: which ones, count in all; position: of the row's first.
    """
    total = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    for back in tl.static_range(4):
        at = token - back
        now = tl.load(
            qkv + (start + at)[:, None].to(tl.int64) * stride + channel[None, :],
            ((at >= 0) & (token < count))[:, None],
            other=0.0,
        )
        if back > 0:
            place = (position + at) & 3
            has_past = (at < 0) & (position + at >= 0)
            now += tl.load(inputs + place[:, None] * CHANNELS + channel[None, :], has_past[:, None], other=0.0)
        weight = tl.load(conv + (3 - back) * CHANNELS + channel)
        total += now.to(tl.float32) * weight.to(tl.float32)[None, :]
    return tl.where((token < count)[:, None], total * tl.sigmoid(total), 0.0)


@triton.jit
def _find_chunk(chunk, slots, positions, starts, num_rows, ROWS: tl.constexpr, C: tl.constexpr):
    """Return a chunk's row's first token, position, number of tokens and slot, and its number in that row; the slot is
    below 0 if there is nothing to do."""
    counts = _count_chunks(starts, num_rows, ROWS, C)
    row = tl.sum((tl.cumsum(counts) <= chunk).to(tl.int32))
    index = chunk - tl.sum(tl.where(tl.arange(0, ROWS) < row, counts, 0))
    slot = tl.load(slots + row, row < num_rows, other=-1)
    position = tl.load(positions + row, row < num_rows, other=0)
    start = tl.load(starts + row, row < num_rows, other=0)
    count = tl.load(starts + row + 1, row < num_rows, other=0) - start
    return start, position, count, slot, index


@triton.jit
def _mix(
    qkv,
    inputs,
    conv,
    slots,
    positions,
    starts,
    q_out,
    k_out,
    stride,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, position, count, slot, index = _find_chunk(chunk, slots, positions, starts, num_rows, ROWS, C)
    if slot < 0:
        return
    i, channel = tl.arange(0, C), tl.arange(0, DK)
    past = inputs + slot.to(tl.int64) * 4 * CHANNELS
    x = _convolve(qkv, past, conv, stride, start, position, index * C + i, count, head * DK + channel, CHANNELS)
    x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    of_q = head < K_HEADS
    to = tl.where(of_q, q_out, k_out) + (chunk * K_HEADS + head % K_HEADS).to(tl.int64) * C * DK
    x *= tl.where(of_q, DK**-0.5, 1.0)
    tl.store(to + i[:, None] * DK + channel[None, :], x.to(q_out.dtype.element_ty))


@triton.jit
def _load_gates(a, b, a_stride, b_stride, dt_bias, rate, head, at, here):
    """Return g and beta of some tokens; 0 where there is none."""
    x = tl.load(a + at * a_stride + head, here, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
    beta = tl.sigmoid(tl.load(b + at * b_stride + head, here, other=0.0).to(tl.float32))
    return tl.where(here, tl.load(rate + head) * softplus, 0.0), tl.where(here, beta, 0.0)


@triton.jit
def _relate(
    b,
    a,
    rate,
    dt_bias,
    slots,
    positions,
    starts,
    q_in,
    k_in,
    p_out,
    decay_out,
    system_out,
    beta_out,
    b_stride,
    a_stride,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, k_head = tl.program_id(0), tl.program_id(1)
    start, position, count, slot, index = _find_chunk(chunk, slots, positions, starts, num_rows, ROWS, C)
    if slot < 0:
        return
    i, j, k_channel = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, DK)[None, :]
    token = index * C + tl.arange(0, C)
    place = (chunk * K_HEADS + k_head).to(tl.int64) * C * DK + i * DK + k_channel
    k = tl.load(k_in + place)
    kk = tl.dot(k, k.T, input_precision=PRECISION)
    qk = tl.dot(tl.load(q_in + place), k.T, input_precision=PRECISION)
    for repeat in range(V_HEADS // K_HEADS):
        head = k_head * (V_HEADS // K_HEADS) + repeat
        at, to = (start + token).to(tl.int64), (chunk * V_HEADS + head).to(tl.int64) * C
        g, beta = _load_gates(a, b, a_stride, b_stride, dt_bias, rate, head, at, token < count)
        decay = tl.cumsum(g)
        tl.store(decay_out + to + tl.arange(0, C), decay)
        tl.store(beta_out + to + tl.arange(0, C), beta)
        between = tl.exp(tl.where(i >= j, decay[:, None] - decay[None, :], float("-inf")))
        tl.store(p_out + to * C + i * C + j, (qk * between).to(p_out.dtype.element_ty))
        tl.store(system_out + to * C + i * C + j, tl.where(i > j, kk * between * beta[:, None], 0.0))


@triton.jit
def _solve(
    qkv,
    inputs,
    conv,
    slots,
    positions,
    starts,
    k_in,
    inverse_in,
    decay_in,
    u_out,
    w_out,
    stride,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, position, count, slot, index = _find_chunk(chunk, slots, positions, starts, num_rows, ROWS, C)
    if slot < 0:
        return
    i, j, k_channel = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, DK)[None, :]
    token = index * C + tl.arange(0, C)
    dtype = qkv.dtype.element_ty
    to = (chunk * V_HEADS + head).to(tl.int64) * C
    inverse = tl.load(inverse_in + to * C + i * C + j)
    decay = tl.load(decay_in + to + tl.arange(0, C))
    k = tl.load(k_in + ((chunk * K_HEADS + head // (V_HEADS // K_HEADS)).to(tl.int64) * C + i) * DK + k_channel)
    w = tl.dot((inverse.to(tl.float32) * tl.exp(decay)[None, :]).to(dtype), k, input_precision=PRECISION)
    tl.store(w_out + (to + i) * DK + k_channel, w.to(dtype))
    past = inputs + slot.to(tl.int64) * 4 * CHANNELS
    for first in range(0, DV, PART):
        column = first + tl.arange(0, PART)
        channel = 2 * K_HEADS * DK + head * DV + column
        v = _convolve(qkv, past, conv, stride, start, position, token, count, channel, CHANNELS).to(dtype)
        u = tl.dot(inverse, v, input_precision=PRECISION)
        tl.store(u_out + (to + i) * DV + column[None, :], u.to(dtype))


@triton.jit
def _scan(
    qkv,
    states,
    inputs,
    slots,
    positions,
    starts,
    q_in,
    k_in,
    u_in,
    w_in,
    p_in,
    decay_in,
    out,
    stride,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    if (slot < 0) | (count == 0):
        return
    first = tl.sum(tl.where(tl.arange(0, ROWS) < row, _count_chunks(starts, num_rows, ROWS, C), 0))
    i, k_channel, column = tl.arange(0, C), tl.arange(0, DK), block * COLUMNS + tl.arange(0, COLUMNS)
    k_head = head // (V_HEADS // K_HEADS)
    dtype = out.dtype.element_ty
    home = states + (slot * V_HEADS + head) * DK * DV + k_channel[:, None] * DV + column[None, :]
    has_state = (position + 0 * k_channel > 0)[:, None]
    state = tl.load(home, has_state, other=0.0)
    for index in tl.range(0, (count + C - 1) // C, num_stages=STAGES):
        at = ((first + index) * V_HEADS + head).to(tl.int64)
        at_k = ((first + index) * K_HEADS + k_head).to(tl.int64) * C * DK
        w = tl.load(w_in + at * C * DK + i[:, None] * DK + k_channel[None, :])
        u = tl.load(u_in + at * C * DV + i[:, None] * DV + column[None, :])
        q = tl.load(q_in + at_k + i[:, None] * DK + k_channel[None, :])
        k = tl.load(k_in + at_k + i[None, :] * DK + k_channel[:, None])
        p = tl.load(p_in + at * C * C + i[:, None] * C + i[None, :])
        decay = tl.load(decay_in + at * C + i)
        last = tl.load(decay_in + at * C + C - 1)
        rounded = state.to(dtype)
        updates = u.to(tl.float32) - tl.dot(w, rounded, input_precision=PRECISION)
        o = tl.dot(q, rounded, input_precision=PRECISION) * tl.exp(decay)[:, None]
        o += tl.dot(p, updates.to(dtype), input_precision=PRECISION)
        updates = (updates * tl.exp(last - decay)[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(k, updates, input_precision=PRECISION)
        token = index * C + i
        to = out + (start + token).to(tl.int64)[:, None] * (V_HEADS * DV) + head * DV + column[None, :]
        tl.store(to, o.to(dtype), (token < count)[:, None])
    tl.store(home, state)
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    past = inputs + slot * 4 * CHANNELS
    _keep_inputs(qkv, past, stride, start, position, count, 2 * K_HEADS * DK + head * DV + column, CHANNELS)
    if head % (V_HEADS // K_HEADS) == 0:
        part: tl.constexpr = DK * COLUMNS // DV
        channel = k_head * DK + block * part + tl.arange(0, part)
        _keep_inputs(qkv, past, stride, start, position, count, channel, CHANNELS)
        _keep_inputs(qkv, past, stride, start, position, count, K_HEADS * DK + channel, CHANNELS)


@triton.jit
def _keep_inputs(qkv, inputs, stride, start, position, count, channel, CHANNELS: tl.constexpr):
    """Keep the last four inputs of some channels, each at the place of its position."""
    token = count - 4 + tl.arange(0, 4)
    here = (token >= 0)[:, None]
    values = tl.load(qkv + (start + token).to(tl.int64)[:, None] * stride + channel[None, :], here)
    tl.store(inputs + ((position + token) & 3)[:, None] * CHANNELS + channel[None, :], values, here)


@triton.jit
def _finish(
    out, z, norm, starts, z_stride, eps, num_rows, V_HEADS: tl.constexpr, DV: tl.constexpr, TOKENS: tl.constexpr
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * DV + tl.arange(0, DV)[None, :]
    here = token < tl.load(starts + num_rows)
    o = tl.load(out + token * (V_HEADS * DV) + column, here, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + column, here, other=0.0).to(tl.float32)
    rate = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None]
    o *= rate * tl.load(norm + tl.arange(0, DV))[None, :] * gate * tl.sigmoid(gate)
    tl.store(out + token * (V_HEADS * DV) + column, o.to(out.dtype.element_ty), here)
