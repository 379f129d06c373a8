# SPDX-License-Identifier: Apache-2.0
"""The gated activation of the MLP: silu(gate) * up."""

from __future__ import annotations

from torch import Tensor

from blink.kernels.cpu import silu_mul as cpu


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; gate_up: [tokens, 2 * size], gate first; result: [tokens, size]."""
    assert gate_up.ndim == 2
    assert gate_up.shape[1] % 2 == 0
    if gate_up.is_cuda:
        from blink.kernels.gpu import silu_mul as gpu

        return gpu.silu_mul(gate_up)
    return cpu.silu_mul(gate_up)
