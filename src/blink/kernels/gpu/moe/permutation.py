# SPDX-License-Identifier: Apache-2.0
"""Rows grouped by the experts that they choose, as grouped_gemm.py wants them."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.gemm.decode_hi_lo import new_rows
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.moe.grouped_gemm import count_places
from blink.kernels.gpu.moe.routing import Routes, allocate_routes

_ROWS = (8, 16, 32, 64, 128, 256)  # that there are kernels for
_LANE_EXPERTS = 64  # that a warp looks at together


def permute(
    logits: Tensor, x: Tensor, inverse_rms: Tensor | None, num_tokens: Tensor, top_k: int, *, hi_lo: bool
) -> tuple[Tensor, Routes]:
    """Return rows x [rows, hidden] times their inverse_rms, or hi/lo FP8 of them, by the experts that they choose:
    [experts * places, hidden].

    logits: [rows, experts], of which there is an even number; inverse_rms: float32 [rows], None for ones; rows beyond
    num_tokens (int32 [1]) choose none.
    """
    (rows, num_experts), hidden = logits.shape, x.shape[1]
    assert num_experts % 2 == 0 and hidden % 8 == 0 and logits.dtype == x.dtype == torch.bfloat16
    assert logits.is_contiguous() and x.is_contiguous() and (inverse_rms is None or inverse_rms.dtype == torch.float32)
    places = count_places(rows)
    permuted = new_rows(x, num_experts * places, hidden, hi_lo=hi_lo)
    routes = allocate_routes(logits, top_k, places)
    arguments = args(
        "PermutationArgs",
        logits=logits,
        num_tokens=num_tokens,
        x=x,
        inverse_rms=inverse_rms,
        weights=routes.weights,
        pairs=routes.pairs,
        counts=routes.counts,
        out=permuted,
        rows=rows,
        experts=num_experts,
        hidden=hidden,
        places=places,
    )
    padded = next(size for size in _ROWS if rows <= size)
    sizes = (padded, -(-num_experts // _LANE_EXPERTS), top_k, str(hi_lo).lower())
    kernel = compile_kernel(f"blink::permute_rows<{', '.join(map(str, sizes))}>")
    threads = 512 if padded > 64 else 256  # csrc/kernels/moe/permutation.cuh's PermutationShape
    launch(kernel, (num_experts, 1), threads, arguments)
    return permuted, routes
