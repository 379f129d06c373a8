# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up of weights of 16 bits, as device code on the host's threads, against the activation of plain
GEMMs: clusters that share copies, rings that are used again, edges of both operands."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blink.kernels.activation import activate
from conftest import CompileDevice

Gate = Callable[[Tensor, Tensor, int, int], Tensor]


@pytest.fixture(scope="module")
def gate(compile_device: CompileDevice) -> Gate:
    """Return gate(x, gate_up, outputs of a block, cluster)."""
    words = dict.fromkeys(("prefill/warpgroups.cuh", "common/ptx.cuh"), "gpu_matrices.h")
    run = compile_device("fused_gate_up.cpp", "prefill/gate_up.cu", words=words).gate

    def gate_rows(x: Tensor, gate_up: Tensor, tile: int, cluster: int) -> Tensor:
        (rows, k), outputs = x.shape, len(gate_up) // 2
        out = torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16)
        tensors = (gate_up, x, out)
        run((ctypes.c_void_p * 3)(*(tensor.data_ptr() for tensor in tensors)), tile, cluster, outputs, rows, k)
        return out

    return gate_rows


@pytest.mark.parametrize(
    ("tile", "cluster", "rows", "outputs", "k"), [(64, 1, 50, 72, 1024), (64, 2, 64, 200, 704), (128, 2, 39, 136, 640)]
)
def test_gates_and_ups_give_what_the_activation_gives_of_their_products(
    gate: Gate, tile: int, cluster: int, rows: int, outputs: int, k: int
) -> None:
    torch.manual_seed(rows)
    x, gate_up = torch.randn(rows, k).bfloat16(), (torch.randn(2 * outputs, k) * k**-0.5).bfloat16()
    found = gate(x, gate_up, tile, cluster)
    expected = activate(x.float() @ gate_up.float().T)
    assert float((found.float() - expected).norm() / expected.norm()) < 4e-3
