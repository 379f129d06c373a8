# SPDX-License-Identifier: Apache-2.0
"""Weights of GGUF files that stay quantized on a GPU: formats/gguf.py says how they lie there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufArrays
from blink.formats.layouts import Matrix
from blink.formats.schemes import GGUF_UNIT
from blink.kernels.gpu.gemm import gguf, gguf_gemv
from blink.kernels.matmul import Matmul, add_bias, take_all

_MOST_ROWS = 384  # of more it is faster to dequantise the weight first


class PlanarGgufWeight(QuantizedEmbedding):
    """A weight in arrays: parts of one number of columns, one below the other, each in a format of its own."""

    def __init__(self, parts: Sequence[GgufArrays], columns: int, dtype: torch.dtype) -> None:
        """Take the parts; dtype: that it computes in."""
        assert all(part.codes.shape[0] == -(-columns // GGUF_UNIT) for part in parts)
        self._parts = tuple(parts)
        self.shape = (sum(part.num_rows for part in parts), columns)
        self.dtype = dtype
        self.device = parts[0].codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.nbytes for part in self._parts)

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T."""
        assert x.dtype == self.dtype
        few = len(x) <= gguf_gemv.MAX_ROWS
        return gguf_gemv.multiply(x, self._parts) if few else gguf.multiply(x, self._parts)

    def dequantize(self) -> Tensor:
        """Return the weight as a tensor."""
        return self.take_rows(torch.arange(self.shape[0], dtype=torch.int32, device=self.device))

    def take_rows(self, rows: Tensor) -> Tensor:
        """Return some rows; what stands for one that the weight has not is undefined: a GPU raises nothing."""
        return gguf.take_rows(self._parts, rows, self.shape[1], self.dtype)


def _refuses(matrix: Matrix, rows: int) -> str | None:  # noqa: ARG001 - as others have it
    return f"more than {_MOST_ROWS} rows" if rows > _MOST_ROWS else None


def _multiply_dequantized(x: Tensor, weight: PlanarGgufWeight, bias: Tensor | None) -> Tensor:
    return add_bias(functional.linear(x, weight.dequantize()), bias)


GGUF = Matmul("GGUF GEMM", _refuses, lambda x, weight, bias: add_bias(weight.multiply(x), bias))
GGUF_DEQUANTIZED = Matmul("GGUF dequantized, then cuBLAS", take_all, _multiply_dequantized)
