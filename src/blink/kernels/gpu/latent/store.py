# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Queries, cells and values of latent attention on the GPU: batched GEMMs, and one kernel for all that is elementwise.

With few tokens that kernel has the GEMM of queries in it, and the GEMM of values is a kernel that waits for nothing but
its activations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blink.formats.fp8 import FP8_MAX
from blink.kernels.gpu.pdl import overlap, start_pdl
from blink.kernels.latent import multiply_values
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import Expansion, KvScales

# Of a step, whose queries and results are multiplied with heads' matrices by these kernels. From 8 on cuBLAS is faster.
MOST_TOKENS = 1
_HEADS_PER_PROGRAM = 8
_COLUMNS, _ROWS = tl.constexpr(64), 32  # of a matrix of a head, of a program
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
    result = query.new_empty(tokens, heads, rank + rope)
    operands, sizes = _pack(result, query, kept, rotation, kv_slots, cache, expansion, eps, kv_scales)
    parts = _count_parts(heads)
    if tokens <= MOST_TOKENS:
        _absorb_turn_and_store[(heads * triton.cdiv(rank, _COLUMNS) + parts * tokens,)](
            expansion.keys,
            find_stride(expansion.keys),
            *operands,
            TOKENS=tokens,
            PARTS=parts,
            BLOCK_NOPE=triton.next_power_of_2(size - rope),
            **sizes,
        )
        return result
    nope = query[:, :, : size - rope]
    torch.bmm(nope.transpose(0, 1), expansion.keys, out=result[:, :, :rank].transpose(0, 1))
    _turn_and_store[(parts, tokens)](*operands, **sizes)
    return result


def rotate_and_store(
    query: Tensor,
    kept: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    expansion: Expansion,
    eps: float,
    kv_scales: KvScales,
) -> Tensor:
    """Compute absorb_and_store of the same tensors, but leave the part of queries that absorbs keys unwritten."""
    (tokens, heads, _), kept_size = query.shape, expansion.rank + rotation.shape[1]
    result = query.new_empty(tokens, heads, kept_size)
    operands, sizes = _pack(result, query, kept, rotation, kv_slots, cache, expansion, eps, kv_scales)
    _turn_and_store[(_count_parts(heads), tokens)](*operands, **sizes)
    return result


def _count_parts(heads: int) -> int:
    """Return how many programs a token has: one for what it keeps, and one for each few heads."""
    return 1 + triton.cdiv(heads, _HEADS_PER_PROGRAM)


def _pack(
    result: Tensor,
    query: Tensor,
    kept: Tensor,
    rotation: Tensor,
    kv_slots: Tensor,
    cache: LayerCache,
    expansion: Expansion,
    eps: float,
    kv_scales: KvScales,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the operands and the sizes of a launch of _turn_and_store()."""
    (tokens, heads, size), rank, rope = query.shape, expansion.rank, rotation.shape[1]
    assert query.stride()[1:] == (size, 1) and kept.stride(1) == 1 and rotation.is_contiguous()
    assert cache.cells.is_contiguous() and kv_slots.dtype == torch.int32 and rotation.dtype == torch.float32
    operands = (
        *(query, query.stride(0), kept, kept.stride(0), rotation, kv_slots, expansion.norm, result, cache.cells),
        *(eps, 1 / kv_scales.key),
    )
    sizes = {
        "HEADS": heads,
        "SIZE": size,
        "RANK": rank,
        "HALF": rope // 2,
        "BLOCK_RANK": triton.next_power_of_2(rank),
        "BLOCK_HALF": triton.next_power_of_2(rope // 2),
        "BLOCK_HEADS": _HEADS_PER_PROGRAM,
        "num_warps": 4,
        **overlap(query, tokens),
    }
    return operands, sizes


def expand(attended: Tensor, expansion: Expansion) -> Tensor:
    """Compute expand() of contiguous tensors."""
    (tokens, heads, rank), value = attended.shape, expansion.values.shape[1]
    if tokens > MOST_TOKENS:
        return multiply_values(attended, expansion)
    assert attended.is_contiguous()
    found = attended.new_empty(tokens, heads * value)
    _expand[(heads, triton.cdiv(value, _ROWS))](
        expansion.values, find_stride(expansion.values), attended, found,
        HEADS=heads, VALUE=value, RANK=rank, TOKENS=tokens, ROWS=_ROWS, BLOCK_RANK=triton.next_power_of_2(rank),
        num_warps=4, **overlap(attended, tokens),
    )  # fmt: skip
    return found


def find_stride(matrices: Tensor) -> int:
    """Return how far a head's matrix is from the next one's: keys and values of a head may lie side by side."""
    assert matrices.stride()[1:] == (matrices.shape[2], 1)
    return matrices.stride(0)


@triton.jit
def _absorb_turn_and_store(
    keys, keys_stride, query, query_stride, kept, kept_stride, rotation, kv_slots, norm, result, cells, eps, rate,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, BLOCK_NOPE: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Multiply some columns of a head's keys with all tokens' queries, or do a part of _turn_and_store() of one."""
    COLUMNS: tl.constexpr = _COLUMNS
    PER_HEAD: tl.constexpr = (RANK + COLUMNS - 1) // COLUMNS
    NOPE: tl.constexpr = SIZE - 2 * HALF
    program = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    if program < HEADS * PER_HEAD:
        head, column = program // PER_HEAD, program % PER_HEAD * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, BLOCK_NOPE)
        inside = (k < NOPE)[:, None] & (column < RANK)[None, :]
        # No kernel of a step writes weights, which are asked for before the wait.
        weights = tl.load(keys + head * keys_stride + k[:, None] * RANK + column[None, :], mask=inside, other=0.0)
        if PDL:
            gdc_wait()
        for token in range(TOKENS):
            values = tl.load(query + token * query_stride + head * SIZE + k, mask=k < NOPE, other=0.0)
            total = tl.sum(weights.to(tl.float32) * values.to(tl.float32)[:, None], axis=0)
            target = result + (token * HEADS + head) * (RANK + 2 * HALF) + column
            tl.store(target, total.to(result.dtype.element_ty), mask=column < RANK)
    else:
        if PDL:
            gdc_wait()
        other = program - HEADS * PER_HEAD
        turn_and_store(
            other % PARTS, (other // PARTS).to(tl.int64), query, query_stride, kept, kept_stride, rotation, kv_slots,
            norm, result, cells, eps, rate, HEADS, SIZE, RANK, HALF, BLOCK_RANK, BLOCK_HALF, BLOCK_HEADS,
        )  # fmt: skip


@triton.jit
def _expand(
    values, values_stride, attended, found,
    HEADS: tl.constexpr, VALUE: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Multiply some rows of a head's values with what all tokens' queries of it attended to."""
    if PDL:
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_RANK)
    inside = (row < VALUE)[:, None] & (k < RANK)[None, :]
    weights = tl.load(values + head * values_stride + row[:, None] * RANK + k[None, :], mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    for token in range(TOKENS):
        latents = tl.load(attended + (token * HEADS + head) * RANK + k, mask=k < RANK, other=0.0)
        total = tl.sum(weights.to(tl.float32) * latents.to(tl.float32)[None, :], axis=1)
        target = found + (token * HEADS + head) * VALUE + row
        tl.store(target, total.to(found.dtype.element_ty), mask=row < VALUE)


@triton.jit
def _turn_and_store(
    query, query_stride, kept, kept_stride, rotation, kv_slots, norm, result, cells, eps, rate,
    HEADS: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Rotate a token's queries, each program some heads; the first program writes what the token keeps."""
    if PDL:
        start_pdl()
    turn_and_store(
        tl.program_id(0), tl.program_id(1).to(tl.int64), query, query_stride, kept, kept_stride, rotation, kv_slots,
        norm, result, cells, eps, rate, HEADS, SIZE, RANK, HALF, BLOCK_RANK, BLOCK_HALF, BLOCK_HEADS,
    )  # fmt: skip


@triton.jit
def turn_and_store(
    part, token, query, query_stride, kept, kept_stride, rotation, kv_slots, norm, result, cells, eps, rate,
    HEADS: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Write what a token keeps if part is 0, or rotate the queries of the heads of another part."""
    dims = tl.arange(0, BLOCK_HALF)
    angles = dims < HALF
    cosines = tl.load(rotation + token * 2 * HALF + dims, mask=angles, other=0.0)[None, :]
    sines = tl.load(rotation + token * 2 * HALF + HALF + dims, mask=angles, other=0.0)[None, :]
    slot = tl.load(kv_slots + token).to(tl.int64)
    if part > 0:
        heads = (part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (heads < HEADS)[:, None] & angles[None, :]
        source = query + token * query_stride + heads[:, None] * SIZE + (SIZE - 2 * HALF) + dims[None, :]
        target = result + (token * HEADS + heads[:, None]) * (RANK + 2 * HALF) + RANK + dims[None, :]
        _turn(source, target, cosines, sines, 1.0, inside, HALF)
    elif slot >= 0:
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
