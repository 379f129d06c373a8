# SPDX-License-Identifier: Apache-2.0
"""GEMMs with weights of 16 bits, each by the fastest of the algorithms that cuBLAS offers for its shape.

Its own first choice is up to a quarter slower for some shapes of 64 to 512 rows, such as those of QKV.
"""

from __future__ import annotations

import functools

import torch.nn.functional as functional
from torch import Tensor

from blink.formats.layouts import Matrix
from blink.kernels.gpu import autotuner, cublas_lt
from blink.kernels.gpu.autotuner import Candidate
from blink.kernels.gpu.cublas_lt import LtMatmul
from blink.kernels.matmul import Matmul, take_all

MIN_WEIGHT_BYTES = 4 << 20  # of less, choosing is not worth the while
_MAX_ROWS = 384  # of more, power is the limit, and what is fastest alone need not be in a step


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x: [rows, in]; weight: [out, in]; both on the GPU."""
    if _may_choose(x, weight, bias):
        describe = functools.partial(LtMatmul, x, weight, bias)
        code = autotuner.find(
            name_matmul(x, weight, bias), lambda: _list_candidates(describe()), lambda code: _accepts(describe(), code)
        )
        if code is not None:
            return describe().compute(bytes.fromhex(code))
    return functional.linear(x, weight, bias)


def name_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """Return what GEMMs share that are computed alike, as "bfloat16 224 x 4096 x 28672"."""
    type_name = str(x.dtype).removeprefix("torch.")
    return f"{type_name} {' x '.join(map(str, (*x.shape, len(weight))))}{'' if bias is None else ' + bias'}"


def _may_choose(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dim() != 2 or len(x) > _MAX_ROWS or weight.nbytes < MIN_WEIGHT_BYTES:
        return False
    operands = (x, weight) if bias is None else (x, weight, bias)
    return all(operand.dtype == x.dtype for operand in operands) and cublas_lt.can_compute(*operands)


def _list_candidates(matmul: LtMatmul) -> dict[str, Candidate]:
    """Return the library's algorithms; PyTorch takes the first one, too."""
    return {algorithm.hex(): functools.partial(matmul.compute, algorithm) for algorithm in matmul.list_algorithms()}


def _accepts(matmul: LtMatmul, code: str) -> bool:
    try:
        algorithm = bytes.fromhex(code)
    except ValueError:
        return False
    return len(algorithm) == cublas_lt.ALGORITHM_BYTES and matmul.accepts(algorithm)


def _describe(matrix: Matrix, rows: int) -> str:
    size = matrix.n * matrix.k * (4 if matrix.dtype == "float32" else 2)
    return "algorithm measured at boot" if rows <= _MAX_ROWS and size >= MIN_WEIGHT_BYTES else "its first algorithm"


CUBLAS = Matmul("cuBLAS", take_all, multiply, _describe)
