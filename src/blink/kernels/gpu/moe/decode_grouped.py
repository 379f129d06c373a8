# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The mixture-of-experts MLP of more rows that decode, from the router's logits on, by grouped GEMMs.

It leaves and takes the norms on both sides as the GEMMs of gemm.py do. GEMMs are those of grouped_gemm.py, whose rows
are copied to their experts before, or those of grouped.py.

Its launches use PDL like those of its neighbours, so nothing may be read or written before the wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.experts import ExpertWeights
from blink.formats.schemes import FormatId
from blink.kernels.gpu.gemm.decode import NormInput, new_square_sums
from blink.kernels.gpu.gemm.decode_hi_lo import new_inputs, order_number
from blink.kernels.gpu.gemm.hi_lo import store_hi_lo
from blink.kernels.gpu.moe.grouped import multiply_grouped, sum_found
from blink.kernels.gpu.moe.permuted_experts import multiply_permuted
from blink.kernels.gpu.moe.routing import Routes, allocate_routes, collect_pairs
from blink.kernels.gpu.pdl import launch_options, start_pdl

_COLUMNS = 512  # of a row, that a program adds up


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts, whose weights are those of blink.kernels.moe, and how a row's results are weighed."""

    gate_up: ExpertWeights
    down: ExpertWeights
    top_k: int
    renormalize: bool


def add_grouped_experts(
    residual: Tensor,
    x: Tensor,
    inverse_rms: Tensor,
    logits: Tensor,
    mixture: Mixture,
    num_tokens: Tensor,
    next_norm: Tensor,
    *,
    permuted: bool,
    hi_lo: FormatId | None = None,
) -> NormInput:
    """Add the mixture of experts of a norm to residual [rows, hidden] in place; return the next norm of it.

    x: [rows, hidden], the norm of residual but for its factor inverse_rms, float32 [rows]; logits: the router's, of
    that norm; num_tokens: int32 [1], of which rows beyond it keep their residual; permuted: rows are copied to their
    experts, which grouped_gemm.py has to take, or else gathered by the GEMMs; hi_lo: write the next norm as hi/lo FP8
    for such weights.
    """
    assert logits.is_contiguous() and residual.is_contiguous() and x.is_contiguous()
    rows, hidden = residual.shape
    top_k, pdl = mixture.top_k, residual.is_cuda
    experts = mixture.gate_up, mixture.down
    if permuted:
        found, weights = multiply_permuted(logits, x, inverse_rms, num_tokens, experts, top_k)
    else:
        found, weights = _multiply_gathered(logits, x, inverse_rms, num_tokens, mixture)
    parts = triton.cdiv(hidden, _COLUMNS)
    result = NormInput(new_inputs(residual, hi_lo=hi_lo), new_square_sums(residual, parts))
    _add_found[(rows, parts)](
        found,
        weights,
        num_tokens,
        residual,
        next_norm,
        result.x,
        result.square_sums,
        hidden,
        result.square_sums.shape[1],
        result.x[0].numel(),
        TOP_K=top_k,
        RENORMALIZE=mixture.renormalize,
        ORDER=order_number(hi_lo),
        BLOCK=_COLUMNS,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl=pdl),
    )
    return result


def _multiply_gathered(
    logits: Tensor, x: Tensor, inverse_rms: Tensor, num_tokens: Tensor, mixture: Mixture
) -> tuple[Tensor, Tensor]:
    """Return each pair's result [rows * top_k, hidden] and its expert's probability; the GEMMs gather their rows."""
    top_k, pdl = mixture.top_k, logits.is_cuda
    hidden, size = mixture.down.shape[1:]
    normed, routes = _route(logits, x, inverse_rms, num_tokens, top_k)
    inner, found = x.new_empty(len(x) * top_k, size), x.new_empty(len(x) * top_k, hidden)
    multiply_grouped(normed, mixture.gate_up, routes, inner, pairs_per_row=top_k, activation="silu", pdl=pdl)
    multiply_grouped(inner, mixture.down, routes, found, pairs_per_row=1, activation=None, pdl=pdl)
    return found, routes.weights


def _route(logits: Tensor, x: Tensor, inverse_rms: Tensor, num_tokens: Tensor, top_k: int) -> tuple[Tensor, Routes]:
    """Return the normalised rows and which experts they choose, by one kernel."""
    rows, num_experts = logits.shape
    hidden = x.shape[1]
    normed, routes = torch.empty_like(x), allocate_routes(logits, top_k)
    _route_and_normalize[(num_experts + rows,)](
        logits,
        num_tokens,
        routes,
        rows,
        num_experts,
        x,
        inverse_rms,
        normed,
        hidden,
        TOP_K=top_k,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TOKENS_BLOCK=max(32, triton.next_power_of_2(rows)),
        BLOCK=triton.next_power_of_2(hidden),
        PDL=logits.is_cuda,
        num_warps=8,
        **launch_options(pdl=logits.is_cuda),
    )
    return normed, routes


@triton.jit
def _route_and_normalize(
    logits, num_tokens, routes, max_tokens, num_experts, x, inverse_rms, result, hidden,
    TOP_K: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TOKENS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Collect one expert's pairs, or apply the rate of one row's norm."""
    if PDL:
        start_pdl()
    program = tl.program_id(0)
    if program < num_experts:
        collect_pairs(program, logits, num_tokens, routes, max_tokens, num_experts, TOP_K, EXPERTS_BLOCK, TOKENS_BLOCK)
    else:
        row = program - num_experts
        column = tl.arange(0, BLOCK)
        inside = column < hidden
        place = row.to(tl.int64) * hidden + column
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + place, values * tl.load(inverse_rms + row), mask=inside)


@triton.jit
def _add_found(
    found, weights, num_tokens, residual, next_norm, next_x, next_square_sums, hidden, places, half_size,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add weighted results to some columns of one row's residual and prepare the next norm."""
    if PDL:
        start_pdl()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    place = row * hidden + column
    # What padding's places hold is loaded like the rest, which need not wait for num_tokens, and dropped.
    is_token = row < tl.load(num_tokens)
    value = tl.load(residual + place, mask=inside, other=0.0)
    total = sum_found(found, weights, row, hidden, column, TOP_K, RENORMALIZE, BLOCK)
    value = tl.where(is_token, (value.to(tl.float32) + total).to(residual.dtype.element_ty), value)
    tl.store(residual + place, value, mask=inside)
    rounded = value.to(tl.float32)
    scale = tl.load(next_norm + column, mask=inside, other=0.0).to(tl.float32)
    if ORDER:
        values = (rounded * scale).to(next_norm.dtype.element_ty)
        store_hi_lo(next_x + row * hidden, half_size, column, values, inside, ORDER=ORDER)
    else:
        tl.store(next_x + place, rounded * scale, mask=inside)
    tl.store(next_square_sums + tl.program_id(1) * places + row, tl.sum(rounded * rounded, axis=0))
