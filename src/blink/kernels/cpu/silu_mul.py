# SPDX-License-Identifier: Apache-2.0
"""The gated activation of the MLP: silu(gate) * up."""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; gate_up: [tokens, 2 * size], gate first; result: [tokens, size]."""
    assert gate_up.ndim == 2
    assert gate_up.shape[1] % 2 == 0
    if gate_up.is_cuda:
        from blink.kernels.gpu.silu_mul import silu_mul_gpu

        return silu_mul_gpu(gate_up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Compute silu_mul with plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
