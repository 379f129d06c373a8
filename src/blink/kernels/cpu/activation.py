# SPDX-License-Identifier: Apache-2.0
"""The gated activation on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.cpu.thread_pool import find_helpers
from blink.kernels.operands import CLIP_LIMIT, CLIP_SLOPE, Activation
from blink.region.native import lib

_SHARED_ELEMENTS = 1 << 15  # from which on PyTorch shares an operation among threads, with borders anywhere in a row


def activate(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute activate with PyTorch, in parts that one thread computes: at borders, bits differ from a vector's."""
    if activation == "silu" and gate_up.is_cpu and gate_up.dtype == torch.float32 and gate_up.is_contiguous():
        return gate_natively(gate_up)
    rows = max(1, 2 * (_SHARED_ELEMENTS - 1) // gate_up.shape[-1])
    if gate_up.shape[0] <= rows:
        return _activate(gate_up, activation)
    return torch.cat([_activate(part, activation) for part in gate_up.split(rows)])


def gate_natively(gate_up: Tensor) -> Tensor:
    """Compute activate of silu and contiguous float32; one thread computes a row."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(rows, size)
    lib.blink_gate_rows(gate_up.data_ptr(), rows, size, result.data_ptr(), find_helpers())
    return result


def _activate(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh").mul_(up)
    gate = gate.clamp(max=CLIP_LIMIT)
    return torch.sigmoid(gate * CLIP_SLOPE).mul_(gate).mul_(up.clamp(-CLIP_LIMIT, CLIP_LIMIT) + 1)
