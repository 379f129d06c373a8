# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportMissingParameterType=false
"""Per-layer embeddings on the GPU: one kernel gathers rows of the table, wherever that lies. No GEMM reads it.

A table in the host's memory is locked there, and its rows cross the bus when the kernel reads them: no thread of the
host takes part.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor


def join_inputs(
    projected: Tensor, table: Tensor, ids: Tensor, weight: Tensor, layers: range, *, scale: float, eps: float
) -> Tensor:
    """Compute join_inputs of contiguous tensors."""
    assert projected.shape[1] == table.shape[1] and ids.shape[0] == projected.shape[0]
    assert projected.is_contiguous() and table.is_contiguous() and weight.is_contiguous()
    (tokens, width), size = projected.shape, weight.shape[0]
    result = projected.new_empty(tokens, len(layers), size)
    _join[(tokens, len(layers))](
        projected,
        table,
        ids,
        weight,
        result,
        width,
        layers.start,
        scale,
        math.sqrt(size),
        math.sqrt(0.5),
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
    )
    return result


@triton.jit(do_not_specialize=["first_layer"])  # segments are captured, and compile nothing then
def _join(
    projected, table, ids, weight, result, width, first_layer, scale, table_scale, factor, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one layer's input of one token."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < SIZE
    columns = (first_layer + tl.program_id(1)) * SIZE + dims
    own = tl.load(table + tl.load(ids + token).to(tl.int64) * width + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(projected + token * width + columns, mask=inside, other=0.0).to(tl.float32) * scale
    rate = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    normed = values * rate * tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    place = (token * tl.num_programs(1) + tl.program_id(1)) * SIZE + dims
    tl.store(result + place, (normed + own * table_scale) * factor, mask=inside)
