# SPDX-License-Identifier: Apache-2.0
"""Matrix multiplications on the CPU, and the layout that a weight is given for GEMMs."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import QuantizedWeight
from blink.formats.layouts import Layout
from blink.kernels.matmul import Matmul, add_bias, take_all

# The row count for which oneDNN picks the blocked layout; any number of rows may use it.
_PACKED_ROWS = 8


def pack_weight(weight: Tensor) -> Tensor:
    """Return the weight [out, in] in the layout that is multiplied fastest on its device."""
    # Narrow weights gain nothing from it with 8 rows and lose a fifth with one.
    wide = weight.shape[0] >= 2 * weight.shape[1]
    if wide and weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    return weight


def _multiply_blocked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _multiply_quantized(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    return add_bias(weight.multiply(x), bias)


MATMULS = {
    Layout.GGUF: (Matmul("GGUF GEMM", take_all, _multiply_quantized),),
    Layout.BLOCKED: (Matmul("oneDNN GEMM", take_all, _multiply_blocked),),
    Layout.ROWS: (Matmul("PyTorch GEMM", take_all, functional.linear),),
}
