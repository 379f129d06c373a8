# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
"""GEMMs whose rows have the same bits with any other rows: each sum runs over k in one order.

A program has all of k for its tile. Tensor cores add 16 columns of k at a time to a float32 sum (m16n8k16), so any tile
gives the same bits. Hopper multiplies 64 rows by other instructions (wgmma): a larger tile is two of 32 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.layouts import Matrix
from blink.formats.packed import PackedWeight
from blink.formats.schemes import FP8_ROW
from blink.kernels.gpu.gemm.dequantize import dequantize_fp8
from blink.kernels.gpu.gemm.quantized import column_at
from blink.kernels.gpu.pdl import overlap, start_pdl
from blink.kernels.matmul import Matmul
from blink.plan.site import first_reason

_BLOCK_K = 128  # of all tiles, so that the zeros behind k are as many
_NEIGHBOURS = 16  # tiles of rows that share what they read of a weight


class Tile(NamedTuple):
    rows: int  # of one tl.dot
    parts: int  # such
    outputs: int
    stages: int

    @property
    def all_rows(self) -> int:
        """Rows of a program."""
        return self.rows * self.parts

    def count_programs(self, rows: int, outputs: int) -> int:
        """Return how many of them make a result."""
        return triton.cdiv(rows, self.all_rows) * triton.cdiv(outputs, self.outputs)


# The first whose rows suffice, or the large one where there are enough of it. Not yet timed on a GPU.
_FEW_ROWS = (Tile(16, 1, 32, 5), Tile(32, 1, 32, 5))
_MANY_ROWS = Tile(32, 2, 128, 3)
_ENOUGH = 128  # programs, about one for each SM


def _refuses(matrix: Matrix, rows: int) -> str | None:  # noqa: ARG001 - as others have it
    return first_reason({f"weights in {matrix.dtype}": matrix.dtype not in ("bfloat16", "float16")})


def _refuses_fp8(matrix: Matrix, rows: int) -> str | None:  # noqa: ARG001 - as others have it
    return None if matrix.encoding == FP8_ROW else "no FP8 with a scale for each row"


def _describe(matrix: Matrix, rows: int) -> str:
    tile = choose_tile(rows, matrix.n)
    return f"{tile.all_rows} x {tile.outputs} x {_BLOCK_K}, {tile.stages} stages (by rule)"


def choose_tile(rows: int, outputs: int) -> Tile:
    few = next((tile for tile in _FEW_ROWS if rows <= tile.all_rows), None)
    if few is None and _MANY_ROWS.count_programs(rows, outputs) >= _ENOUGH:
        return _MANY_ROWS
    return few or _FEW_ROWS[-1]


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x: [rows, in]; weight: [out, in]; all of one type and contiguous."""
    assert weight.is_contiguous() and x.dtype == weight.dtype
    return _launch(x, weight, None, bias)


def multiply_fp8(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return the same for a weight in FP8 with a scale for each row; x is not rounded."""
    return _launch(x, weight.fp8_values(), weight.scales, bias)


def _launch(x: Tensor, values: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    assert x.is_contiguous() and values.shape[1] == x.shape[1]
    (rows, size), outputs = x.shape, len(values)
    tile = choose_tile(rows, outputs)
    result = x.new_empty(rows, outputs)
    _multiply[(tile.count_programs(rows, outputs),)](
        x,
        values,
        x if scales is None else scales,
        x if bias is None else bias,
        result,
        rows,
        outputs,
        size,
        IS_FP8=scales is not None,
        FAST=x.dtype == torch.bfloat16,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.rows,
        HAS_TWO=tile.parts == 2,
        BLOCK_N=tile.outputs,
        BLOCK_K=_BLOCK_K,
        NEIGHBOURS=_NEIGHBOURS,
        num_warps=4,
        num_stages=tile.stages,
        **overlap(x, rows),
    )
    return result


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, weight, scales, bias, result, rows, outputs, size, IS_FP8: tl.constexpr, FAST: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, HAS_TWO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NEIGHBOURS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute a tile. Programs that follow each other have a few tiles of rows, for one output tile after the other."""
    if PDL:
        start_pdl()
    row_tiles, output_tiles = tl.cdiv(rows, BLOCK_M * (1 + HAS_TWO)), tl.cdiv(outputs, BLOCK_N)
    first_tile = tl.program_id(0) // (NEIGHBOURS * output_tiles) * NEIGHBOURS
    within = tl.program_id(0) - first_tile * output_tiles
    neighbours = tl.minimum(row_tiles - first_tile, NEIGHBOURS)
    row = (first_tile + within % neighbours) * (BLOCK_M * (1 + HAS_TWO)) + tl.arange(0, BLOCK_M)
    output = within // neighbours * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K)
    is_output = output < outputs
    # A packed weight has another order of columns, in units of as many as a block.
    left = x + row.to(tl.int64)[:, None] * size + (column_at(places) if IS_FP8 else places)[None, :]
    right = weight + output.to(tl.int64)[None, :] * size + places[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        inside = places < size - start
        columns = tl.load(right + start, mask=inside[:, None] & is_output[None, :], other=0.0)
        if IS_FP8:
            columns = dequantize_fp8(columns, x.dtype.element_ty, FAST)
        total = tl.dot(_load_rows(left + start, row, rows, inside), columns, total, input_precision="ieee")
        if HAS_TWO:
            further = left + BLOCK_M * size.to(tl.int64) + start
            second = tl.dot(_load_rows(further, row + BLOCK_M, rows, inside), columns, second, input_precision="ieee")
    rate = tl.full([BLOCK_N], 1.0, tl.float32)
    added = tl.zeros([BLOCK_N], tl.float32)
    if IS_FP8:
        rate = tl.load(scales + output, mask=is_output, other=0.0)
    if HAS_BIAS:
        added = tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    _store_rows(result, total, rate, added, row, output, rows, outputs)
    if HAS_TWO:
        _store_rows(result, second, rate, added, row + BLOCK_M, output, rows, outputs)


@triton.jit
def _load_rows(places, row, rows, inside):
    return tl.load(places, mask=(row < rows)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _store_rows(result, total, rate, added, row, output, rows, outputs):
    # One fused operation for all tiles: the compiler has no choice.
    scaled = tl.fma(total, tl.broadcast_to(rate[None, :], total.shape), tl.broadcast_to(added[None, :], total.shape))
    places = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(result + places, scaled, mask=(row < rows)[:, None] & (output < outputs)[None, :])


MATMUL = Matmul("GEMM in one order", _refuses, multiply, _describe)
FP8_MATMUL = Matmul("GEMM in one order of FP8", _refuses_fp8, multiply_fp8, _describe)
