# SPDX-License-Identifier: Apache-2.0
"""GEMMs of few rows on one GPU, by a decode kernel where that is faster than the kernel of more rows.

Decode kernels read weights before they wait for the kernel in front of them. The autotuner compares them at boot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from blink.formats.base import Weight, matrix_of
from blink.formats.layouts import Matrix
from blink.kernels.gpu import autotuner
from blink.kernels.gpu.activation import activate
from blink.kernels.matmul import GatedMatmul, Matmul

MAX_ROWS = 32  # of decode kernels that the autotuner compares
MIN_WEIGHTS = 1 << 19  # of fewer, choosing is not worth the while

Kernel = TypeVar("Kernel", Matmul, GatedMatmul)


def measure(first: Matmul, others: Sequence[Matmul]) -> Matmul:
    """Return a kernel that computes as the fastest of several does; the first where no other gains."""

    def multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        matrix, rows = matrix_of(weight), len(x)
        candidates = {one.name: partial(one.multiply, x, weight, bias) for one in (first, *_take(others, matrix, rows))}
        return autotuner.compute(_name(matrix, rows, "" if bias is None else " + bias"), candidates)

    return Matmul(
        f"{first.name} or decode kernel", partial(_refuses, first, others), multiply, partial(_describe, others)
    )


def measure_gated(first: Matmul, others: Sequence[GatedMatmul]) -> GatedMatmul:
    """Return the same with SiLU; the first has it in another kernel."""

    def multiply(x: Tensor, gate_up: Weight) -> Tensor:
        matrix, rows = matrix_of(gate_up), len(x)
        candidates: dict[str, Callable[[], Tensor]] = {
            first.name: lambda: activate(first.multiply(x, gate_up, None), "silu")
        }
        candidates |= {one.name: partial(one.multiply, x, gate_up) for one in _take(others, matrix, rows)}
        return autotuner.compute(_name(matrix, rows, ", gated"), candidates)

    return GatedMatmul(
        f"{first.name} and SiLU or decode kernel",
        partial(_refuses, first, others),
        multiply,
        partial(_describe, others),
    )


def _take(kernels: Sequence[Kernel], matrix: Matrix, rows: int) -> list[Kernel]:
    """Return those that take so many rows and a weight."""
    return [one for one in kernels if one.refuses(matrix, rows) is None]


def _refuses(first: Matmul, others: Sequence[Kernel], matrix: Matrix, rows: int) -> str | None:
    if rows > MAX_ROWS:
        return f"more than {MAX_ROWS} rows"
    if matrix.n * matrix.k < MIN_WEIGHTS:
        return f"fewer than {MIN_WEIGHTS} weights"
    reasons = [one.refuses(matrix, rows) for one in others]
    return first.refuses(matrix, rows) or (None if None in reasons else reasons[-1])


def _describe(others: Sequence[Kernel], matrix: Matrix, rows: int) -> str:
    names = ", ".join(one.name for one in _take(others, matrix, rows))
    return f"({names}), as measured at boot"


def _name(matrix: Matrix, rows: int, more: str) -> str:
    kind = matrix.encoding.cpp if matrix.encoding is not None else matrix.dtype
    return f"few rows {rows} x {matrix.k} x {matrix.n} {kind}{more}"
