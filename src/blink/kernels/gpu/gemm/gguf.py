# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false
"""GEMMs with weights in GGUF's formats, which become numbers of the activations' type in registers.

A weight is first what the gguf package would make of it, in float32 to the last bit. The GEMM is transposed, weight
* x: tensor cores from Hopper on read the left operand from registers. Where rows and columns give too few programs,
several share the inner dimension, and their sums are added in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.gguf import BLOCK, GgufArrays
from blink.formats.schemes import GGUF_UNIT, FormatId

_UNIT = tl.constexpr(GGUF_UNIT)
_BLOCK = tl.constexpr(BLOCK)
_MIN_PROGRAMS = 256  # about two for each SM; of large tiles half as many, of small ones twice
_SUM_BLOCK = 1024
_TAKEN_UNITS = 8
# With its last bits an integer below 2^22: the float32 that is so much larger than 2^23.
_MAGIC = tl.constexpr(0x4B000000)
_MAGIC_VALUE = tl.constexpr(8388608.0)


@dataclass(frozen=True, slots=True)
class GgufTiling:
    """Shape of one program's tile: rows of x, columns of the result, units of the inner dimension at a time."""

    rows: int
    columns: int
    units: int
    num_warps: int
    num_stages: int
    slices: int = 1  # of the inner dimension, one a program


def choose_gguf_tiling(rows: int, columns: int, depth: int) -> GgufTiling:
    """Choose a tile for x [rows, depth] and a result of so many columns."""
    if rows <= 16:
        tiling, wanted = GgufTiling(16, 32, 4, 2, 3), 2 * _MIN_PROGRAMS
    elif rows <= 32:
        tiling, wanted = GgufTiling(32, 128, 2, 4, 3), _MIN_PROGRAMS
    elif rows <= 64:
        tiling, wanted = GgufTiling(64, 64, 2, 4, 3), _MIN_PROGRAMS
    else:
        tiling, wanted = GgufTiling(128, 128, 1, 8, 3), _MIN_PROGRAMS // 2
    share = 4 * tiling.units * GGUF_UNIT if rows <= 64 else 1024  # for loads to run ahead of GEMMs
    programs = triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns)
    return replace(tiling, slices=max(1, min(round(wanted / programs), depth // share)))


def multiply(x: Tensor, parts: Sequence[GgufArrays], tiling: GgufTiling | None = None) -> Tensor:
    """Return x @ weight.T of a weight's parts, one below the other; x: contiguous [rows, in]."""
    (rows, depth), columns = x.shape, sum(part.num_rows for part in parts)
    assert x.is_contiguous()
    tiling = tiling or choose_gguf_tiling(rows, columns, depth)
    result = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    is_split = tiling.slices > 1
    sums = torch.empty(tiling.slices, rows, columns, dtype=torch.float32, device=x.device) if is_split else result
    start = 0
    for part in parts:
        _launch(x, part, sums, start, tiling)
        start += part.num_rows
    if is_split:
        size = rows * columns
        _add_slices[(triton.cdiv(size, _SUM_BLOCK),)](sums, result, size, tiling.slices, BLOCK=_SUM_BLOCK, num_warps=4)
    return result


def _launch(x: Tensor, part: GgufArrays, sums: Tensor, start: int, tiling: GgufTiling) -> None:
    (rows, depth), columns = x.shape, part.num_rows
    grid = (triton.cdiv(rows, tiling.rows), triton.cdiv(columns, tiling.columns), tiling.slices)
    _multiply_tile[grid](
        x,
        *list_arrays(part),
        sums,
        rows,
        depth,
        columns,
        sums.shape[-1],
        start,
        FORMAT=part.format.name,
        ROWS_BLOCK=tiling.rows,
        COLUMNS_BLOCK=tiling.columns,
        UNITS=tiling.units,
        EVEN_COLUMNS=columns % tiling.columns == 0,
        EVEN_DEPTH=depth % (tiling.units * GGUF_UNIT) == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def take_rows(parts: Sequence[GgufArrays], rows: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """Return some rows [len(rows), depth] of a weight in a type; rows: int32, of those that there are."""
    start = 0
    result = torch.empty(len(rows), depth, dtype=dtype, device=rows.device)
    grid = (len(rows), triton.cdiv(depth, _TAKEN_UNITS * GGUF_UNIT))
    for part in parts:
        _take_row[grid](
            rows, *list_arrays(part), result, start, part.num_rows, depth,
            FORMAT=part.format.name, UNITS_BLOCK=_TAKEN_UNITS, num_warps=2,
        )  # fmt: skip
        start += part.num_rows
    return result


def list_arrays(part: GgufArrays) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, high bits, words and tops; what a format has not, its kernels do not read."""
    arrays = (part.codes, part.high, part.words, part.tops)
    assert all(array is None or array.is_contiguous() for array in arrays)
    assert part.has_tops == (part.tops is not None)
    assert (part.format in (FormatId.Q5_K, FormatId.Q6_K)) == (part.high is not None)
    return part.codes, _or(part.high, part.codes), part.words, _or(part.tops, part.words)


def _or(array: Tensor | None, other: Tensor) -> Tensor:
    return other if array is None else array


@triton.jit
def _multiply_tile(
    x, codes, high, words, tops, sums, num_rows, depth, columns, result_columns, first_column,
    FORMAT: tl.constexpr, ROWS_BLOCK: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, UNITS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr, EVEN_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the GEMM with one part of a weight, or a share of it."""
    row = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)
    column = tl.program_id(1) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    part_of_k, num_slices = tl.program_id(2), tl.num_programs(2)
    inside = row < num_rows
    # Columns that are not there are the last once more.
    place = column if EVEN_COLUMNS else tl.minimum(column, columns - 1)
    inputs = x + row.to(tl.int64)[None, :] * depth
    PIECES: tl.constexpr = 4 if FORMAT == "Q6_K" else 2
    SIZE: tl.constexpr = _UNIT // PIECES  # columns of the weight that are multiplied at once
    num_units = (depth + _UNIT - 1) // _UNIT
    steps = (num_units + UNITS - 1) // UNITS
    total = tl.zeros((COLUMNS_BLOCK, ROWS_BLOCK), tl.float32)
    for step in range(steps * part_of_k // num_slices, steps * (part_of_k + 1) // num_slices):
        top = load_top(tops, step * UNITS * _UNIT // _BLOCK * columns + place, FORMAT)
        for index in tl.static_range(UNITS):
            unit = step * UNITS + index
            # What lies behind the last unit is multiplied by zeros: it must be finite, as the last is.
            known = unit if EVEN_DEPTH else tl.minimum(unit, num_units - 1)
            first, second, more = load_codes(codes, high, known, columns, place, FORMAT)
            word, next_word = load_words(words, known, columns, place, FORMAT)
            for piece in tl.static_range(PIECES):
                k = unit * _UNIT + piece * SIZE + tl.arange(0, SIZE)[:, None]
                mask = inside[None, :] if EVEN_DEPTH else inside[None, :] & (k < depth)
                values = tl.load(inputs + k, mask=mask, other=0.0)
                weights = decode(first, second, more, word, next_word, top, piece, FORMAT)
                total = tl.dot(weights.to(values.dtype), values, total, input_precision=PRECISION)
    target = sums + (part_of_k.to(tl.int64) * num_rows + row)[None, :] * result_columns + first_column
    mask = inside[None, :] if EVEN_COLUMNS else inside[None, :] & (column < columns)[:, None]
    tl.store(target + column[:, None], total, mask=mask)


@triton.jit
def _add_slices(sums, result, size, num_slices, BLOCK: tl.constexpr):
    """Add the programs' shares, in their order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    share = sums + place
    total = tl.load(share, mask=inside, other=0.0)
    for _ in range(1, num_slices):
        share += size
        total += tl.load(share, mask=inside, other=0.0)
    tl.store(result + place, total, mask=inside)


@triton.jit
def _take_row(
    rows, codes, high, words, tops, result, first_row, num_rows, depth,
    FORMAT: tl.constexpr, UNITS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write some units of one row, if this part of the weight has it."""
    row = tl.load(rows + tl.program_id(0)) - first_row
    if row < 0 or row >= num_rows:
        return
    PIECES: tl.constexpr = 4 if FORMAT == "Q6_K" else 2
    SIZE: tl.constexpr = _UNIT // PIECES
    unit = tl.program_id(1) * UNITS_BLOCK + tl.arange(0, UNITS_BLOCK)
    known = tl.minimum(unit, (depth + _UNIT - 1) // _UNIT - 1)
    top = load_top(tops, known * _UNIT // _BLOCK * num_rows + row, FORMAT)
    first, second, more = load_codes(codes, high, known, num_rows, row, FORMAT)
    word, next_word = load_words(words, known, num_rows, row, FORMAT)
    target = result + tl.program_id(0).to(tl.int64) * depth
    for piece in tl.static_range(PIECES):
        k = unit[:, None] * _UNIT + piece * SIZE + tl.arange(0, SIZE)[None, :]
        weights = decode(first, second, more, word, next_word, top, piece, FORMAT)
        tl.store(target + k, weights, mask=k < depth)


@triton.jit
def load_codes(codes, high, unit, num_rows, row, FORMAT: tl.constexpr):
    """Return the bytes of a unit of some rows, or of some units of a row: the first and the second half, high bits."""
    at = (unit.to(tl.int64) * num_rows + row)[:, None]
    if FORMAT == "Q8_0":
        first = tl.load(codes + at * 64 + tl.arange(0, 32)[None, :])
        second = tl.load(codes + at * 64 + 32 + tl.arange(0, 32)[None, :])
        more = first
    elif FORMAT == "Q6_K":
        first = tl.load(codes + at * 32 + tl.arange(0, 16)[None, :])
        second = tl.load(codes + at * 32 + 16 + tl.arange(0, 16)[None, :])
        more = tl.load(high + at * 16 + tl.arange(0, 16)[None, :])
    else:
        first = tl.load(codes + at * 32 + tl.arange(0, 32)[None, :])
        second = first
        more = tl.load(high + at * 8 + tl.arange(0, 32)[None, :] % 8) if FORMAT == "Q5_K" else first
    return first, second, more


@triton.jit
def load_words(words, unit, num_rows, row, FORMAT: tl.constexpr):
    """Return the words of a unit of some rows, or of some units of a row: one, or of Q4_1 two."""
    if FORMAT == "Q4_1":
        at = unit * 2 * num_rows + row
        word = tl.load(words + at)
        next_word = tl.load(words + at + num_rows)
    else:
        word = tl.load(words + unit * num_rows + row)
        next_word = word
    return word, next_word


@triton.jit
def load_top(tops, at, FORMAT: tl.constexpr):
    top = at
    if FORMAT == "Q4_K" or FORMAT == "Q5_K" or FORMAT == "Q6_K":
        top = tl.load(tops + at)
    return top


@triton.jit
def decode(first, second, more, word, next_word, top, PIECE: tl.constexpr, FORMAT: tl.constexpr):
    """Return a piece of units as float32; a sum with an offset is all that rounds."""
    if FORMAT == "Q8_0":
        codes = (first if PIECE == 0 else second).to(tl.int32)
        weights = (_widen(codes) - (_MAGIC_VALUE + 128)) * _half(word, PIECE)[:, None]
    elif FORMAT == "Q6_K":
        codes = (first if PIECE < 2 else second).to(tl.int32)
        low = codes & 15 if PIECE % 2 == 0 else codes >> 4
        moved = more.to(tl.int32) << 4 - 2 * PIECE if PIECE < 2 else more.to(tl.int32) >> 2 * PIECE - 4
        scale = _half(top, 0) * _signed(word >> 8 * PIECE & 255)
        weights = (_widen(low | moved & 48) - (_MAGIC_VALUE + 32)) * scale[:, None]
    else:
        # The other half of a byte is filled with ones, which are subtracted again. High halves stay where they are: 16
        # times as large, with a scale that is as much smaller.
        ONE: tl.constexpr = 1 if PIECE == 0 or FORMAT == "Q5_K" else 16
        OTHER: tl.constexpr = 240 if PIECE == 0 else 15
        ZERO: tl.constexpr = 8 * ONE if FORMAT == "Q4_0" else 0
        if FORMAT == "Q5_K":
            low = first.to(tl.int32) >> 4 * PIECE & 15
            bit = more.to(tl.int32) >> tl.arange(0, 32)[None, :] // 8 * 2 + PIECE & 1
            weights = _widen(low | bit << 4) - _MAGIC_VALUE
        else:
            weights = _widen(first.to(tl.int32) | OTHER) - (_MAGIC_VALUE + OTHER + ZERO)
        if FORMAT == "Q4_0":
            weights *= (_half(word, PIECE) * (1.0 / ONE))[:, None]
        elif FORMAT == "Q4_1":
            own = word if PIECE == 0 else next_word
            weights = weights * (_half(own, 0) * (1.0 / ONE))[:, None] + _half(own, 1)[:, None]
        else:
            scale = _half(top, 0) * (_widen(word >> 16 * PIECE & 255) - _MAGIC_VALUE)
            offset = _half(top, 1) * (_widen(word >> 16 * PIECE + 8 & 255) - _MAGIC_VALUE)
            weights = weights * (scale * (1.0 / ONE))[:, None] - offset[:, None]
    return weights


@triton.jit
def _widen(codes):
    return (codes | _MAGIC).to(tl.float32, bitcast=True)


@triton.jit
def _signed(codes):
    """Return what bytes, widened without their sign, are with it."""
    return _widen(codes ^ 128) - (_MAGIC_VALUE + 128)


@triton.jit
def _half(words, INDEX: tl.constexpr):
    return (words >> 16 * INDEX).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
