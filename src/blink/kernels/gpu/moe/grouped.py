# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
"""The mixture-of-experts MLP on the GPU: routing, two grouped GEMMs (the first with the activation), weighted sum.

Grids are sized for the worst distribution over experts; programs find their tile in the experts' counts. Each token's
results are summed in rank order, so nothing depends on the order in which programs run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.experts import ExpertWeights, PackedExperts, find_encoding, split_experts
from blink.formats.gguf_experts import GgufExperts
from blink.kernels.gpu.activation import activate, multiply
from blink.kernels.gpu.gemm.dequantize import dequantize_fp8
from blink.kernels.gpu.moe.grouped_gguf import multiply_gguf_experts
from blink.kernels.gpu.moe.grouped_packed import multiply_packed
from blink.kernels.gpu.moe.routing import Routes, find_tile, route
from blink.kernels.gpu.pdl import launch_options, overlap, start_pdl
from blink.kernels.operands import Activation


@dataclass(frozen=True, slots=True)
class Tiling:
    """Shape of one program's tile: rows of tokens, columns of the result, steps of the inner dimension."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


class AddedPairs(Protocol):
    """What is added to results of pairs of a token and an expert."""

    def add(self, result: Tensor, x: Tensor, weight: ExpertWeights, *, pairs_per_row: int) -> None:
        """Add to result [pairs, out], in place, what belongs to row pair // pairs_per_row of x times a weight."""
        ...


class RoutedUpdates(Protocol):
    """What a step adds to results of experts' matrices."""

    def of_pairs(self, weights: Sequence[ExpertWeights], routes: Routes, top_k: int) -> AddedPairs | None:
        """Return what is added for pairs with experts of some weights; None: nothing, in all such steps."""
        ...


def moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    num_tokens: Tensor,
    *,
    top_k: int,
    renormalize: bool,
    activation: Activation = "silu",
    biases: tuple[Tensor, Tensor] | None = None,
    weights: Tensor | None = None,
    first: int = 0,
    updates: RoutedUpdates | None = None,
) -> Tensor:
    """Compute moe of contiguous tensors; num_tokens: int32 [1] on the device; rows beyond it become zero, cheaply."""
    assert x.is_contiguous()
    max_tokens, hidden = x.shape
    held, _, size = down.shape
    assert hidden % 16 == 0 and size % 16 == 0
    routes = route(router_logits, num_tokens, top_k).take(first, held)
    num_pairs = max_tokens * top_k
    # Pairs with experts that are elsewhere are not written, and add nothing.
    found = (x.new_empty if held == router_logits.shape[1] else x.new_zeros)(num_pairs, hidden)
    result = torch.empty_like(x)
    inner_bias, bias = biases or (None, None)
    pdl = bool(overlap(x, max_tokens))
    added = None if updates is None else updates.of_pairs((gate_up, down), routes, top_k)
    if added is None:
        inner = x.new_empty(num_pairs, size)
        multiply_grouped(
            x, gate_up, routes, inner, pairs_per_row=top_k, activation=activation, bias=inner_bias, pdl=pdl
        )
    else:  # before the activation
        wide = x.new_empty(num_pairs, 2 * size)
        multiply_grouped(x, gate_up, routes, wide, pairs_per_row=top_k, activation=None, bias=inner_bias, pdl=pdl)
        added.add(wide, x, gate_up, pairs_per_row=top_k)
        inner = activate(wide, activation)
    multiply_grouped(inner, down, routes, found, pairs_per_row=1, activation=None, bias=bias, pdl=pdl)
    if added is not None:
        added.add(found, inner, down, pairs_per_row=1)
    combine_weighted(found, routes.weights, weights, num_tokens, result, renormalize=renormalize)
    return result


def combine_weighted(
    found: Tensor, own: Tensor, weights: Tensor | None, num_tokens: Tensor, result: Tensor, *, renormalize: bool
) -> None:
    """Sum each token's results as combine() does, by its experts' own probabilities or by given weights as they are."""
    if weights is None:
        combine(found, own, num_tokens, result, renormalize=renormalize)
    else:
        combine(found, weights.flatten(), num_tokens, result, renormalize=False)


def combine(found: Tensor, weights: Tensor, num_tokens: Tensor, result: Tensor, *, renormalize: bool) -> None:
    """Sum each token's weighted results, found [tokens * top_k, hidden]; rows beyond num_tokens become zero."""
    max_tokens, hidden = result.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _combine[(max_tokens, triton.cdiv(hidden, block))](
        found,
        weights,
        num_tokens,
        result,
        hidden,
        TOP_K=len(weights) // max_tokens,
        RENORMALIZE=renormalize,
        BLOCK=block,
        num_warps=4,
        **overlap(found, max_tokens),
    )


def choose_tiling(
    num_pairs: int, num_experts: int, columns: int, depth: int, itemsizes: tuple[int, int], *, is_gated: bool
) -> Tiling:
    """Choose a tile that suits the mean number of pairs per expert; columns and depth divide the GEMM's.

    itemsizes: of activations and weights.
    """
    mean = num_pairs / num_experts
    if itemsizes[0] > 2:
        rows, wide, deep, num_warps, num_stages = 32, 32, 32, 4, 2
    elif mean <= 8:
        deep, num_stages = (256, 2) if itemsizes[1] == 1 and mean < 1 else (128, 4)
        rows, wide, num_warps = 16, 32 if is_gated else 64, 4
    elif mean <= 48:
        rows, wide, deep, num_warps, num_stages = 32, 64 if is_gated else 128, 128, 4, 3
    else:
        rows, wide, deep, num_warps, num_stages = 128, 64 if is_gated else 128, 64, 8, 3
    return Tiling(rows, _divisor(columns, wide), _divisor(depth, deep), num_warps, num_stages)


def _divisor(size: int, limit: int) -> int:
    return min(limit, size & -size)


def multiply_grouped(
    x: Tensor,
    weight: ExpertWeights,
    routes: Routes,
    result: Tensor,
    *,
    pairs_per_row: int,
    activation: Activation | None,
    bias: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Multiply row pair // pairs_per_row of x with its expert's weight into row pair of result.

    weight: [experts, columns, depth], or with an activation [experts, 2 * columns, depth], gates first; bias: [experts,
    columns or twice as many]. pdl: whether the kernel may start before the one in front of it has ended; needs
    a GPU from Hopper on.
    """
    if (encoding := find_encoding(weight)) is not None and encoding.grouped:
        options = {"pairs_per_row": pairs_per_row, "activation": activation, "pdl": pdl}
        _multiply_quantized(x, weight, routes, result, bias, options)
        return
    num_experts, max_tokens = routes.pairs.shape
    (num_pairs, columns), depth, is_gated = result.shape, x.shape[1], activation is not None
    values, scales = split_experts(weight)
    tiling = choose_tiling(num_pairs, num_experts, columns, depth, (x.itemsize, values.itemsize), is_gated=is_gated)
    # Every expert in use may leave one tile partly filled.
    max_tiles = min(num_experts, num_pairs) + num_pairs // tiling.rows
    _multiply_tile[(max_tiles, columns // tiling.columns)](
        x, values, values if scales is None else scales, values if bias is None else bias,
        routes.pairs, routes.counts, result, max_tokens, num_experts,
        PAIRS_PER_ROW=pairs_per_row,
        IS_GATED=is_gated,
        ACTIVATION=activation,
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        SIZE=columns,
        DEPTH=depth,
        ROWS_BLOCK=tiling.rows,
        COLUMNS_BLOCK=tiling.columns,
        DEPTH_BLOCK=tiling.depth,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        FAST=x.is_cuda and x.dtype == torch.bfloat16,
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(pdl=pdl),
    )  # fmt: skip


def _multiply_quantized(
    x: Tensor, weight: ExpertWeights, routes: Routes, result: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> None:
    """Do the same with experts whose groups of columns have scales; options: the rest that is given."""
    encoding = find_encoding(weight)
    assert encoding is not None
    if encoding.format.ggml < 0:
        multiply_packed(x, cast("PackedExperts", weight), routes, result, bias=bias, **options)
        return
    assert bias is None  # no model of a GGUF file has any
    multiply_gguf_experts(x, cast("GgufExperts", weight), routes, result, **options)


@triton.jit
def _multiply_tile(
    x, weight, scales, bias, pairs, counts, result, max_tokens, num_experts,
    PAIRS_PER_ROW: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, DEPTH: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, DEPTH_BLOCK: tl.constexpr, EXPERTS_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one expert's GEMM; gated weights are [2 * SIZE, DEPTH], gate first."""
    if PDL:
        start_pdl()
    expert, row, count = find_tile(counts, num_experts, ROWS_BLOCK, EXPERTS_BLOCK)
    if expert >= num_experts:
        return
    rows = row + tl.arange(0, ROWS_BLOCK)
    pair = tl.load(pairs + expert.to(tl.int64) * max_tokens + rows, mask=rows < count, other=0)
    column = tl.program_id(1) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    step = tl.arange(0, DEPTH_BLOCK)
    left = x + (pair // PAIRS_PER_ROW).to(tl.int64)[:, None] * DEPTH + step[None, :]
    HEIGHT: tl.constexpr = 2 * SIZE if IS_GATED else SIZE
    right = weight + expert.to(tl.int64) * (HEIGHT * DEPTH) + column[None, :] * DEPTH + step[:, None]
    inside = (rows < count)[:, None]
    total = tl.zeros((ROWS_BLOCK, COLUMNS_BLOCK), tl.float32)
    gated = tl.zeros((ROWS_BLOCK, COLUMNS_BLOCK), tl.float32)
    for start in range(0, DEPTH, DEPTH_BLOCK):
        values = tl.load(left + start, mask=inside, other=0.0)
        weights = _load_weights(right + start, values.dtype, HAS_SCALES, FAST)
        total = tl.dot(values, weights, total, input_precision=PRECISION)
        if IS_GATED:
            weights = _load_weights(right + SIZE * DEPTH + start, values.dtype, HAS_SCALES, FAST)
            gated = tl.dot(values, weights, gated, input_precision=PRECISION)
    if HAS_SCALES:
        scales += expert.to(tl.int64) * HEIGHT + column
        total *= tl.load(scales)[None, :]
        if IS_GATED:
            gated *= tl.load(scales + SIZE)[None, :]
    if HAS_BIAS:
        bias += expert.to(tl.int64) * HEIGHT + column
        total += tl.load(bias).to(tl.float32)[None, :]
        if IS_GATED:
            gated += tl.load(bias + SIZE).to(tl.float32)[None, :]
    if IS_GATED:
        total = multiply(total, gated, ACTIVATION)
    tl.store(result + pair.to(tl.int64)[:, None] * SIZE + column[None, :], total, mask=inside)


@triton.jit
def _load_weights(places, DTYPE: tl.constexpr, IS_FP8: tl.constexpr, FAST: tl.constexpr):
    weights = tl.load(places)
    return dequantize_fp8(weights, DTYPE, FAST) if IS_FP8 else weights.to(DTYPE)


@triton.jit
def _combine(
    found, weights, num_tokens, result, hidden, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Sum one token's weighted results."""
    if PDL:
        start_pdl()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    if token < tl.load(num_tokens):
        total = sum_found(found, weights, token, hidden, column, TOP_K, RENORMALIZE, BLOCK)
    tl.store(result + token * hidden + column, total, mask=inside)


@triton.jit
def sum_found(
    found, weights, token, hidden, column, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return some columns of the weighted sum of one token's results; those beyond hidden are undefined."""
    total = tl.zeros((BLOCK,), tl.float32)
    mass = 0.0
    for rank in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + rank)
        mass += weight
        place = found + (token * TOP_K + rank) * hidden + column
        total += weight * tl.load(place, mask=column < hidden).to(tl.float32)
    if RENORMALIZE:
        total = tl.math.div_rn(total, mass + tl.zeros_like(total))
    return total
