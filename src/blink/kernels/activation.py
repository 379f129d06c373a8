# SPDX-License-Identifier: Apache-2.0
"""The activation of the MLP."""

from __future__ import annotations

from torch import Tensor

from blink.kernels.cpu import activation as cpu
from blink.kernels.operands import Activation


def activate(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up; gate_up: [tokens, 2 * size], gate first; result: [tokens, size].

    relu has no gate: it is computed of [tokens, size] in place.

    gelu_tanh is GELU's approximation by a hyperbolic tangent. clipped_silu is gpt-oss's: gate * sigmoid(1.702 * gate)
    times up + 1, with the gate at most 7 and up within -7 .. 7.
    """
    assert gate_up.ndim == 2
    if activation == "relu":
        return gate_up.relu_()
    assert gate_up.shape[1] % 2 == 0
    if gate_up.is_cuda:
        from blink.kernels.gpu import activation as gpu

        return gpu.activate(gate_up, activation)
    return cpu.activate(gate_up, activation)
