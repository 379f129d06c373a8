# SPDX-License-Identifier: Apache-2.0
"""Rows laid behind one another by the experts that they choose, as grouped_gemm.py wants them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blink.kernels.gpu.decode.gemm_planes import new_rows
from blink.kernels.gpu.decode.grouped_gemm import count_places
from blink.kernels.gpu.decode.launch import address, compile_kernel, launch
from blink.kernels.gpu.moe_routing import Routes, allocate_routes

_ROWS = (8, 16, 32, 64, 128, 256)  # that there are kernels for
_LANE_EXPERTS = 64  # that a warp looks at together


class _Arguments(ctypes.Structure):  # csrc/gpu/decode/placement.cuh's PlacementArgs
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("places", ctypes.c_int),
    ]


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
    arguments = _Arguments(
        logits.data_ptr(),
        num_tokens.data_ptr(),
        x.data_ptr(),
        address(rates),
        routes.weights.data_ptr(),
        routes.pairs.data_ptr(),
        routes.counts.data_ptr(),
        placed.data_ptr(),
        rows,
        num_experts,
        hidden,
        places,
    )
    padded = next(size for size in _ROWS if rows <= size)
    sizes = (padded, -(-num_experts // _LANE_EXPERTS), top_k, str(planes).lower())
    kernel = compile_kernel(f"blink::place_rows<{', '.join(map(str, sizes))}>")
    threads = 512 if padded > 64 else 256  # csrc/gpu/decode/placement.cuh's PlacementShape
    launch(kernel, (num_experts, 1), threads, arguments)
    return placed, routes
