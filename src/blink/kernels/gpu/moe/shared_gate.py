# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false, reportOperatorIssue=false
"""The gate of an expert that all tokens have, by one kernel with the norm that it reads or the sum of all experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.pdl import launch_options, overlap, start_pdl


def scale_by_gate(inner: Tensor, x: Tensor, norm_weight: Tensor, eps: float, gate: Tensor) -> None:
    """Multiply each row of inner [rows, size] by the sigmoid of rms_norm(x) @ gate, in place.

    x: [rows, hidden]; norm_weight, gate: [hidden].
    """
    rows, hidden = x.shape
    assert inner.is_contiguous() and x.is_contiguous() and inner.shape[0] == rows and gate.shape == (hidden,)
    size = inner.shape[1]
    _scale[(rows,)](
        *(inner, x, norm_weight, gate, eps),
        SIZE=size,
        HIDDEN=hidden,
        SIZE_BLOCK=triton.next_power_of_2(size),
        HIDDEN_BLOCK=triton.next_power_of_2(hidden),
        PDL=x.is_cuda,
        num_warps=8,
        **launch_options(pdl=x.is_cuda),
    )


@triton.jit
def _scale(
    inner, x, norm_weight, gate, eps,
    SIZE: tl.constexpr, HIDDEN: tl.constexpr, SIZE_BLOCK: tl.constexpr, HIDDEN_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scale one row."""
    if PDL:
        start_pdl()
    row = tl.program_id(0).to(tl.int64)
    place, column = tl.arange(0, HIDDEN_BLOCK), tl.arange(0, SIZE_BLOCK)
    values = tl.load(x + row * HIDDEN + place, place < HIDDEN, other=0.0).to(tl.float32)
    weights = tl.load(norm_weight + place, place < HIDDEN, other=0.0).to(tl.float32)
    gates = tl.load(gate + place, place < HIDDEN, other=0.0).to(tl.float32)
    at = inner + row * SIZE + column
    scaled = tl.load(at, column < SIZE, other=0.0).to(tl.float32)
    rate = tl.rsqrt(tl.sum(values * values) / HIDDEN + eps)
    score = tl.sum(values * weights * gates) * rate
    tl.store(at, scaled / (1.0 + tl.exp(-score)), column < SIZE)


def add_shared(found: Tensor, same: Tensor, x: Tensor, gate: Tensor | None) -> Tensor:
    """Compute kernels/shared_expert.py's sum in place."""
    (rows, hidden), gates = found.shape, gate is not None
    assert found.is_contiguous() and same.is_contiguous() and x.is_contiguous() and same.shape == x.shape == found.shape
    _add[(rows,)](
        *(found, same, x, x if gate is None else gate),
        HIDDEN=hidden,
        HAS_GATE=gates,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=8,
        **overlap(found, rows),
    )
    return found


@triton.jit
def _add(
    found, same, x, gate, HIDDEN: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):  # fmt: skip
    """Add one row."""
    if PDL:
        start_pdl()
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + column
    added = tl.load(same + place, inside, other=0.0).to(tl.float32)
    total = tl.load(found + place, inside, other=0.0).to(tl.float32)
    if HAS_GATE:
        values = tl.load(x + place, inside, other=0.0).to(tl.float32)
        score = tl.sum(values * tl.load(gate + column, inside, other=0.0).to(tl.float32))
        added = added / (1.0 + tl.exp(-score))
    tl.store(found + place, total + added, inside)
