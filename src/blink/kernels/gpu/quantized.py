# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
"""Products of any number of rows with quantized weights: few rows by the kernels of decoding; many in FP8 on both sides
where the weight is in FP8, by scales of rows or of groups as it has; with weights of 4 bits by the kernel of prompts;
else in 16 bits with the weight unpacked before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.fp8 import FP8, FP8_MAX
from blink.formats.packed import PackedWeight
from blink.formats.schemes import GROUP, FormatId

_FEW_ROWS = 64  # rather than round activations by groups
_FEW_FP8_ROWS = 32  # rather than round them by rows
_FEW_INT4_ROWS = 96  # of more, the kernel of prompts is faster
_MOST_INT4_ROWS = 2048  # rather than unpack a weight
_BLOCK = 1024
_GROUPS_AT_ONCE = 8
_FP8_MAX = tl.constexpr(FP8_MAX)
# cuBLAS's products of blocks: what rows of both sides have to be a multiple of, and the CUDA that has them.
_FP8_ROWS = 16
_CUDA_OF_BLOCKS = (12, 9)


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    """Return x @ weight.T; x: contiguous bfloat16 [rows, in]."""
    from blink.kernels.gpu import prompt_products

    rows = x.shape[0]
    if _are_few(rows, weight):
        return _multiply_few(x, weight)
    if _are_prompts(rows, weight):
        return prompt_products.multiply(x, weight)
    if weight.scales is not None:
        return _multiply_fp8(*quantize_rows(x), weight, weight.scales[None, :])
    if weight.group_scales is not None and _can_multiply_blocks(rows, weight):
        return _multiply_fp8(*quantize_groups(x), weight, weight.group_scales)
    return functional.linear(x, dequantize(weight, x.dtype))


def multiply_gated(x: Tensor, gate_up: PackedWeight) -> Tensor:
    """Return silu(gate) * up of x @ gate_up.T, whose first half are the gates; x: contiguous bfloat16 [rows, in]."""
    from blink.kernels.gpu import prompt_products
    from blink.kernels.gpu.activation import activate

    if not _are_few(len(x), gate_up) and _are_prompts(len(x), gate_up, gated=True):
        return prompt_products.multiply(x, gate_up, gated=True)
    return activate(multiply(x, gate_up))


def _are_few(rows: int, weight: PackedWeight) -> bool:
    """Tell whether the kernels of decoding multiply so many rows."""
    from blink.kernels.gpu.decode import gemm

    most = _FEW_FP8_ROWS if weight.groups is None else _FEW_ROWS
    if weight.format is FormatId.INT4:
        most = _FEW_INT4_ROWS
    return rows <= most and gemm.can_multiply_packed(weight, rows)


def _are_prompts(rows: int, weight: PackedWeight, *, gated: bool = False) -> bool:
    """Tell whether the kernel of prompts multiplies so many rows, which are not few."""
    from blink.kernels.gpu import prompt_products

    return rows <= _MOST_INT4_ROWS and prompt_products.can_multiply(weight, gated=gated)


def _multiply_few(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply by the kernels of decoding."""
    from blink.kernels.gpu.decode import gemm
    from blink.kernels.gpu.decode.planes import split_rows

    order = gemm.order_for(weight, len(x))
    return gemm.linear(x if order is None else split_rows(x, order), weight)


def _can_multiply_blocks(rows: int, weight: PackedWeight) -> bool:
    """Tell whether cuBLAS multiplies so many rows in FP8 with a weight whose groups have scales."""
    from blink.kernels.gpu.decode.launch import can_multiply_groups

    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return rows % _FP8_ROWS == weight.shape[0] % _FP8_ROWS == 0 and cuda >= _CUDA_OF_BLOCKS and can_multiply_groups()


def _multiply_fp8(values: Tensor, scales: Tensor, weight: PackedWeight, weight_scales: Tensor) -> Tensor:
    # One multiprocessor belongs to the resident scheduler: of blocks sized to all of them one would start last.
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
    value = tl.load(x + start + _column_at(place), mask=place < columns, other=0.0).to(tl.float32)
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
    value = tl.load(x + row * columns + _column_at(place), mask=place < columns, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(value), axis=1))
    tl.store(scales + group * tl.num_programs(0) + row, scale, mask=group * GROUP < columns)
    rounded = (value / scale[:, None]).to(values.dtype.element_ty)
    tl.store(values + row * columns + place, rounded, mask=place < columns)


@triton.jit
def _scale_of(largest):
    """Return what numbers up to this one are divided by to fill FP8."""
    return tl.maximum(largest, 1e-12) / _FP8_MAX


@triton.jit
def _column_at(place):
    """Return the column whose value lies at a place of a packed row: see csrc/gpu/decode/quantized.cuh."""
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
