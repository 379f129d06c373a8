# SPDX-License-Identifier: Apache-2.0
"""The gate of an expert that all tokens have, by one kernel with the norm that it reads, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from blink.kernels.cpu.rms_norm import rms_norm
from blink.kernels.shared_expert import add_shared_expert

shared_gate = pytest.importorskip("blink.kernels.gpu.moe.shared_gate")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "size", "hidden"), [(1, 96, 512), (2, 512, 48), (7, 40, 64)])
def test_rows_are_scaled_by_their_gates(
    device: torch.device, rows: int, size: int, hidden: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    inner, x = (torch.randn(rows, width, generator=generator).mul(3).to(dtype) for width in (size, hidden))
    norm, gate = 1 + torch.randn(hidden, generator=generator) / 8, torch.randn(hidden, generator=generator).to(dtype)
    for weight in (norm, norm.to(dtype)):
        scores = rms_norm(x.float(), weight.float(), 1e-3) @ gate.float() / hidden**0.5
        expected = inner.float() * torch.sigmoid(scores)[:, None]
        found = inner.clone().to(device)
        scaled = (gate / hidden**0.5).to(dtype)
        shared_gate.scale_by_gate(found, x.to(device), weight.to(device), 1e-3, scaled.to(device))
        torch.testing.assert_close(found.cpu().float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gates", [True, False], ids=["gate", "plain"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 2048), (3, 48), (7, 1000)])
def test_the_expert_of_all_tokens_is_added_as_pytorch_adds_it(
    device: torch.device, rows: int, hidden: int, gates: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    found, same, x = (torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(3))
    gate = (torch.randn(hidden, generator=generator) / hidden**0.5).to(dtype) if gates else None
    expected = add_shared_expert(found.float().clone(), same.float(), x.float(), None if gate is None else gate.float())
    moved = None if gate is None else gate.to(device)
    result = shared_gate.add_shared(found.to(device, copy=True), same.to(device), x.to(device), moved)
    torch.testing.assert_close(result.cpu().float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
