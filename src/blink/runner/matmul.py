# SPDX-License-Identifier: Apache-2.0
"""Single GEMMs, each by the kernel that the planner chooses for it: where no plan was made before."""

from __future__ import annotations

from torch import Tensor

from blink.formats.base import Weight, matrix_of
from blink.kernels.activation import activate
from blink.kernels.operands import Activation
from blink.runner.devices import DeviceCode, code_of
from blink.runner.planner import choose_gated, choose_matmul


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, *, code: DeviceCode | None = None) -> Tensor:
    """Return x @ weight.T + bias; x: contiguous [rows, in]; weight: [out, in], as pack_weight returned it.

    code: whose kernels are chosen from; None: all of x's device.
    """
    assert x.shape[-1] == weight.shape[1]
    code = code or code_of(x.device)
    choice = choose_matmul(code.device, matrix_of(weight), x.shape[0])
    return code.kernels.matmuls[choice.kernel].multiply(x, weight, bias)


def gated_linear(x: Tensor, gate_up: Weight, activation: Activation) -> Tensor:
    """Return activation(gate) * up of x @ gate_up.T, whose first half are the gates: kernels/activation.py."""
    code = code_of(x.device)
    choice = choose_gated(code.device, matrix_of(gate_up), x.shape[0], activation)
    gated = code.kernels.gated.get(choice.kernel)
    if gated is not None:
        return gated.multiply(x, gate_up)
    return activate(code.kernels.matmuls[choice.kernel].multiply(x, gate_up, None), activation)
