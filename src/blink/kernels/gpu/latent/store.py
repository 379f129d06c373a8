# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Queries and cells of latent attention on the GPU: a batched GEMM, and one kernel for all that is elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.fp8 import FP8_MAX
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import Expansion, KvScales

_HEADS_PER_PROGRAM = 8
_FP8_MAX = tl.constexpr(FP8_MAX)


def absorb_and_store(
    query: Tensor,
    kept: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    expansion: Expansion,
    eps: float,
    kv_scales: KvScales,
) -> Tensor:
    """Compute absorb_and_store of tensors with contiguous rows."""
    (tokens, heads, size), rank, rope = query.shape, expansion.rank, rotation.shape[1]
    assert query.stride()[1:] == (size, 1) and kept.stride(1) == 1 and rotation.is_contiguous()
    assert cache.cells.is_contiguous() and kv_slots.dtype == torch.int32 and rotation.dtype == torch.float32
    result = query.new_empty(tokens, heads, rank + rope)
    nope = query[:, :, : size - rope]
    torch.bmm(nope.transpose(0, 1), expansion.keys, out=result[:, :, :rank].transpose(0, 1))
    _turn_and_store[(1 + triton.cdiv(heads, _HEADS_PER_PROGRAM), tokens)](
        query,
        query.stride(0),
        kept,
        kept.stride(0),
        rotation,
        kv_slots,
        expansion.norm,
        result,
        cache.cells,
        eps,
        1 / kv_scales.key,
        HEADS=heads,
        SIZE=size,
        RANK=rank,
        HALF=rope // 2,
        BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_HALF=triton.next_power_of_2(rope // 2),
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return result


@triton.jit
def _turn_and_store(
    query, query_stride, kept, kept_stride, rotation, kv_slots, norm, result, cells, eps, rate,
    HEADS: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries, each program some heads; the first program writes what the token keeps."""
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)
    angles = dims < HALF
    cosines = tl.load(rotation + token * 2 * HALF + dims, mask=angles, other=0.0)[None, :]
    sines = tl.load(rotation + token * 2 * HALF + HALF + dims, mask=angles, other=0.0)[None, :]
    if part > 0:
        heads = (part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (heads < HEADS)[:, None] & angles[None, :]
        source = query + token * query_stride + heads[:, None] * SIZE + (SIZE - 2 * HALF) + dims[None, :]
        target = result + (token * HEADS + heads[:, None]) * (RANK + 2 * HALF) + RANK + dims[None, :]
        _turn(source, target, cosines, sines, 1.0, inside, HALF)
        return
    slot = tl.load(kv_slots + token).to(tl.int64)
    if slot < 0:
        return
    source, cell = kept + token * kept_stride, cells + slot * (RANK + 2 * HALF)
    keys = RANK + dims[None, :]
    _turn(source + keys, cell + keys, cosines, sines, rate, angles[None, :], HALF)
    place = tl.arange(0, BLOCK_RANK)
    values = tl.load(source + place, mask=place < RANK, other=0.0).to(tl.float32)
    weights = tl.load(norm + place, mask=place < RANK, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values) / RANK + eps) * weights
    _write(cell + place, values.to(kept.dtype.element_ty), rate, place < RANK)


@triton.jit
def _turn(source, target, cosines, sines, rate, inside, HALF: tl.constexpr):
    """Rotate components that lie HALF apart, and round them to the source's type, as an operation of its own would."""
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    _write(target, (low * cosines - high * sines).to(source.dtype.element_ty), rate, inside)
    _write(target + HALF, (high * cosines + low * sines).to(source.dtype.element_ty), rate, inside)


@triton.jit
def _write(target, values, rate, inside):
    """Store numbers in the target's type; those of FP8 times a rate, and at most its largest."""
    if target.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32) * rate, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, values.to(target.dtype.element_ty), mask=inside)
