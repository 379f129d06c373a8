# SPDX-License-Identifier: Apache-2.0
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false
"""Planes of activations as Triton's kernels write them: see csrc/gpu/decode/planes.cuh."""

from __future__ import annotations

import triton
import triton.language as tl

from blink.kernels.gpu.decode.gemm_planes import PLANES

_PLANES = tl.constexpr(PLANES)
_LARGEST = tl.constexpr(57344.0)  # of e5m2
_DIVISOR, _SECOND_FACTOR = tl.constexpr(4.0), tl.constexpr(16.0)


@triton.jit
def store_planes(row, size, column, values, inside, ORDER: tl.constexpr):
    """Store some columns' values in the planes of a row, a pointer to bytes; size: bytes of a plane.

    ORDER: of gemm_planes.order_number(): columns lie as those of such packed weights; 0: as they come.
    """
    rest = values.to(tl.float32) / _DIVISOR
    not_finite = rest - rest
    place = row + column
    if ORDER == 1:
        place = row + column // 128 * 128 + column % 8 // 2 * 32
        place += column % 128 // 16 * 4 + column // 8 % 2 * 2 + column % 2
    elif ORDER == 2:
        place = row + column // 32 * 32 + column // 8 % 2 * 16
        place += column % 8 // 2 * 4 + column % 2 * 2 + column // 16 % 2
    for plane in tl.static_range(_PLANES):
        part = tl.minimum(tl.maximum(rest, -_LARGEST), _LARGEST).to(tl.float8e5)
        tl.store(place + plane * size, part.to(tl.uint8, bitcast=True), mask=inside)
        rest = (rest - part.to(tl.float32)) * _SECOND_FACTOR + not_finite
