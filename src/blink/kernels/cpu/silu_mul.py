# SPDX-License-Identifier: Apache-2.0
"""The gated activation on the CPU."""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu_mul with PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
