# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""The grouped GEMMs of moe.py with experts in 4 bits or in blocks of FP8, which become 16 bits in registers.

The GEMM is transposed, weight * x: tensor cores from Hopper on read the left operand from registers, where the
weights are, and the right one, the activations, from shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.experts import PackedExperts
from blink.formats.schemes import GROUP
from blink.kernels.gpu.activation import multiply
from blink.kernels.gpu.moe.routing import Routes, find_tile
from blink.kernels.gpu.pdl import launch_options, start_pdl
from blink.kernels.operands import Activation

_GROUP = tl.constexpr(GROUP)
# What _dequantize() says, on four bytes: the low halves in $0 and $1, the high ones in $2 and $3, two bfloat16 in each.
_SPREAD = """
{ .reg .b32 p, q, s, t;
prmt.b32 p, $4, 0, 0x4140;
prmt.b32 q, $4, 0, 0x4342;
"""
_INT4_ASSEMBLY = tl.constexpr(
    _SPREAD
    + """
lop3.b32 $0, p, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, q, 0x000f000f, 0x43004300, 0xea;
shr.u32 p, p, 4;
shr.u32 q, q, 4;
lop3.b32 $2, p, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, q, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 $0, $0, $5;
add.rn.bf16x2 $1, $1, $6;
add.rn.bf16x2 $2, $2, $7;
add.rn.bf16x2 $3, $3, $8; }
"""
)


def _place_mxfp4(result: str, source: str, magnitude: int, sign: int, factor: str) -> str:
    return f"""
shl.b32 s, {source}, {magnitude};
shl.b32 t, {source}, {sign};
and.b32 s, s, 0x01c001c0;
lop3.b32 t, t, 0x80008000, s, 0xea;
mul.rn.bf16x2 {result}, t, {factor};
"""


_MXFP4_ASSEMBLY = tl.constexpr(
    _SPREAD
    + _place_mxfp4("$0", "p", 6, 12, "$5")
    + _place_mxfp4("$1", "q", 6, 12, "$6")
    + _place_mxfp4("$2", "p", 2, 8, "$7")
    + _place_mxfp4("$3", "q", 2, 8, "$8")
    + "}"
)


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """Shape of one program's tile: rows of tokens, columns of the result."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def choose_packed_tiling(num_pairs: int, num_experts: int, columns: int, *, is_gated: bool) -> PackedTiling:
    """Choose a tile that suits the mean number of pairs per expert; its columns divide the GEMM's."""
    mean = num_pairs / num_experts
    if mean <= 8:
        rows, wide, num_warps, num_stages = 16, 32, 2, 4
    elif mean <= 48:
        rows, wide, num_warps, num_stages = 32, 64, 4, 3
    elif is_gated:
        rows, wide, num_warps, num_stages = 64, 64, 4, 3
    else:
        rows, wide, num_warps, num_stages = 128, 128, 8, 3
    return PackedTiling(rows, min(wide, columns & -columns), num_warps, num_stages)


def multiply_packed(
    x: Tensor,
    weight: PackedExperts,
    routes: Routes,
    result: Tensor,
    *,
    pairs_per_row: int,
    activation: Activation | None,
    bias: Tensor | None,
    pdl: bool,
) -> None:
    """Do what multiply_grouped() of moe.py describes."""
    num_experts, max_tokens = routes.pairs.shape
    (num_pairs, columns), depth, is_gated = result.shape, x.shape[1], activation is not None
    assert weight.values.is_contiguous() and weight.groups.is_contiguous()
    tiling = choose_packed_tiling(num_pairs, num_experts, columns, is_gated=is_gated)
    # Every expert in use may leave one tile partly filled.
    max_tiles = min(num_experts, num_pairs) + num_pairs // tiling.rows
    _multiply_packed_tile[(max_tiles, columns // tiling.columns)](
        x,
        weight.values,
        weight.groups,
        weight.groups if weight.row_scales is None else weight.row_scales,
        weight.groups if bias is None else bias,
        routes.pairs,
        routes.counts,
        result,
        max_tokens,
        num_experts,
        PAIRS_PER_ROW=pairs_per_row,
        IS_GATED=is_gated,
        ACTIVATION=activation,
        FORMAT=weight.format.tag,
        HAS_BIAS=bias is not None,
        SIZE=columns,
        DEPTH=depth,
        ROWS_BLOCK=tiling.rows,
        COLUMNS_BLOCK=tiling.columns,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        FAST=x.is_cuda and x.dtype == torch.bfloat16,
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(pdl=pdl),
    )


@triton.jit
def _multiply_packed_tile(
    x, values, groups, row_scales, bias, pairs, counts, result, max_tokens, num_experts,
    PAIRS_PER_ROW: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, DEPTH: tl.constexpr, ROWS_BLOCK: tl.constexpr,
    COLUMNS_BLOCK: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one expert's GEMM; gated weights have 2 * SIZE rows, gates first."""
    if PDL:
        start_pdl()
    expert, row, count = find_tile(counts, num_experts, ROWS_BLOCK, EXPERTS_BLOCK)
    if expert >= num_experts:
        return
    rows = row + tl.arange(0, ROWS_BLOCK)
    inside = rows < count
    pair = tl.load(pairs + expert.to(tl.int64) * max_tokens + rows, mask=inside, other=0)
    column = tl.program_id(1) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    HEIGHT: tl.constexpr = 2 * SIZE if IS_GATED else SIZE
    GROUPS: tl.constexpr = (DEPTH + _GROUP - 1) // _GROUP
    GROUP_BYTES: tl.constexpr = _GROUP if FORMAT == "fp8" else _GROUP // 2
    PIECE: tl.constexpr = GROUP_BYTES if FORMAT == "fp8" else GROUP_BYTES // 2  # columns that are multiplied at once
    right = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * DEPTH
    left = values + expert.to(tl.int64) * (HEIGHT * GROUPS * GROUP_BYTES)
    left += column[:, None] * (GROUPS * GROUP_BYTES) + tl.arange(0, PIECE)[None, :]
    words = groups + expert.to(tl.int64) * (HEIGHT * GROUPS) + column
    UP: tl.constexpr = SIZE * GROUPS * GROUP_BYTES  # from a gate to its up
    total = tl.zeros((COLUMNS_BLOCK, ROWS_BLOCK), tl.float32)
    gated = tl.zeros((COLUMNS_BLOCK, ROWS_BLOCK), tl.float32)
    for group in range(GROUPS):
        word = tl.load(words + group * HEIGHT)
        word_up = tl.load(words + group * HEIGHT + SIZE) if IS_GATED else word
        from_group = left + group * GROUP_BYTES
        if FORMAT == "fp8":
            inputs = _load_inputs(right, inside, group * _GROUP, PIECE, DEPTH)
            total = _add_fp8(total, inputs, from_group, word, PRECISION)
            gated = _add_fp8(gated, inputs, from_group + UP, word_up, PRECISION) if IS_GATED else gated
        else:
            total, gated = _add_group(
                total, gated, right, inside, group * _GROUP, from_group, word, word_up,
                IS_GATED, FORMAT, DEPTH, PIECE, UP, PRECISION, FAST,
            )  # fmt: skip
    place = expert.to(tl.int64) * HEIGHT + column
    total = _finish(total, row_scales + place, bias + place, FORMAT, HAS_BIAS)
    if IS_GATED:
        gated = _finish(gated, row_scales + place + SIZE, bias + place + SIZE, FORMAT, HAS_BIAS)
        total = multiply(total, gated, ACTIVATION)
    tl.store(result + pair.to(tl.int64)[None, :] * SIZE + column[:, None], total, mask=inside[None, :])


@triton.jit
def _load_inputs(rows, inside, first, PIECE: tl.constexpr, DEPTH: tl.constexpr):
    """Return some k of rows' activations [PIECE, rows]; zeros behind the last."""
    k = first + tl.arange(0, PIECE)[:, None]
    return tl.load(rows + k, mask=inside[None, :] & (k < DEPTH), other=0.0)


@triton.jit
def _finish(total, row_scales, bias, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if FORMAT == "mxfp4":
        total *= tl.load(row_scales)[:, None]
    if HAS_BIAS:
        total += tl.load(bias).to(tl.float32)[:, None]
    return total


@triton.jit
def _add_fp8(total, inputs, values, scales, PRECISION: tl.constexpr):
    """Add the GEMM with FP8 weights at pointers [columns, k]; scales: float32 [columns], as bits."""
    weights = tl.load(values).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    weights *= scales.to(tl.float32, bitcast=True)[:, None]
    return tl.dot(weights.to(inputs.dtype), inputs, total, input_precision=PRECISION)


@triton.jit
def _add_group(
    total, gated, right, inside, first, codes, word, word_up,
    IS_GATED: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr, PIECE: tl.constexpr, UP: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add the GEMMs with a group of numbers of 4 bits: INT4 is scaled behind the GEMM, MXFP4 when dequantized."""
    part = tl.zeros_like(total) if FORMAT == "int4" else total
    part_up = tl.zeros_like(gated) if FORMAT == "int4" else gated
    for half in tl.static_range(2):
        k = first + half * 2 * PIECE
        low = _load_inputs(right, inside, k, PIECE, DEPTH)
        high = _load_inputs(right, inside, k + PIECE, PIECE, DEPTH)
        place = codes + half * PIECE
        part = _add_halves(part, low, high, place, word, half, FORMAT, PRECISION, FAST)
        if IS_GATED:
            part_up = _add_halves(part_up, low, high, place + UP, word_up, half, FORMAT, PRECISION, FAST)
    if FORMAT == "int4":
        return total + part * _int4_scales(word)[:, None], gated + part_up * _int4_scales(word_up)[:, None]
    return part, part_up


@triton.jit
def _add_halves(
    total, low_inputs, high_inputs, codes, words,
    HALF: tl.constexpr, FORMAT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add the GEMMs with one half of a group's weights, at pointers [columns, 32]."""
    low, high = _dequantize(tl.load(codes), words, 2 * HALF, FORMAT, low_inputs.dtype, FAST)
    total = tl.dot(low, low_inputs, total, input_precision=PRECISION)
    return tl.dot(high, high_inputs, total, input_precision=PRECISION)


@triton.jit
def _int4_scales(words):
    return (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dequantize(codes, words, PART: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Return what the low and the high bits of codes [columns, 32] stand for: parts PART and PART + 1 of a group.

    INT4 without its scale, MXFP4 without that of its row; words: the groups' [columns].
    """
    if FORMAT == "int4":
        low_factor = (words & -65536).to(tl.float32, bitcast=True)  # -(128 + zero point)
        high_factor = low_factor
    else:
        low_factor = ((words >> 8 * PART & 255) << 23).to(tl.float32, bitcast=True)
        high_factor = ((words >> 8 * PART + 8 & 255) << 23).to(tl.float32, bitcast=True)
    if FAST:
        return tl.inline_asm_elementwise(
            _INT4_ASSEMBLY if FORMAT == "int4" else _MXFP4_ASSEMBLY,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, low_factor.to(tl.bfloat16)[:, None], high_factor.to(tl.bfloat16)[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    codes = codes.to(tl.int32)
    if FORMAT == "int4":  # 128 + code
        low = ((codes & 15) << 16 | 0x43000000).to(tl.float32, bitcast=True) + low_factor[:, None]
        high = (codes >> 4 << 16 | 0x43000000).to(tl.float32, bitcast=True) + high_factor[:, None]
    else:
        # The sign goes to the top, three bits to where a float32's exponent ends and its mantissa begins: a number that
        # is 2^126 times too small. By as much the words' scales are too large.
        low = (codes << 28 >> 6 & -0x7E400000).to(tl.float32, bitcast=True) * low_factor[:, None]
        high = (codes << 24 >> 6 & -0x7E400000).to(tl.float32, bitcast=True) * high_factor[:, None]
    return low.to(DTYPE), high.to(DTYPE)
