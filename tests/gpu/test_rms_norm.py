# SPDX-License-Identifier: Apache-2.0
"""Norm kernels against the plain reference."""

from __future__ import annotations

import pytest
import torch

from blink.kernels.cpu import rms_norm as cpu
from blink.kernels.cpu.rms_norm import rms_norm_torch

gpu_rms_norm = pytest.importorskip("blink.kernels.gpu.rms_norm")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [16, 576, 4096])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_and_residual_equal_the_reference(
    size: int, dtype: torch.dtype, has_residual: bool, device: torch.device
) -> None:
    torch.manual_seed(size)
    x, residual, weight = (torch.randn(7, size).to(dtype), torch.randn(7, size).to(dtype), torch.rand(size).to(dtype))
    found_residual = residual.to(device, copy=True)
    found = gpu_rms_norm.rms_norm(x.to(device), weight.to(device), 1e-5, found_residual if has_residual else None)
    expected = rms_norm_torch(x, weight, 1e-5, residual if has_residual else None)
    torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(found_residual.cpu(), residual, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [16, 576])
@pytest.mark.parametrize("has_scale", [True, False])
def test_norms_of_what_is_added_and_of_the_sum_equal_the_reference(
    size: int, dtype: torch.dtype, has_scale: bool, device: torch.device
) -> None:
    torch.manual_seed(size)
    update, residual = torch.randn(7, size).to(dtype) * 3, torch.randn(7, size).to(dtype)
    weights, scale = (torch.rand(2, size) + 0.5).to(dtype), torch.tensor([0.7]).to(dtype) if has_scale else None
    found_residual = residual.to(device, copy=True)
    found = gpu_rms_norm.add_norm(
        *(update.to(device), weights[0].to(device), found_residual, weights[1].to(device), 1e-3),
        None if scale is None else scale.to(device),
    )
    expected = cpu.add_norm(update, weights[0], residual, weights[1], 1e-3, scale)
    torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(found_residual.cpu(), residual, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_last_tokens_of_rows_are_normalised_and_nothing_else_is_written(device: torch.device) -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(9, 96), torch.randn(9, 96), torch.rand(96)
    starts = torch.tensor([0, 1, 5, 9, 9], dtype=torch.int32)
    kept = residual.to(device, copy=True)
    found = gpu_rms_norm.last_token_norm(x.to(device), weight.to(device), 1e-6, kept, starts.to(device), 4)
    last = torch.tensor([0, 4, 8, 8])
    torch.testing.assert_close(found.cpu(), rms_norm_torch(x[last], weight, 1e-6, residual[last]))
    assert torch.equal(kept.cpu(), residual)


def test_an_empty_batch_reads_within_its_tokens(device: torch.device) -> None:
    x = torch.ones(1, 32, device=device)
    starts = torch.zeros(3, dtype=torch.int32, device=device)
    found = gpu_rms_norm.last_token_norm(x, torch.ones(32, device=device), 0.0, torch.ones_like(x), starts, 2)
    torch.testing.assert_close(found.cpu(), torch.ones(2, 32))
