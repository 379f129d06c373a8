# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""The gated delta rule of rows that verify drafts, on a GPU in Triton: kernels/recurrent.py says what they keep.

A program has the state of a value head, and goes token by token through a row and its drafts. It first takes in the
tokens that the state lacks, from what the slot keeps of them. The state is read and written once, whatever was drafted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.delta_rule import DeltaWeights, Projections
from blink.kernels.gpu.recurrent import chunks
from blink.kernels.layer_cache import StateCache
from blink.kernels.recurrent import Rows

_KEPT = 1024  # channels that a program of keep_inputs has
_WARPS = 8


def verify(x: Projections, cache: StateCache, rows: Rows, weights: DeltaWeights) -> Tensor:
    """Compute Advance of kernels/recurrent.py, token by token; of padding rows, anything."""
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    _launch(x, cache, rows, weights, out, only_lags=False)
    keep_tokens(x, cache, rows)
    return out


def take_in(x: Projections, cache: StateCache, rows: Rows, weights: DeltaWeights) -> None:
    """Let the slots of a step's rows take in the tokens before them that they lack: then no row has a lag."""
    _launch(x, cache, rows, weights, x.z, only_lags=True)


def keep_tokens(x: Projections, cache: StateCache, rows: Rows) -> None:
    """Keep what the rule reads of each row's last tokens, each at the place of its position."""
    for projected, kept in ((x.qkv, cache.inputs), (x.gates, cache.gates)):
        keep_last(projected, kept, rows)


def keep_last(projected: Tensor, kept: Tensor, rows: Rows) -> None:
    """Keep of each row's last tokens [tokens, numbers] what a slot has room for, at most four."""
    size, numbers = kept.shape[1:]
    chunks.keep_inputs[(rows.slots.shape[0], triton.cdiv(numbers, _KEPT))](
        *(projected, kept, *rows[:3], projected.stride(0), numbers), WIDTH=4, SIZE=size, BLOCK=_KEPT
    )


def _launch(
    x: Projections, cache: StateCache, rows: Rows, weights: DeltaWeights, out: Tensor, *, only_lags: bool
) -> None:
    assert rows.lags is not None and all(part.stride(1) == 1 for part in x)
    v_heads, num_rows = weights.rate.shape[0], rows.slots.shape[0]
    _advance[(v_heads, num_rows)](
        *(x.qkv, x.z, x.b, x.a, cache.inputs, cache.gates, cache.states),
        *(weights.conv, weights.rate, weights.dt_bias, weights.norm, *rows, out),
        *(x.qkv.stride(0), x.z.stride(0), x.b.stride(0), x.a.stride(0), weights.eps, num_rows),
        K_HEADS=weights.k_heads,
        V_HEADS=v_heads,
        DK=weights.k_dim,
        DV=weights.norm.shape[0],
        SIZE=cache.num_kept,
        ROWS=triton.next_power_of_2(num_rows),
        ONLY_LAGS=only_lags,
        num_warps=_WARPS,
    )


@triton.jit
def _advance(
    qkv, z, b, a, inputs, gates, states, conv, rate, dt_bias, norm, slots, positions, starts, lags, out, qkv_stride,
    z_stride, b_stride, a_stride, eps, num_rows, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, ONLY_LAGS: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    head, row = tl.program_id(0), tl.program_id(1)
    slot, lag = tl.load(slots + row).to(tl.int64), tl.load(lags + row)
    if slot < 0:
        return
    first, position = tl.load(starts + row), tl.load(positions + row)
    num_sure = tl.load(starts + row + 1) - first
    count = 0
    if ONLY_LAGS:
        if lag == 0:
            return
    else:
        num_siblings = count_siblings(slots, row, slot, num_rows, ROWS)
        if (num_siblings < 0) | (num_sure == 0):
            return
        count = num_sure + num_siblings
    k_channel, v_channel = tl.arange(0, DK), tl.arange(0, DV)
    of_q = head // (V_HEADS // K_HEADS) * DK + k_channel
    of_v = 2 * K_HEADS * DK + head * DV + v_channel
    home = states + ((slot * V_HEADS + head) * DK + k_channel[:, None]) * DV + v_channel[None, :]
    state = tl.load(home, (position + 0 * k_channel > 0)[:, None], other=0.0)
    past, past_gates = inputs + slot * SIZE * CHANNELS, gates + slot * SIZE * 2 * V_HEADS
    scale, bias = tl.load(rate + head), tl.load(dt_bias + head)
    for step in range(-lag, count):
        token, place = (first + step).to(tl.int64), position + step
        q = _convolve(qkv, past, conv, of_q, token, first, place, qkv_stride, CHANNELS, SIZE)
        k = _convolve(qkv, past, conv, of_q + K_HEADS * DK, token, first, place, qkv_stride, CHANNELS, SIZE)
        v = _convolve(qkv, past, conv, of_v, token, first, place, qkv_stride, CHANNELS, SIZE)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        kept = past_gates + place % SIZE * 2 * V_HEADS + head
        raw_b = _load(b + token * b_stride + head, kept, step)
        raw_a = _load(a + token * a_stride + head, kept + V_HEADS, step) + bias
        state *= tl.exp(scale * (tl.maximum(raw_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw_a)))))
        update = tl.sigmoid(raw_b) * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * update[None, :]
        if not ONLY_LAGS:
            is_row = step + 0 * v_channel >= 0
            o = tl.sum(state * q[:, None], 0)
            gate = tl.load(z + token * z_stride + head * DV + v_channel, is_row, other=0.0).to(tl.float32)
            o *= tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * tl.load(norm + v_channel) * gate * tl.sigmoid(gate)
            tl.store(out + token * (V_HEADS * DV) + head * DV + v_channel, o.to(out.dtype.element_ty), is_row)
            tl.store(home, state, (step + 0 * k_channel == num_sure - 1)[:, None])
    if ONLY_LAGS:
        tl.store(home, state)


@triton.jit
def _load(projected, kept, step):
    """Return a number of a token: of the row, or of those before it that the slot has kept."""
    return (tl.load(projected, step >= 0, other=0.0) + tl.load(kept, step < 0, other=0.0)).to(tl.float32)


@triton.jit
def count_siblings(slots, row, slot, num_rows, ROWS: tl.constexpr):
    """Return how many rows of a slot follow its first row; -1: the row is one of them."""
    others = tl.arange(0, ROWS)
    found = tl.load(slots + others, others < num_rows, other=-1)
    end = tl.min(tl.where((others > row) & (found != slot), others, num_rows))
    is_sibling = tl.sum(tl.where((others == row - 1) & (found == slot), 1, 0)) > 0
    return tl.where(is_sibling, -1, end - row - 1)


@triton.jit
def _convolve(qkv, past, conv, channel, token, first, place, stride, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """Return SiLU of the convolution of some channels at a token, whose position is `place`."""
    total = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(4):
        # As vectors, for the interpreter.
        source, at = token - back + 0 * channel, place - back + 0 * channel
        now = tl.load(qkv + source * stride + channel, source >= first, other=0.0)
        now += tl.load(past + (at + SIZE) % SIZE * CHANNELS + channel, (source < first) & (at >= 0), other=0.0)
        total += now.to(tl.float32) * tl.load(conv + (3 - back) * CHANNELS + channel).to(tl.float32)
    return total * tl.sigmoid(total)
