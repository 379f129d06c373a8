# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
"""Activations in hi/lo FP8 as Triton's kernels write them: see csrc/kernels/common/hi_lo.cuh."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blink.formats.schemes import FormatId
from blink.kernels.gpu.gemm.decode_hi_lo import HI_LO, new_hi_lo, order_number

_HI_LO = tl.constexpr(HI_LO)
_LARGEST = tl.constexpr(57344.0)  # of e5m2
_DIVISOR, _SECOND_FACTOR = tl.constexpr(4.0), tl.constexpr(16.0)
_COLUMNS = 512  # that a program configs


def split_rows(x: Tensor, format: FormatId) -> Tensor:
    """Return the hi/lo FP8 of activations [rows, columns] for GEMMs with weights of a format."""
    rows, columns = x.shape
    hi_lo = new_hi_lo(rows, columns, x.device)
    assert x.is_contiguous() and columns % 128 == 0
    _split_row[(rows, triton.cdiv(columns, _COLUMNS))](
        x, hi_lo, columns, hi_lo[0].numel(), ORDER=order_number(format), BLOCK=_COLUMNS, num_warps=4
    )
    return hi_lo


@triton.jit
def _split_row(x, hi_lo, columns, size, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    store_hi_lo(hi_lo + row, size, column, tl.load(x + row + column, mask=inside, other=0.0), inside, ORDER)


@triton.jit
def store_hi_lo(row, size, column, values, inside, ORDER: tl.constexpr):
    """Store some columns' values in the hi/lo FP8 of a row, a pointer to bytes; size: bytes of a half.

    ORDER: of gemm_hi_lo.order_number(): columns lie as those of such packed weights.
    """
    rest = values.to(tl.float32) / _DIVISOR
    not_finite = rest - rest
    if ORDER == 1:
        place = row + column // 128 * 128 + column % 8 // 2 * 32
        place += column % 128 // 16 * 4 + column // 8 % 2 * 2 + column % 2
    else:
        place = row + column // 32 * 32 + column // 8 % 2 * 16
        place += column % 8 // 2 * 4 + column % 2 * 2 + column // 16 % 2
    for half in tl.static_range(_HI_LO):
        part = tl.minimum(tl.maximum(rest, -_LARGEST), _LARGEST).to(tl.float8e5)
        tl.store(place + half * size, part.to(tl.uint8, bitcast=True), mask=inside)
        rest = (rest - part.to(tl.float32)) * _SECOND_FACTOR + not_finite
