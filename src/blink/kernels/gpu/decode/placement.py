# SPDX-License-Identifier: Apache-2.0
"""Rows laid behind one another by the experts that they choose, as grouped_gemm.py wants them."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.decode.gemm_planes import new_rows
from blink.kernels.gpu.decode.grouped_gemm import count_places
from blink.kernels.gpu.decode.launch import compile_kernel, launch
from blink.kernels.gpu.moe_routing import Routes, allocate_routes

_ROWS = (8, 16, 32, 64, 128, 256)  # that there are kernels for
_LANE_EXPERTS = 64  # that a warp looks at together


def place(
    logits: Tensor, x: Tensor, rates: Tensor | None, num_tokens: Tensor, top_k: int, *, planes: bool
) -> tuple[Tensor, Routes]:
    """Return rows x [rows, hidden] times their rates, or planes of them, by the experts that they choose:
    [experts * places, hidden].

    logits: [rows, experts], of which there is an even number; rates: float32 [rows], None for ones; rows beyond
    num_tokens (int32 [1]) choose none.
    """
    (rows, num_experts), hidden = logits.shape, x.shape[1]
    assert num_experts % 2 == 0 and hidden % 8 == 0 and logits.dtype == x.dtype == torch.bfloat16
    assert logits.is_contiguous() and x.is_contiguous() and (rates is None or rates.dtype == torch.float32)
    places = count_places(rows)
    placed = new_rows(x, num_experts * places, hidden, planes=planes)
    routes = allocate_routes(logits, top_k, places)
    arguments = args(
        "PlacementArgs",
        logits=logits,
        num_tokens=num_tokens,
        x=x,
        rates=rates,
        weights=routes.weights,
        pairs=routes.pairs,
        counts=routes.counts,
        out=placed,
        rows=rows,
        experts=num_experts,
        hidden=hidden,
        places=places,
    )
    padded = next(size for size in _ROWS if rows <= size)
    sizes = (padded, -(-num_experts // _LANE_EXPERTS), top_k, str(planes).lower())
    kernel = compile_kernel(f"blink::place_rows<{', '.join(map(str, sizes))}>")
    threads = 512 if padded > 64 else 256  # csrc/gpu/decode/placement.cuh's PlacementShape
    launch(kernel, (num_experts, 1), threads, arguments)
    return placed, routes
