# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The Mamba-2 rule on a GPU, token by token: rows that decode and prompts, in any type of activations.

A program has the state of one head of one row, and reads and writes it once a step. Programs of one group convolve its
B and C each by itself. Siblings belong to the program of the row before them, whose state it keeps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.recurrent.verify import count_siblings, keep_last
from blink.kernels.layer_cache import StateCache
from blink.kernels.mamba import MambaProjections, MambaWeights
from blink.kernels.recurrent import Rows

_WARPS = 4


def advance(x: MambaProjections, cache: StateCache, rows: Rows, weights: MambaWeights) -> Tensor:
    """Compute Advance of kernels/recurrent.py; of padding rows, anything."""
    assert all(part.stride(1) == 1 for part in x)
    num_rows, heads, channels = rows.slots.shape[0], weights.rate.shape[0], x.qkv.shape[1]
    tokens, size = x.z.shape
    outputs = torch.zeros(tokens, size, dtype=torch.float32, device=x.z.device)
    out = torch.empty_like(x.z, memory_format=torch.contiguous_format)
    head_dim, width = size // heads, weights.conv.shape[0]
    bias = weights.conv if weights.conv_bias is None else weights.conv_bias
    verifies = rows.lags is not None
    _scan[(heads, num_rows)](
        *(x.qkv, x.dt, cache.inputs, cache.gates, cache.states, weights.conv, bias, weights.rate, weights.dt_bias),
        *(weights.skip, *rows[:3], rows.lags if verifies else rows.slots, outputs),
        *(x.qkv.stride(0), x.dt.stride(0), channels, num_rows),
        HEADS=heads,
        GROUPS=weights.groups,
        SIZE=weights.state_size,
        DIM=head_dim,
        WIDTH=width,
        HAS_BIAS=weights.conv_bias is not None,
        KEPT=cache.num_kept,
        ROWS=triton.next_power_of_2(num_rows),
        VERIFIES=verifies,
        BLOCK_SIZE=triton.next_power_of_2(weights.state_size),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=_WARPS,
    )
    keep_last(x.qkv, cache.inputs, rows)
    if verifies:
        keep_last(x.dt, cache.gates, rows)
    if weights.merge_means is not None:
        return _finish_part(outputs, x.z, weights, out)
    of_group = size // weights.groups
    _finish[(tokens, weights.groups)](
        *(outputs, x.z, weights.norm, out, x.z.stride(0), weights.eps),
        GROUPS=weights.groups,
        SIZE=of_group,
        BLOCK=triton.next_power_of_2(of_group),
        num_warps=_WARPS,
    )
    return out


def _finish_part(outputs: Tensor, z: Tensor, weights: MambaWeights, out: Tensor) -> Tensor:
    """Gate outputs, a part of those of one group, then normalise them with the other parts, into `out`.

    For models that are not common: plain PyTorch, whose kernels a graph can hold.
    """
    gated = outputs.mul_(functional.silu(z.float()))
    return torch.mul(gated.mul_(weights.find_rates(gated)), weights.norm, out=out)


@triton.jit
def _scan(
    qkv, dt, inputs, gates, states, conv, conv_bias, rate, dt_bias, skip, slots, positions, starts, lags, outputs,
    stride, dt_stride, channels, num_rows, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr,
    VERIFIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Write each token's outputs of a head before their gate, and the state behind the row's last token."""
    head, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    if (slot < 0) | (first == end):
        return
    position, lag, num_sure = tl.load(positions + row), 0, end - first
    if VERIFIES:
        num_siblings = count_siblings(slots, row, slot, num_rows, ROWS)
        if num_siblings < 0:
            return
        lag, end = tl.load(lags + row), end + num_siblings
    dims, keys = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_SIZE)
    is_dim, is_key = dims < DIM, keys < SIZE
    group = head // (HEADS // GROUPS)
    of_values = head * DIM + dims
    of_keys = HEADS * DIM + group * SIZE + keys
    of_reads = of_keys + GROUPS * SIZE
    places = states + ((slot * HEADS + head) * SIZE + keys)[:, None] * DIM + dims[None, :]
    inside = is_key[:, None] & is_dim[None, :]
    state = tl.where(position > 0, tl.load(places, mask=inside, other=0.0), 0.0)
    decay, bias, passed = tl.load(rate + head), tl.load(dt_bias + head), tl.load(skip + head)
    kept = inputs + slot * KEPT * channels
    for step in range(-lag, end - first):
        token, place = (first + step).to(tl.int64), position + step
        values = _convolve(
            qkv, kept, conv, conv_bias, of_values, is_dim, token, first, place, stride, channels, WIDTH, HAS_BIAS, KEPT
        )
        written = _convolve(
            qkv, kept, conv, conv_bias, of_keys, is_key, token, first, place, stride, channels, WIDTH, HAS_BIAS, KEPT
        )
        read = _convolve(
            qkv, kept, conv, conv_bias, of_reads, is_key, token, first, place, stride, channels, WIDTH, HAS_BIAS, KEPT
        )
        kept_dt = gates + (slot * KEPT + place % KEPT) * HEADS + head
        time = _find_time(dt + token * dt_stride + head, kept_dt, bias, step, VERIFIES)
        state = state * tl.exp(decay * time) + written[:, None] * (time * values)[None, :]
        out = tl.sum(state * read[:, None], axis=0) + passed * values
        tl.store(outputs + token * HEADS * DIM + of_values, out, mask=is_dim & (step + 0 * dims >= 0))
        if VERIFIES:
            tl.store(places, state, mask=inside & (step + 0 * keys == num_sure - 1)[:, None])
    if not VERIFIES:
        tl.store(places, state, mask=inside)


@triton.jit
def _find_time(projected, kept, bias, step, VERIFIES: tl.constexpr):
    """Return a token's time step: of the row, or of those before it that the slot has kept."""
    raw = tl.load(projected, step >= 0, other=0.0)
    if VERIFIES:
        raw += tl.load(kept, step < 0, other=0.0)
    raw = raw.to(tl.float32) + bias
    return tl.maximum(raw, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw)))


@triton.jit
def _convolve(
    qkv, kept, conv, conv_bias, chosen, is_channel, token, first, place, stride, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Return SiLU of the convolution of some channels at a token, whose position is `place`."""
    mixed = tl.zeros(chosen.shape, tl.float32)
    if HAS_BIAS:
        mixed += tl.load(conv_bias + chosen, mask=is_channel, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        # As vectors, for the interpreter.
        source, past = token - back + tl.zeros_like(chosen), place - back + tl.zeros_like(chosen)
        is_own, is_kept = is_channel & (source >= first), is_channel & (source < first) & (past >= 0)
        own = qkv + source * stride + chosen
        earlier = kept + ((place - back + KEPT) % KEPT) * channels + chosen
        value = tl.load(own, mask=is_own, other=0.0).to(tl.float32)
        value += tl.load(earlier, mask=is_kept, other=0.0).to(tl.float32)
        mixed += value * tl.load(conv + tap * channels + chosen, mask=is_channel, other=0.0).to(tl.float32)
    return mixed / (1.0 + tl.exp(-mixed))


@triton.jit
def _finish(outputs, z, norm, out, z_stride, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Gate a token's outputs, then normalise those of a group."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    columns = group * SIZE + places
    value = tl.load(outputs + token * GROUPS * SIZE + columns, mask=inside, other=0.0)
    gate = tl.load(z + token * z_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value = value * gate / (1.0 + tl.exp(-gate))
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    weight = tl.load(norm + columns, mask=inside, other=0.0)
    tl.store(out + token * GROUPS * SIZE + columns, value * scale * weight, mask=inside)
