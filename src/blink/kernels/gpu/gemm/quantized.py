# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
"""GEMMs of any number of rows with packed weights.

Few rows take the kernels of decoding. Many are multiplied in FP8 on both sides where the weight is in FP8, by scales of
rows or of groups as it has. Else they are multiplied in 16 bits, dequantized before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.fp8 import FP8, FP8_MAX
from blink.formats.layouts import Matrix
from blink.formats.packed import PackedWeight
from blink.formats.schemes import FP8_BLOCK, FP8_ROW, GROUP, INT4, FormatId
from blink.kernels.gpu.device import cuda_version, has_warpgroups
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm.hi_lo import split_rows
from blink.kernels.gpu.gemm.tile_configs import Output, bucket_rows
from blink.kernels.matmul import Matmul, add_bias
from blink.plan.site import first_reason

_FEW_ROWS = {FP8_ROW: 32, FP8_BLOCK: 64, INT4: 96}  # of more, the kernels behind it are faster
_BLOCK = 1024
_GROUPS_AT_ONCE = 8
_FP8_MAX = tl.constexpr(FP8_MAX)
# cuBLAS's GEMMs of blocks: what rows of both sides have to be a multiple of, and the CUDA that has them.
_FP8_ROWS = 16
_CUDA_OF_BLOCKS = (12, 9)


def refuses_few(matrix: Matrix, rows: int) -> str | None:
    """Say why the kernels of decoding do not take so many rows and a packed weight; None: they do."""
    assert matrix.encoding is not None
    most = _FEW_ROWS[matrix.encoding]
    return f"with more than {most} rows others are faster" if rows > most else gemm.refuses(matrix, rows)


def _multiply_few(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    order = gemm.order_for(weight.matrix, len(x))
    return add_bias(gemm.linear(x if order is None else split_rows(x, order), weight), bias)


def _describe_few(matrix: Matrix, rows: int) -> str:
    return " ".join(gemm.describe(matrix, Output.STORE, bucket_rows(rows)))


def _refuses_rows(matrix: Matrix, rows: int) -> str | None:  # noqa: ARG001 - as others have it
    return None if matrix.encoding == FP8_ROW else "no FP8 with a scale for each row"


def _multiply_rows(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    assert weight.scales is not None
    return add_bias(_multiply_fp8(*quantize_rows(x), weight, weight.scales[None, :]), bias)


def _refuses_blocks(matrix: Matrix, rows: int) -> str | None:
    return first_reason(
        {
            "no FP8 in blocks": matrix.encoding != FP8_BLOCK,
            f"{rows} rows of {matrix.n} outputs": rows % _FP8_ROWS != 0 or matrix.n % _FP8_ROWS != 0,
            "an old CUDA": cuda_version() < _CUDA_OF_BLOCKS,
            "no Hopper": not has_warpgroups(),
        }
    )


def _multiply_blocks(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    assert weight.group_scales is not None
    return add_bias(_multiply_fp8(*quantize_groups(x), weight, weight.group_scales), bias)


def _refuses_dequantized(matrix: Matrix, rows: int) -> str | None:  # noqa: ARG001 - as others have it
    return "FP8 with a scale for each row has cuBLAS's product" if matrix.encoding == FP8_ROW else None


def _multiply_dequantized(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return add_bias(functional.linear(x, dequantize(weight, x.dtype)), bias)


FEW_ROWS = Matmul("decode GEMM", refuses_few, _multiply_few, _describe_few)
FP8_ROWS = Matmul("cuBLAS FP8, scales of rows", _refuses_rows, _multiply_rows)
FP8_BLOCKS = Matmul("cuBLAS FP8, scales of blocks", _refuses_blocks, _multiply_blocks)
DEQUANTIZED = Matmul("dequantize, then cuBLAS", _refuses_dequantized, _multiply_dequantized)


def _multiply_fp8(values: Tensor, scales: Tensor, weight: PackedWeight, weight_scales: Tensor) -> Tensor:
    # One SM belongs to the resident scheduler: of blocks sized to all of them one would start last.
    torch._C._set_sm_carveout_experimental(1)
    try:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            values,
            weight.fp8_values().t(),
            scale_a=scales,
            scale_b=weight_scales,
            out_dtype=weight.dtype,
            use_fast_accum=weight.groups is None,
        )
    finally:
        torch._C._set_sm_carveout_experimental(None)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in FP8, in the order of a packed weight's, and their scales, float32 [rows, 1]."""
    rows, columns = x.shape
    assert x.is_contiguous() and columns % FormatId.FP8.unit == 0
    values = torch.empty(rows, columns, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    _quantize_row[(rows,)](x, values, scales, columns, BLOCK=block, num_warps=4 if block <= 4096 else 16)
    return values, scales


@triton.jit
def _quantize_row(x, values, scales, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    start = row.to(tl.int64) * columns
    value = tl.load(x + start + column_at(place), mask=place < columns, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(value), axis=0))
    tl.store(scales + row, scale)
    tl.store(values + start + place, (value / scale).to(values.dtype.element_ty), mask=place < columns)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in FP8, in the order of a packed weight's, and their groups' scales.

    The scales are float32 [rows, in / GROUP], those of all rows side by side, as cuBLAS reads them.
    """
    rows, columns = x.shape
    assert x.is_contiguous() and columns % GROUP == 0
    values = torch.empty(rows, columns, dtype=FP8, device=x.device)
    scales = torch.empty(columns // GROUP, rows, dtype=torch.float32, device=x.device)
    grid = (rows, triton.cdiv(columns // GROUP, _GROUPS_AT_ONCE))
    _quantize_groups[grid](x, values, scales, columns, GROUP=GROUP, GROUPS=_GROUPS_AT_ONCE, num_warps=4)
    return values, scales.t()


@triton.jit
def _quantize_groups(x, values, scales, columns, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row * columns + column_at(place), mask=place < columns, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(value), axis=1))
    tl.store(scales + group * tl.num_programs(0) + row, scale, mask=group * GROUP < columns)
    rounded = (value / scale[:, None]).to(values.dtype.element_ty)
    tl.store(values + row * columns + place, rounded, mask=place < columns)


@triton.jit
def _scale_of(largest):
    """Return what numbers up to this one are divided by to fill FP8."""
    return tl.maximum(largest, 1e-12) / _FP8_MAX


@triton.jit
def column_at(place):
    """Return the column whose value lies at a place of a packed row: see csrc/kernels/common/quantized.cuh."""
    return place // 128 * 128 + place // 4 % 8 * 16 + place // 2 % 2 * 8 + place // 32 % 4 * 2 + place % 2


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight whose groups have scales in another type and its usual order."""
    assert weight.groups is not None
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=dtype, device=weight.values.device)
    is_int4 = weight.format is FormatId.INT4
    _dequantize[(rows, triton.cdiv(columns, _BLOCK))](
        weight.values,
        weight.groups,
        result,
        columns,
        IS_INT4=is_int4,
        GROUP=GROUP,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return result


@triton.jit
def _dequantize(
    values, groups, result, columns, IS_INT4: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    word = tl.load(groups + row * (columns // GROUP) + column // GROUP, mask=inside, other=0)
    half, lane, neighbour = column // 8 % 2, column // 2 % 4, column % 2
    if IS_INT4:
        step = column // 16 % 16
        place = column // 256 * 128 + lane * 32 + step // 2 * 4 + neighbour * 2 + step % 2
        code = tl.load(values + row * (columns // 2) + place, mask=inside, other=0).to(tl.int32) >> half * 4 & 15
        scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (word & -65536).to(tl.float32, bitcast=True)
        value = (code.to(tl.float32) + 128 + zero) * scale
    else:
        place = column // 128 * 128 + lane * 32 + column // 16 % 8 * 4 + half * 2 + neighbour
        code = tl.load(values + row * columns + place, mask=inside, other=0)
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * word.to(tl.float32, bitcast=True)
    tl.store(result + row * columns + column, value.to(result.dtype.element_ty), mask=inside)
