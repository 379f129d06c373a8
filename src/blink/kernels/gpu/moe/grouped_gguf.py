# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The grouped GEMMs of grouped.py with experts in GGUF's formats, which become 16 bits in registers.

As gemm/gguf.py's GEMM it is transposed, weight * x. Gates and ups may have different formats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.gguf import BLOCK
from blink.formats.gguf_experts import GgufExperts
from blink.formats.schemes import GGUF_UNIT
from blink.kernels.gpu.activation import multiply
from blink.kernels.gpu.gemm.gguf import decode, list_arrays, load_codes, load_top, load_words
from blink.kernels.gpu.gemm.gguf_gemv import NUM_WARPS, choose_gemv_tile, dot_columns
from blink.kernels.gpu.moe.routing import Routes, find_tile
from blink.kernels.gpu.pdl import launch_options, start_pdl
from blink.kernels.operands import Activation

_UNIT, _BLOCK = tl.constexpr(GGUF_UNIT), tl.constexpr(BLOCK)
_MIN_PROGRAMS = 256  # about two for each SM
_MAX_GEMV_PAIRS = 32  # of all rows and experts


@dataclass(frozen=True, slots=True)
class GgufExpertTiling:
    """Shape of one program's tile: rows of tokens, columns of the result, units of the inner dimension at a time."""

    rows: int
    columns: int
    units: int
    num_warps: int
    num_stages: int


def choose_gguf_expert_tiling(num_pairs: int, num_experts: int, columns: int, *, is_gated: bool) -> GgufExpertTiling:
    """Choose a tile that suits the mean number of pairs per expert; its columns divide the GEMM's."""
    mean = num_pairs / num_experts
    if mean <= 8:
        tiling = GgufExpertTiling(16, 32, 4, 2, 3)
        if num_pairs * columns < _MIN_PROGRAMS * tiling.columns:
            tiling = replace(tiling, columns=16, num_warps=1)
    elif mean <= 48:
        tiling = GgufExpertTiling(32, 64, 2, 4, 3)
    elif is_gated:
        tiling = GgufExpertTiling(64, 64, 2, 4, 3)
    else:
        tiling = GgufExpertTiling(128, 128, 1, 8, 3)
    return replace(tiling, columns=min(tiling.columns, columns & -columns))


def multiply_gguf_experts(
    x: Tensor,
    weight: GgufExperts,
    routes: Routes,
    result: Tensor,
    *,
    pairs_per_row: int,
    activation: Activation | None,
    pdl: bool = False,
    tiling: GgufExpertTiling | None = None,
) -> None:
    """Do what multiply_grouped() of grouped.py describes, without biases; tiling: None for one that suits."""
    num_experts, (num_pairs, columns), is_gated = len(routes.pairs), result.shape, activation is not None
    depth = x.shape[1]
    assert weight.shape == (num_experts, columns * (1 + is_gated), depth) and len(weight.stacks) == 1 + is_gated
    operands = _list_operands(x, weight, routes, result)
    sizes = _list_sizes(weight, num_experts, columns, pairs_per_row=pairs_per_row, activation=activation, pdl=pdl)
    if tiling is None and num_pairs <= _MAX_GEMV_PAIRS:
        # A GEMV for each pair: experts that several pairs have are read from L2 again.
        wide, units = choose_gemv_tile(depth)
        grid = num_pairs, triton.cdiv(columns, wide)
        _multiply_expert_row[grid](*operands, COLUMNS=wide, UNITS=units, num_warps=NUM_WARPS, **sizes)
        return
    tiling = tiling or choose_gguf_expert_tiling(num_pairs, num_experts, columns, is_gated=is_gated)
    # Every expert in use may leave one tile partly filled.
    max_tiles = min(num_experts, num_pairs) + num_pairs // tiling.rows
    _multiply_expert_tile[(max_tiles, columns // tiling.columns)](
        *operands,
        ROWS_BLOCK=tiling.rows,
        COLUMNS_BLOCK=tiling.columns,
        UNITS=tiling.units,
        EVEN_DEPTH=depth % (tiling.units * GGUF_UNIT) == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **sizes,
    )


def _list_operands(x: Tensor, weight: GgufExperts, routes: Routes, result: Tensor) -> tuple[Tensor | int, ...]:
    """Return the first arguments of both kernels."""
    num_experts, max_tokens = routes.pairs.shape
    arrays = (*list_arrays(weight.stacks[0]), *list_arrays(weight.stacks[-1]))
    return (x, *arrays, routes.pairs, routes.counts, result, max_tokens, num_experts)


def _list_sizes(
    weight: GgufExperts,
    num_experts: int,
    columns: int,
    *,
    pairs_per_row: int,
    activation: Activation | None,
    pdl: bool,
) -> dict[str, Any]:
    """Return what both kernels are compiled for, and how they are launched."""
    return {
        "PAIRS_PER_ROW": pairs_per_row,
        "ACTIVATION": activation,
        "FORMAT": weight.stacks[0].format.name,
        "UP_FORMAT": "" if activation is None else weight.stacks[1].format.name,
        "SIZE": columns,
        "DEPTH": weight.shape[2],
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "PDL": pdl,
        **launch_options(pdl=pdl),
    }


@triton.jit
def _multiply_expert_row(
    x, codes, high, words, tops, up_codes, up_high, up_words, up_tops, pairs, counts, result, max_tokens, num_experts,
    PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, FORMAT: tl.constexpr, UP_FORMAT: tl.constexpr,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one pair's result, with an up format that of the fused gate-up GEMM."""
    if PDL:
        start_pdl()
    expert, row, _ = find_tile(counts, num_experts, 1, EXPERTS_BLOCK)
    if expert >= num_experts:
        return
    pair = tl.load(pairs + expert.to(tl.int64) * max_tokens + row).to(tl.int64)
    start = tl.program_id(1) * COLUMNS
    inputs = x + pair // PAIRS_PER_ROW * DEPTH
    codes, high, words, tops = _find_arrays(expert, codes, high, words, tops, SIZE, DEPTH, FORMAT)
    total = dot_columns(inputs, codes, high, words, tops, start, SIZE, DEPTH, COLUMNS, UNITS, FORMAT)
    if UP_FORMAT != "":
        codes, high, words, tops = _find_arrays(expert, up_codes, up_high, up_words, up_tops, SIZE, DEPTH, UP_FORMAT)
        gated = dot_columns(inputs, codes, high, words, tops, start, SIZE, DEPTH, COLUMNS, UNITS, UP_FORMAT)
        total = multiply(total, gated, ACTIVATION)
    column = start + tl.arange(0, COLUMNS)
    tl.store(result + pair * SIZE + column, total, mask=column < SIZE)


@triton.jit
def _multiply_expert_tile(
    x, codes, high, words, tops, up_codes, up_high, up_words, up_tops, pairs, counts, result, max_tokens, num_experts,
    PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, FORMAT: tl.constexpr, UP_FORMAT: tl.constexpr,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, ROWS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr,
    UNITS: tl.constexpr, EVEN_DEPTH: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one expert's GEMM, with an up format that of the fused gate-up GEMM."""
    if PDL:
        start_pdl()
    expert, row, count = find_tile(counts, num_experts, ROWS_BLOCK, EXPERTS_BLOCK)
    if expert >= num_experts:
        return
    rows = row + tl.arange(0, ROWS_BLOCK)
    inside = rows < count
    pair = tl.load(pairs + expert.to(tl.int64) * max_tokens + rows, mask=inside, other=0)
    column = tl.program_id(1) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    inputs = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * DEPTH
    own = _find_arrays(expert, codes, high, words, tops, SIZE, DEPTH, FORMAT)
    total = tl.zeros((COLUMNS_BLOCK, ROWS_BLOCK), tl.float32)
    ups, gated = own, total
    if UP_FORMAT != "":
        ups = _find_arrays(expert, up_codes, up_high, up_words, up_tops, SIZE, DEPTH, UP_FORMAT)
    for step in range((DEPTH + _UNIT * UNITS - 1) // (_UNIT * UNITS)):
        total = _add_units(total, inputs, inside, own, column, step, SIZE, DEPTH, UNITS, EVEN_DEPTH, FORMAT, PRECISION)
        if UP_FORMAT != "":
            gated = _add_units(
                gated, inputs, inside, ups, column, step, SIZE, DEPTH, UNITS, EVEN_DEPTH, UP_FORMAT, PRECISION
            )
    if UP_FORMAT != "":
        total = multiply(total, gated, ACTIVATION)
    tl.store(result + pair.to(tl.int64)[None, :] * SIZE + column[:, None], total, mask=inside[None, :])


@triton.jit
def _find_arrays(expert, codes, high, words, tops, SIZE: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr):
    """Return where an expert's arrays begin."""
    BLOCKS: tl.constexpr = (DEPTH + _BLOCK - 1) // _BLOCK
    CODES: tl.constexpr = 64 if FORMAT == "Q8_0" else 32  # bytes of a unit
    HIGH: tl.constexpr = 16 if FORMAT == "Q6_K" else 8
    WORDS: tl.constexpr = 2 if FORMAT == "Q4_1" else 1
    units = expert.to(tl.int64) * ((DEPTH + _UNIT - 1) // _UNIT * SIZE)
    return codes + units * CODES, high + units * HIGH, words + units * WORDS, tops + expert * (BLOCKS * SIZE)


@triton.jit
def _add_units(
    total, inputs, inside, arrays, column, step, SIZE: tl.constexpr, DEPTH: tl.constexpr, UNITS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr, FORMAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the GEMM with some units of an expert's rows."""
    codes, high, words, tops = arrays
    PIECES: tl.constexpr = 4 if FORMAT == "Q6_K" else 2
    PIECE: tl.constexpr = _UNIT // PIECES  # columns of the weight that are multiplied at once
    LAST: tl.constexpr = (DEPTH + _UNIT - 1) // _UNIT - 1
    top = load_top(tops, step * UNITS * _UNIT // _BLOCK * SIZE + column, FORMAT)
    for index in tl.static_range(UNITS):
        unit = step * UNITS + index
        # What lies behind the last unit is multiplied by zeros: it must be finite, as the last is.
        known = unit if EVEN_DEPTH else tl.minimum(unit, LAST)
        first, second, more = load_codes(codes, high, known, SIZE, column, FORMAT)
        word, next_word = load_words(words, known, SIZE, column, FORMAT)
        for piece in tl.static_range(PIECES):
            k = unit * _UNIT + piece * PIECE + tl.arange(0, PIECE)[:, None]
            mask = inside[None, :] if EVEN_DEPTH else inside[None, :] & (k < DEPTH)
            values = tl.load(inputs + k, mask=mask, other=0.0)
            weights = decode(first, second, more, word, next_word, top, piece, FORMAT)
            total = tl.dot(weights.to(values.dtype), values, total, input_precision=PRECISION)
    return total
