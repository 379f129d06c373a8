# SPDX-License-Identifier: Apache-2.0
"""The activation kernel against the plain reference."""

from __future__ import annotations

import pytest
import torch

from blink.kernels.cpu import activation as cpu
from blink.kernels.operands import Activation

gpu_activation = pytest.importorskip("blink.kernels.gpu.activation")


@pytest.mark.parametrize(
    ("size", "activation"),
    [(8, "silu"), (1024, "silu"), (1536, "silu"), (1536, "gelu_tanh"), (1536, "clipped_silu")],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_activation_equals_the_reference(
    size: int, dtype: torch.dtype, tolerance: float, activation: Activation, device: torch.device
) -> None:
    torch.manual_seed(3)
    # Wide values, where exp overflows too.
    gate_up = (torch.randn(5, 2 * size) * 40).to(dtype)
    found = gpu_activation.activate(gate_up.to(device), activation).cpu()
    expected = cpu.activate(gate_up.float(), activation)
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
