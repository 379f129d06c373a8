# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights. On the CPU, wide float32 weights are stored in oneDNN's blocked layout when loaded:
with 4 to 16 rows, the batches of decoding, their products then run 1.3 to 2.5 times as fast, and with one row as fast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import QuantizedWeight, Weight
from blink.formats.packed import PackedWeight
from blink.kernels.activation import activate
from blink.kernels.operands import Activation

# The row count for which oneDNN picks the blocked layout; any number of rows may use it.
_PACKED_ROWS = 8


def pack_weight(weight: Tensor) -> Tensor:
    """Return the weight [out, in] in the layout that `linear` multiplies fastest on its device."""
    # Narrow weights gain nothing from it with 8 rows and lose a fifth with one.
    wide = weight.shape[0] >= 2 * weight.shape[1]
    if wide and weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x: [rows, in]; weight: [out, in], as pack_weight returned it."""
    assert x.shape[-1] == weight.shape[1]
    if isinstance(weight, QuantizedWeight):
        result = _multiply_packed(x, weight) if isinstance(weight, PackedWeight) else weight.multiply(x)
        return result if bias is None else result.add_(bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if weight.is_cuda:
        from blink.kernels.gpu import products

        return products.multiply(x, weight, bias)
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, gate_up: Weight, activation: Activation) -> Tensor:
    """Return activation(gate) * up of x @ gate_up.T, whose first half are the gates: activation.py."""
    if activation == "silu":
        if isinstance(gate_up, PackedWeight):
            from blink.kernels.gpu import quantized as gpu

            return gpu.multiply_gated(x, gate_up)
        if isinstance(gate_up, Tensor) and gate_up.is_cuda:
            from blink.kernels.gpu import gated_products

            return gated_products.multiply(x, gate_up)
    return activate(linear(x, gate_up), activation)


def _multiply_packed(x: Tensor, weight: PackedWeight) -> Tensor:
    from blink.kernels.gpu import quantized as gpu

    return gpu.multiply(x, weight)
