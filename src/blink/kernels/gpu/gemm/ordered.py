# SPDX-License-Identifier: Apache-2.0
"""GEMMs by in_tiles.py with no norm and no residual in them: those of the output layer."""

from __future__ import annotations

from torch import Tensor

from blink.formats.base import Weight, matrix_of
from blink.formats.layouts import Matrix
from blink.formats.schemes import FormatId
from blink.kernels.gpu.gemm import decode, in_tiles
from blink.kernels.gpu.gemm.hi_lo import split_rows
from blink.kernels.gpu.gemm.tile_configs import Output
from blink.kernels.matmul import Matmul

NAME = "GEMM in tiles of one order"


def multiply(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x: bfloat16 [rows, in], which packed weights are multiplied with as hi/lo FP8."""
    rows = split_rows(x, FormatId.FP8) if matrix_of(weight).is_packed else x
    return decode.linear(rows, weight, bias, ordered=True)


def _refuses(matrix: Matrix, rows: int) -> str | None:  # noqa: ARG001 - as others have it
    return in_tiles.refuses(matrix, Output.STORE)


def _describe(matrix: Matrix, rows: int) -> str:
    return in_tiles.describe(matrix, Output.STORE, in_tiles.pad(rows, packed=matrix.is_packed))


MATMUL = Matmul(NAME, _refuses, multiply, _describe)
