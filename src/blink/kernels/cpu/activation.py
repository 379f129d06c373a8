# SPDX-License-Identifier: Apache-2.0
"""The gated activation on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.operands import CLIP_LIMIT, CLIP_SLOPE, Activation

_SHARED_ELEMENTS = 1 << 15  # from which on PyTorch shares an operation among threads, with borders anywhere in a row


def activate(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute activate with PyTorch, in parts that one thread computes: at borders, bits differ from a vector's."""
    rows = max(1, 2 * (_SHARED_ELEMENTS - 1) // gate_up.shape[-1])
    if gate_up.shape[0] <= rows:
        return _activate(gate_up, activation)
    return torch.cat([_activate(part, activation) for part in gate_up.split(rows)])


def _activate(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh").mul_(up)
    gate = gate.clamp(max=CLIP_LIMIT)
    return torch.sigmoid(gate * CLIP_SLOPE).mul_(gate).mul_(up.clamp(-CLIP_LIMIT, CLIP_LIMIT) + 1)
