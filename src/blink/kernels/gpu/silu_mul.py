# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportMissingParameterType=false
"""The gated activation on the GPU: one pass over gate and up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu_mul of a contiguous tensor."""
    assert gate_up.is_contiguous()
    num_tokens, width = gate_up.shape
    size = width // 2
    result = gate_up.new_empty(num_tokens, size)
    _silu_mul[(num_tokens, triton.cdiv(size, _BLOCK))](gate_up, result, size, BLOCK=_BLOCK, num_warps=4)
    return result


@triton.jit
def _silu_mul(gate_up, result, size, BLOCK: tl.constexpr):
    """Gate one block of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * size + column, silu(gate) * up, mask=inside)


@triton.jit
def silu(gate):
    """Return gate * sigmoid(gate) of float32 values."""
    return tl.math.div_rn(gate, 1.0 + tl.exp(-gate))
