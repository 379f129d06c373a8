# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""Rows laid behind one another by the experts that they choose, as grouped_gemm.py wants them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.decode.gemm import Normed
from blink.kernels.gpu.decode.gemm_planes import new_rows
from blink.kernels.gpu.decode.grouped_gemm import count_places
from blink.kernels.gpu.decode.planes import store_planes
from blink.kernels.gpu.moe_routing import Routes, allocate_routes, choose_tokens
from blink.kernels.gpu.programmatic import launch_options, start_programmatic

_COLUMNS = 512  # of its rows, that a program copies


def place(
    logits: Tensor, normed: Normed, eps: float, num_tokens: Tensor, top_k: int, *, planes: bool
) -> tuple[Tensor, Routes]:
    """Return the normalised rows, or planes of them, by the experts they choose: [experts * places, hidden]."""
    (rows, num_experts), hidden = logits.shape, normed.x.shape[1]
    places = count_places(rows)
    x = new_rows(normed.x, num_experts * places, hidden, planes=planes)
    routes = allocate_routes(logits, top_k, places)
    parts, squares_pitch = normed.squares.shape
    _route_and_place[(num_experts, triton.cdiv(hidden, _COLUMNS))](
        logits,
        num_tokens,
        routes,
        rows,
        num_experts,
        normed.x,
        normed.squares,
        x,
        hidden,
        places,
        parts,
        squares_pitch,
        eps,
        TOP_K=top_k,
        PLANES=planes,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TOKENS_BLOCK=max(16, triton.next_power_of_2(rows)),
        PARTS_BLOCK=triton.next_power_of_2(parts),
        PLACES_BLOCK=8,
        BLOCK=_COLUMNS,
        PROGRAMMATIC=logits.is_cuda,
        num_warps=4,
        **launch_options(programmatic=logits.is_cuda),
    )
    return x, routes


@triton.jit
def _route_and_place(
    logits, num_tokens, routes, max_tokens, num_experts, x, squares, result, hidden, places, parts, squares_pitch, eps,
    TOP_K: tl.constexpr, PLANES: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TOKENS_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, PLACES_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """Collect one expert's pairs, and some columns of its rows with the rates of their norms."""
    if PROGRAMMATIC:
        start_programmatic()
    expert = tl.program_id(0)
    limit = tl.minimum(tl.load(num_tokens), max_tokens)
    token, pair, weight, chosen = choose_tokens(
        expert, 0, limit, logits, max_tokens, num_experts, TOP_K, EXPERTS_BLOCK, TOKENS_BLOCK
    )
    position = tl.where(chosen, tl.cumsum(chosen.to(tl.int32), axis=0) - 1, -1)
    count = tl.sum(chosen.to(tl.int32), axis=0)
    if tl.program_id(1) == 0:
        tl.store(routes.weights + pair, weight, mask=chosen)
        tl.store(routes.pairs + expert * places + position, pair, mask=chosen)
        tl.store(routes.counts + expert, count)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    part = tl.arange(0, PARTS_BLOCK)[None, :]
    for start in range(0, count, PLACES_BLOCK):
        place = start + tl.arange(0, PLACES_BLOCK)
        source = tl.sum(tl.where(position[None, :] == place[:, None], token[None, :], 0), axis=1)
        inside = (place < count)[:, None] & (column < hidden)
        values = tl.load(x + source[:, None] * hidden + column, mask=inside, other=0.0)
        known = (place < count)[:, None] & (part < parts)
        square = tl.sum(tl.load(squares + part * squares_pitch + source[:, None], mask=known, other=0.0), axis=1)
        values = (values.to(tl.float32) * tl.rsqrt(square / hidden + eps)[:, None]).to(x.dtype.element_ty)
        row = (expert.to(tl.int64) * places + place)[:, None] * hidden
        if PLANES:
            plane_size = num_experts.to(tl.int64) * places * hidden
            store_planes(result + row, plane_size, column, values, inside, ORDER=0)
        else:
            tl.store(result + row + column, values, mask=inside)
