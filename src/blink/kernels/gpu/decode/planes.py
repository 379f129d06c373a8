# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
"""Planes of activations as Triton's kernels write them: see csrc/gpu/decode/planes.cuh."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blink.formats.schemes import FormatId
from blink.kernels.gpu.decode.gemm_planes import PLANES, new_planes, order_number

_PLANES = tl.constexpr(PLANES)
_LARGEST = tl.constexpr(57344.0)  # of e5m2
_DIVISOR, _SECOND_FACTOR = tl.constexpr(4.0), tl.constexpr(16.0)
_COLUMNS = 512  # that a program splits


def split_rows(x: Tensor, format: FormatId) -> Tensor:
    """Return the planes of activations [rows, columns] for products with weights of a format."""
    rows, columns = x.shape
    planes = new_planes(rows, columns, x.device)
    assert x.is_contiguous() and columns % 128 == 0
    _split_row[(rows, triton.cdiv(columns, _COLUMNS))](
        x, planes, columns, planes[0].numel(), ORDER=order_number(format), BLOCK=_COLUMNS, num_warps=4
    )
    return planes


@triton.jit
def _split_row(x, planes, columns, size, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    store_planes(planes + row, size, column, tl.load(x + row + column, mask=inside, other=0.0), inside, ORDER)


@triton.jit
def store_planes(row, size, column, values, inside, ORDER: tl.constexpr):
    """Store some columns' values in the planes of a row, a pointer to bytes; size: bytes of a plane.

    ORDER: of gemm_planes.order_number(): columns lie as those of such packed weights.
    """
    rest = values.to(tl.float32) / _DIVISOR
    not_finite = rest - rest
    if ORDER == 1:
        place = row + column // 128 * 128 + column % 8 // 2 * 32
        place += column % 128 // 16 * 4 + column // 8 % 2 * 2 + column % 2
    else:
        place = row + column // 32 * 32 + column // 8 % 2 * 16
        place += column % 8 // 2 * 4 + column % 2 * 2 + column // 16 % 2
    for plane in tl.static_range(_PLANES):
        part = tl.minimum(tl.maximum(rest, -_LARGEST), _LARGEST).to(tl.float8e5)
        tl.store(place + plane * size, part.to(tl.uint8, bitcast=True), mask=inside)
        rest = (rest - part.to(tl.float32)) * _SECOND_FACTOR + not_finite
