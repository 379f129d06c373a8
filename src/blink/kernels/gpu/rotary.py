# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""Rotation and the KV cache write on the GPU in one kernel: each program takes a few heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.fp8 import FP8, FP8_MAX
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import UNSCALED, HeadNorm, KvScales

_HEADS_PER_PROGRAM = 8
_FP8_MAX = tl.constexpr(FP8_MAX)


def rotate_and_store(
    qkv: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    head_norm: HeadNorm | None = None,
    kv_scales: KvScales = UNSCALED,
    *,
    value_eps: float | None = None,
    has_keys: bool = True,
) -> Tensor:
    """Compute rotate_and_store of contiguous tensors; qkv stays as it is."""
    assert qkv.is_contiguous() and cache.cells.is_contiguous() and rotation.is_contiguous()
    assert cache.dtype in (qkv.dtype, FP8) and rotation.dtype == torch.float32 and kv_slots.dtype == torch.int32
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads * has_keys
    half = rotation.shape[1] // 2
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    query_parts, kv_parts = (triton.cdiv(count, _HEADS_PER_PROGRAM) for count in (num_heads, kv_heads))
    _rotate_and_store[(query_parts + 2 * kv_parts * has_keys, num_tokens)](
        qkv,
        rotation,
        kv_slots,
        query,
        cache.cells,
        cache.values_offset,
        head_norm.query_weight if head_norm else rotation,
        head_norm.key_weight if head_norm else rotation,
        head_norm.eps if head_norm else 0.0,
        1 / kv_scales.key,
        1 / kv_scales.value,
        value_eps or 0.0,
        HAS_NORM=head_norm is not None,
        HAS_VALUE_NORM=value_eps is not None,
        HAS_KEYS=has_keys,
        NUM_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(head_dim - 2 * half),
        num_warps=4,
    )
    return query


@triton.jit
def _rotate_and_store(
    qkv, rotation, kv_slots, query, kv_cache, values_offset, query_weight, key_weight, eps, key_rate, value_rate,
    value_eps, HAS_NORM: tl.constexpr, HAS_VALUE_NORM: tl.constexpr, HAS_KEYS: tl.constexpr, NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    query_parts: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    kv_parts: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    source = qkv + token * (NUM_HEADS + (2 * KV_HEADS if HAS_KEYS else 0)) * HEAD_DIM
    rotation += token * 2 * HALF
    if part < query_parts:
        queries = query + token * NUM_HEADS * HEAD_DIM
        _rotate_heads(
            source, queries, rotation, query_weight, eps, 1.0, part, NUM_HEADS,
            HAS_NORM, HEAD_DIM, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        slot = tl.load(kv_slots + token).to(tl.int64)
        if slot < 0:
            return
        source += NUM_HEADS * HEAD_DIM
        keys = kv_cache + slot * KV_HEADS * HEAD_DIM
        part -= query_parts
        if part < kv_parts:
            _rotate_heads(
                source, keys, rotation, key_weight, eps, key_rate, part, KV_HEADS,
                HAS_NORM, HEAD_DIM, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        else:
            block: tl.constexpr = BLOCK_HEADS * HEAD_DIM
            size: tl.constexpr = KV_HEADS * HEAD_DIM
            if HAS_VALUE_NORM:
                _normalize(
                    source + size, keys + values_offset, value_eps, value_rate, part - kv_parts,
                    KV_HEADS, HEAD_DIM, BLOCK_HEADS,
                )  # fmt: skip
            else:
                _copy(source + size, keys + values_offset, value_rate, (part - kv_parts) * block, block, size)


@triton.jit
def _normalize(source, target, eps, rate, part, num_heads, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Write the norms of BLOCK_HEADS heads of values."""
    heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    inside = (heads < num_heads) & (dims < HEAD_DIM)
    offsets = heads * HEAD_DIM + dims
    values = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)[:, None]
    _store(target + offsets, (values * scale).to(source.dtype.element_ty), rate, inside)


@triton.jit
def _copy(source, target, rate, start, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """Copy LENGTH elements from start, but none beyond SIZE; rate: of FP8."""
    offsets = tl.arange(0, triton.next_power_of_2(LENGTH))
    inside = (offsets < LENGTH) & (start + offsets < SIZE)
    _store(target + start + offsets, tl.load(source + start + offsets, mask=inside), rate, inside)


@triton.jit
def _store(target, cells, rate, inside):
    """Store numbers in the target's type; those of FP8 times a rate, and at most its largest."""
    if target.dtype.element_ty == tl.float8e4nv:
        cells = tl.clamp(cells.to(tl.float32) * rate, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, cells.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_heads(
    source, target, rotation, weight, eps, rate, part, num_heads,
    HAS_NORM: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Normalise, if asked for, and rotate BLOCK_HEADS heads of one token; components from 2 * HALF on stay.

    Rounds to the source's type, as if norm, rotation and the rounding to FP8 were operations of their own.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_HALF)
    angles = dims < HALF
    inside = (heads < num_heads) & angles[None, :]
    cosines = tl.load(rotation + dims, mask=angles, other=0.0)[None, :]
    sines = tl.load(rotation + HALF + dims, mask=angles, other=0.0)[None, :]
    offsets = heads * HEAD_DIM + dims[None, :]
    low = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    if 2 * HALF < HEAD_DIM:
        rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest_inside = (heads < num_heads) & (rest_dims < HEAD_DIM)[None, :]
        rest_offsets = heads * HEAD_DIM + rest_dims[None, :]
        rest = tl.load(source + rest_offsets, mask=rest_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.sum(low * low + high * high, axis=1)
        if 2 * HALF < HEAD_DIM:
            total += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        low = _scale(low, scale, weight + dims, angles, dtype)
        high = _scale(high, scale, weight + HALF + dims, angles, dtype)
        if 2 * HALF < HEAD_DIM:
            rest = _scale(rest, scale, weight + rest_dims, rest_dims < HEAD_DIM, dtype)
    _store(target + offsets, (low * cosines - high * sines).to(dtype), rate, inside)
    _store(target + offsets + HALF, (high * cosines + low * sines).to(dtype), rate, inside)
    if 2 * HALF < HEAD_DIM:
        _store(target + rest_offsets, rest.to(dtype), rate, rest_inside)


@triton.jit
def _scale(part, scale, weights, inside, DTYPE: tl.constexpr):
    weight = tl.load(weights, mask=inside, other=0.0).to(tl.float32)[None, :]
    return (part * scale * weight).to(DTYPE).to(tl.float32)
