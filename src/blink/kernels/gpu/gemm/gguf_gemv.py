# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false
"""GEMVs of a few rows with weights in GGUF's formats: no tensor cores, and no sums that programs share.

A program asks for all it needs of a weight at once, up to 2,048 columns of its rows. Weights are rounded to the
activations' type, as gguf.py's GEMM does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.gguf import BLOCK, GgufArrays
from blink.formats.schemes import GGUF_UNIT
from blink.kernels.gpu.gemm.gguf import decode, list_arrays, load_codes, load_top, load_words
from blink.kernels.gpu.pdl import overlap, start_pdl

MAX_ROWS = 2  # each reads the weight, the second from L2
NUM_WARPS = 4
_UNIT, _BLOCK = tl.constexpr(GGUF_UNIT), tl.constexpr(BLOCK)
_MOST_UNITS, _MIN_COLUMNS, _MAX_COLUMNS = 32, 8, 32
_TILE = _MOST_UNITS * _MIN_COLUMNS  # units of a program's rows at once


def choose_gemv_tile(depth: int) -> tuple[int, int]:
    """Return how many columns of the result, and units of the inner dimension at a time, a program has."""
    units = min(_MOST_UNITS, triton.next_power_of_2(triton.cdiv(depth, GGUF_UNIT)))
    return min(_MAX_COLUMNS, _TILE // units), units


def multiply(x: Tensor, parts: Sequence[GgufArrays]) -> Tensor:
    """Return x @ weight.T of a weight's parts, one below the other; x: contiguous [rows, in]."""
    (rows, depth), columns = x.shape, sum(part.num_rows for part in parts)
    assert x.is_contiguous() and rows <= MAX_ROWS
    result = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    wide, units = choose_gemv_tile(depth)
    start = 0
    for part in parts:
        _multiply_row[(triton.cdiv(part.num_rows, wide), rows)](
            x, *list_arrays(part), result, part.num_rows, columns, start,
            FORMAT=part.format.name, DEPTH=depth, COLUMNS=wide, UNITS=units, num_warps=NUM_WARPS,
            **overlap(x, rows),
        )  # fmt: skip
        start += part.num_rows
    return result


@triton.jit
def _multiply_row(
    x, codes, high, words, tops, result, columns, result_columns, first_column,
    FORMAT: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute some columns of a row with one part of a weight."""
    if PDL:
        start_pdl()
    row, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS
    found = dot_columns(x + row * DEPTH, codes, high, words, tops, start, columns, DEPTH, COLUMNS, UNITS, FORMAT)
    column = start + tl.arange(0, COLUMNS)
    tl.store(result + row * result_columns + first_column + column, found, mask=column < columns)


@triton.jit
def dot_columns(
    inputs, codes, high, words, tops, start, columns, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Return a row times some rows of a weight of `columns` rows, from `start` on: float32 [COLUMNS].

    Those that are not there are the last once more.
    """
    PIECES: tl.constexpr = 4 if FORMAT == "Q6_K" else 2
    SIZE: tl.constexpr = _UNIT // PIECES  # columns of the weight that are multiplied at once
    LAST: tl.constexpr = (DEPTH + _UNIT - 1) // _UNIT - 1
    index = tl.arange(0, UNITS * COLUMNS)
    place = tl.minimum(start + index % COLUMNS, columns - 1)
    total = tl.zeros((UNITS * COLUMNS,), tl.float32)
    for first_unit in range(0, LAST + 1, UNITS):
        unit = first_unit + index // COLUMNS
        # What lies behind the last unit is multiplied by zeros: it must be finite, as the last is.
        known = tl.minimum(unit, LAST)
        top = load_top(tops, known * _UNIT // _BLOCK * columns + place, FORMAT)
        first, second, more = load_codes(codes, high, known, columns, place, FORMAT)
        word, next_word = load_words(words, known, columns, place, FORMAT)
        for piece in tl.static_range(PIECES):
            k = unit[:, None] * _UNIT + piece * SIZE + tl.arange(0, SIZE)[None, :]
            values = tl.load(inputs + k, mask=k < DEPTH, other=0.0)
            weights = decode(first, second, more, word, next_word, top, piece, FORMAT).to(values.dtype)
            total += tl.sum(weights.to(tl.float32) * values.to(tl.float32), axis=1)
    return tl.sum(tl.reshape(total, (UNITS, COLUMNS)), axis=0)
