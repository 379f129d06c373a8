# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""GEMVs that send their results to all ranks themselves: csrc/kernels/comm/push_gemv.cu."""

from __future__ import annotations

from typing import Final

from cuda.bindings import driver
from torch import Tensor

from blink.formats.base import Weight, matrix_of
from blink.formats.layouts import Matrix
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.comm.boxes import DATA_BYTES
from blink.kernels.gpu.comm.spread import Spread, choose_spread
from blink.kernels.gpu.gemm import gemv
from blink.kernels.gpu.gemm.tile_configs import Output
from blink.kernels.gpu.launch import compile_kernel
from blink.plan.site import first_reason

HAS_RUN_ON_GPU: Final = False  # whether plans have them: tests and benchmarks/kernels/all_reduce.py call them
_NUMBERS = DATA_BYTES // 2  # of a line, in bfloat16


def refuses(matrix: Matrix, rows: int) -> str | None:
    """Say why the kernels do not take so many rows and a weight; None: they do."""
    refusal = gemv.refuses(matrix, rows)
    if refusal is not None:
        return refusal
    whole, each = gemv.outputs_of_blocks(matrix, rows)
    reasons = {
        "tiles that overlap": matrix.n % whole != 0,
        "blocks without whole lines": each % _NUMBERS != 0,
        "rows that are not spread": find_spread(rows, matrix.n) is None,
    }
    return first_reason(reasons)


def find_spread(rows: int, width: int) -> Spread | None:
    """Return how the sum's rows are spread."""
    return choose_spread(rows, width // _NUMBERS)


def push_linear(x: Tensor, weight: Weight, bias: Tensor | None, ranks: bytes, box: Tensor) -> None:
    """Send x @ weight.T + bias to all ranks; box: this rank's."""
    kernel, prepared = compile_push(x, weight, bias)
    prepared.launch(kernel, args("PushGemvArgs", gemv=prepared.arguments, ranks=ranks, own_box=box))


def compile_push(x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[driver.CUfunction, gemv.Prepared]:
    """Return the kernel, and what its GEMV is given."""
    assert refuses(matrix_of(weight), len(x)) is None
    prepared = gemv.prepare(Output.STORE, x, weight, None, bias=bias)
    return compile_kernel(prepared.name.replace("::gemv", "::push_gemv", 1), "comm/push_gemv.cu"), prepared
