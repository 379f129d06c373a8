# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Root mean square normalisation on the GPU: one program per row, one read and one write of each element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.pdl import overlap, start_pdl

_ELEMENTS_PER_WARP = 512


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute rms_norm of contiguous tensors."""
    assert x.is_contiguous() and weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)
    size = x.shape[-1]
    result = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _norm[(x.numel() // size,)](
        x,
        x if residual is None else residual,
        weight,
        x,
        result,
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        IS_LAST_TOKENS=False,
        BLOCK=block,
        num_warps=_num_warps(block),
        **overlap(x, x.numel() // size),
    )
    return result


def last_token_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor, query_starts: Tensor, num_rows: int
) -> Tensor:
    """Compute last_token_norm of contiguous tensors; a row without tokens reads token 0."""
    assert x.is_contiguous() and weight.is_contiguous() and residual.is_contiguous()
    assert residual.shape == x.shape and residual.dtype == x.dtype
    size = x.shape[-1]
    result = x.new_empty(num_rows, size)
    block = triton.next_power_of_2(size)
    _norm[(num_rows,)](
        x,
        residual,
        weight,
        query_starts,
        result,
        size,
        eps,
        HAS_RESIDUAL=True,
        IS_LAST_TOKENS=True,
        BLOCK=block,
        num_warps=_num_warps(block),
        **overlap(x, num_rows),
    )
    return result


def add_norm(
    update: Tensor, end_weight: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None
) -> Tensor:
    """Compute add_norm of contiguous tensors in one kernel, which rounds as its parts would."""
    assert update.is_contiguous() and residual.is_contiguous() and residual.dtype == update.dtype
    size = update.shape[-1]
    result = torch.empty_like(update)
    block = triton.next_power_of_2(size)
    _add_norm[(update.numel() // size,)](
        update,
        end_weight,
        residual,
        weight,
        weight if scale is None else scale,
        result,
        size,
        eps,
        HAS_SCALE=scale is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
        **overlap(update, update.numel() // size),
    )
    return result


def _num_warps(block: int) -> int:
    return min(max(block // _ELEMENTS_PER_WARP, 1), 16)


@triton.jit
def _norm(
    x,
    residual,
    weight,
    query_starts,
    result,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    IS_LAST_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Normalise one row: row program_id, or with IS_LAST_TOKENS the last token of that row, whose sum is not stored."""
    if PDL:
        start_pdl()
    row = tl.program_id(0)
    source = row
    if IS_LAST_TOKENS:
        source = tl.maximum(tl.load(query_starts + row + 1) - 1, 0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    place = source.to(tl.int64) * size + column
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        # What is normalised is the sum as the residual keeps it, rounded.
        rounded = values.to(residual.dtype.element_ty)
        values = rounded.to(tl.float32)
        if not IS_LAST_TOKENS:
            tl.store(residual + place, rounded, mask=inside)
    rate = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    tl.store(result + row.to(tl.int64) * size + column, values * rate * scale, mask=inside)


@triton.jit
def _add_norm(
    update, end_weight, residual, weight, scale, result, size, eps, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Add one row's norm to its residual, and write the norm of that."""
    if PDL:
        start_pdl()
    column = tl.arange(0, BLOCK)
    inside = column < size
    place = tl.program_id(0).to(tl.int64) * size + column
    added = _normalize(tl.load(update + place, mask=inside, other=0.0), end_weight, size, eps, BLOCK)
    total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = residual.dtype.element_ty
    total = (total + added.to(dtype).to(tl.float32)).to(dtype)
    if HAS_SCALE:
        total = (total.to(tl.float32) * tl.load(scale).to(tl.float32)).to(dtype)
    tl.store(residual + place, total, mask=inside)
    tl.store(result + place, _normalize(total, weight, size, eps, BLOCK), mask=inside)


@triton.jit
def _normalize(values, weight, size, eps, BLOCK: tl.constexpr):
    """Return the norm of a row whose numbers behind `size` are 0, in float32."""
    column = tl.arange(0, BLOCK)
    values = values.to(tl.float32)
    rate = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    return values * rate * tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
