# SPDX-License-Identifier: Apache-2.0
"""The choice of experts on the GPU, or in Triton's interpreter, against that of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blink.kernels.cpu import router as reference
from blink.models.mlps import Router

kernels = pytest.importorskip("blink.kernels.gpu.moe.router")

# Of DeepSeek-V3, Kimi-K2, GLM-4.7-Flash, Ernie 4.5 and DeepSeek-V2, and what sizes that are no powers of 2 need.
ROUTERS: list[tuple[int, dict[str, Any]]] = [
    (256, {"top_k": 8, "groups": 8, "top_groups": 4, "score": "sigmoid", "has_bias": True, "scale": 2.5}),
    (384, {"top_k": 8, "score": "sigmoid", "has_bias": True, "scale": 2.827}),
    (64, {"top_k": 4, "score": "sigmoid", "has_bias": True, "scale": 1.8, "renormalize": True}),
    (64, {"top_k": 6, "has_bias": True, "renormalize": True}),
    (160, {"top_k": 6, "groups": 8, "top_groups": 3, "group_best": 1, "scale": 16.0}),
    (12, {"top_k": 3, "groups": 3, "top_groups": 2, "score": "sigmoid", "renormalize": True}),
]


@pytest.mark.parametrize(("experts", "options"), ROUTERS, ids=[str(experts) for experts, _ in ROUTERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_and_weights_are_those_of_the_cpu(
    device: torch.device, experts: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(experts)
    router, logits = Router(**options), 2 * torch.randn(9, experts)
    bias = 0.3 * torch.randn(experts) if router.has_bias else None
    ranks, weights = reference.choose_experts(logits, router, bias, dtype)
    moved = None if bias is None else bias.to(device)
    found_ranks, found_weights = kernels.choose_experts(logits.to(device), router, moved, dtype)
    torch.testing.assert_close(found_ranks.cpu(), ranks, rtol=0, atol=0)
    torch.testing.assert_close(found_weights.cpu(), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("experts", "options"), ROUTERS, ids=[str(experts) for experts, _ in ROUTERS])
def test_the_kernel_with_the_routers_gemm_chooses_as_the_cpu(
    device: torch.device, experts: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, as layers take it: counters are zeros again; and each row has the bits that it has alone."""
    monkeypatch.setattr(kernels, "MOST_FUSED_ROWS", 8)
    torch.manual_seed(experts)
    router, weight, x = Router(**options), torch.randn(experts, 80) / 4, torch.randn(5, 80)
    bias = 0.3 * torch.randn(experts) if router.has_bias else None
    ranks, weights = reference.choose_experts(x @ weight.T, router, bias, torch.float32)
    matrix, rows, moved = weight.to(device), x.to(device), None if bias is None else bias.to(device)
    both = [kernels.choose_of_rows(rows, matrix, router, moved) for _ in range(2)]
    for found in both:
        torch.testing.assert_close(found.ranks.cpu(), ranks, rtol=0, atol=0)
        torch.testing.assert_close(found.weights.cpu(), weights, rtol=1e-4, atol=1e-6)
    alone = kernels.choose_of_rows(rows[3:4].contiguous(), matrix, router, moved)
    assert torch.equal(alone.weights, both[0].weights[3:4])
    assert kernels.choose_of_rows(x.new_zeros(9, 80).to(device), matrix, router, moved) is None


def test_a_row_that_is_not_finite_leaves_the_others_alone(device: torch.device) -> None:
    router = Router(top_k=3, groups=2, top_groups=1, score="sigmoid", has_bias=True, renormalize=True)
    logits, bias = torch.randn(3, 8, device=device), torch.zeros(8, device=device)
    expected = kernels.choose_experts(logits, router, bias, torch.float32)
    logits[1] = torch.nan
    ranks, weights = kernels.choose_experts(logits, router, bias, torch.float32)
    assert weights[1].isnan().all()
    assert (ranks[1] <= 0).all()
    for found, wanted in zip((ranks, weights), expected, strict=True):
        torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]], rtol=0, atol=0)
