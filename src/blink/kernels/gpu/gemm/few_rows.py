# SPDX-License-Identifier: Apache-2.0
"""GEMMs of few rows by the kernels of decoding, with no norm and no residual in them: an all-reduce has both.

They read their weights before they wait for the kernel in front of them, so that these are on their way while ranks
exchange what they have computed.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from blink.formats.base import Weight, matrix_of
from blink.formats.layouts import Matrix
from blink.formats.schemes import FormatId
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import gemv, quantized
from blink.kernels.gpu.gemm.hi_lo import split_rows
from blink.kernels.gpu.gemm.tile_configs import Output, bucket_rows
from blink.kernels.matmul import GatedMatmul, Matmul
from blink.plan.site import first_reason

_GEMV_ROWS = 2  # of more, GEMMs are faster: as on one GPU, where each computes the norm too
_GEMM_ROWS = 64  # not measured above


def _refuses_gemv(matrix: Matrix, rows: int) -> str | None:
    reasons = {f"more than {_GEMV_ROWS} rows": rows > _GEMV_ROWS, "no Hopper": not has_clusters()}
    return first_reason(reasons) or gemv.refuses(matrix, rows)


def _refuses_rank_gemv(matrix: Matrix, rows: int) -> str | None:
    """Refuse what the autotuner would not choose: it measures nothing for ranks."""
    if rows > 1 and gemm.refuses(matrix, rows) is None and gemm.order_for(matrix, rows) is FormatId.FP8:
        return "more than 1 row of FP8"
    return _refuses_gemv(matrix, rows)


def _describe_gemv(matrix: Matrix, rows: int) -> str:
    return " ".join(gemv.describe(matrix, rows))


def _refuses_gemm(matrix: Matrix, rows: int) -> str | None:
    if matrix.is_packed:
        return quantized.refuses_few(matrix, rows)
    return f"more than {_GEMM_ROWS} rows" if rows > _GEMM_ROWS else gemm.refuses(matrix, rows)


def _describe_gemm(output: Output, matrix: Matrix, rows: int) -> str:
    return " ".join(gemm.describe(matrix, output, bucket_rows(rows)))


def _gate(x: Tensor, gate_up: Weight) -> Tensor:
    order = gemm.order_for(matrix_of(gate_up), len(x))
    return gemm.gated(x if order is None else split_rows(x, order), gate_up)


GEMV = Matmul("GEMV", _refuses_gemv, gemv.linear, _describe_gemv)
GEMM = Matmul("GEMM of few rows", _refuses_gemm, gemm.linear, functools.partial(_describe_gemm, Output.STORE))
GATED_GEMV = GatedMatmul("GEMV with SiLU", _refuses_gemv, gemv.gated, _describe_gemv)
GATED_GEMM = GatedMatmul(
    "GEMM of few rows with SiLU", _refuses_gemm, _gate, functools.partial(_describe_gemm, Output.GATE)
)
RANK_GEMV = replace(GEMV, refuses=_refuses_rank_gemv)
GATED_RANK_GEMV = replace(GATED_GEMV, refuses=_refuses_rank_gemv)
