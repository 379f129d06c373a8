# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
"""The gated activation on the GPU: one pass over gate and up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.pdl import overlap, start_pdl
from blink.kernels.operands import CLIP_LIMIT, CLIP_SLOPE, Activation

_BLOCK = 1024
_CLIP_LIMIT, _CLIP_SLOPE = tl.constexpr(CLIP_LIMIT), tl.constexpr(CLIP_SLOPE)


def activate(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute activate of a contiguous tensor."""
    assert gate_up.is_contiguous()
    num_tokens, width = gate_up.shape
    size = width // 2
    result = gate_up.new_empty(num_tokens, size)
    _activate[(num_tokens, triton.cdiv(size, _BLOCK))](
        gate_up, result, size, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4, **overlap(gate_up, num_tokens)
    )
    return result


@triton.jit
def _activate(
    gate_up, result, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):  # fmt: skip
    """Gate one block of one token."""
    if PDL:
        start_pdl()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * size + column, multiply(gate, up, ACTIVATION), mask=inside)


@triton.jit
def multiply(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up of float32 values."""
    if ACTIVATION == "silu":
        return tl.math.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(x)) / 2 = sigmoid(2 x), x = sqrt(2 / pi) * (gate + 0.044715 * gate^3)
        doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return tl.math.div_rn(gate, 1.0 + tl.exp(-doubled)) * up
    gate = tl.where(gate > _CLIP_LIMIT, _CLIP_LIMIT, gate)
    up = tl.where(up > _CLIP_LIMIT, _CLIP_LIMIT, tl.where(up < -_CLIP_LIMIT, -_CLIP_LIMIT, up))
    return tl.math.div_rn(gate, 1.0 + tl.exp(gate * -_CLIP_SLOPE)) * (up + 1.0)
