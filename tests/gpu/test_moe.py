# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts kernels against the plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blink.kernels.cpu import moe as cpu
from blink.kernels.operands import Activation

gpu_moe = pytest.importorskip("blink.kernels.gpu.moe")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Make distinct logits per token, since the order of equal ones is not defined."""
    generator = torch.Generator().manual_seed(6)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)
    return ((order - num_experts / 2) / 16).to(dtype)


def assert_equals_reference(
    num_tokens: int,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    top_k: int = 3,
    dtype: torch.dtype = torch.float32,
    num_padding: int = 0,
    renormalize: bool = True,
    router_logits: Tensor | None = None,
    activation: Activation = "silu",
    has_biases: bool = False,
) -> None:
    """Compare with the reference in float32; padding holds NaN, and the result there must be zero."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16")
    num_experts, hidden, size = shape
    generator = torch.Generator().manual_seed(7)
    x, gate_up, down = (
        torch.randn(dims, generator=generator) * dims[-1] ** -0.5
        for dims in ((num_tokens, hidden), (num_experts, 2 * size, hidden), (num_experts, hidden, size))
    )
    x, gate_up, down = (x * hidden**0.5).to(dtype), gate_up.to(dtype), down.to(dtype)
    logits = make_logits(num_tokens, num_experts, dtype) if router_logits is None else router_logits
    inner_bias, bias = (torch.randn(part.shape[:2], generator=generator).to(dtype) for part in (gate_up, down))
    wide = (inner_bias.float(), bias.float()) if has_biases else None
    expected = cpu.moe(
        x.float(), logits, gate_up.float(), down.float(),
        top_k=top_k, renormalize=renormalize, activation=activation, biases=wide,
    )  # fmt: skip
    padded = [
        torch.cat((part, torch.full((num_padding, part.shape[1]), torch.nan, dtype=dtype))) for part in (x, logits)
    ]
    count = torch.tensor([num_tokens], dtype=torch.int32)
    inputs = [part.to(device) for part in (*padded, gate_up, down, count)]
    biases = (inner_bias.to(device), bias.to(device)) if has_biases else None
    found = gpu_moe.moe(*inputs, top_k=top_k, renormalize=renormalize, activation=activation, biases=biases).cpu()
    torch.testing.assert_close(found[:num_tokens].float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not found[num_tokens:].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 150])
def test_any_number_of_tokens_equals_the_reference(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_equals_reference(num_tokens, (8, 64, 48), device, dtype=dtype)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 6])
def test_each_number_of_choices_equals_the_reference(top_k: int, renormalize: bool, device: torch.device) -> None:
    assert_equals_reference(20, (6, 32, 16), device, top_k=top_k, renormalize=renormalize)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_biases_and_the_clipped_activation_equal_the_reference(
    num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    assert_equals_reference(num_tokens, (4, 64, 48), device, dtype=dtype, activation="clipped_silu", has_biases=True)


def test_padding_is_not_routed_and_becomes_zero(device: torch.device) -> None:
    assert_equals_reference(5, (8, 32, 32), device, num_padding=60)


def test_all_tokens_may_choose_the_same_experts(device: torch.device) -> None:
    logits = torch.arange(16.0).expand(140, -1).contiguous()
    assert_equals_reference(140, (16, 32, 32), device, router_logits=logits)


def test_many_pairs_per_expert_equal_the_reference(device: torch.device) -> None:
    assert_equals_reference(130, (2, 64, 128), device, top_k=2, dtype=torch.bfloat16)


def test_of_equal_router_logits_the_first_experts_are_chosen(device: torch.device) -> None:
    routes = gpu_moe.route(
        torch.zeros(3, 5, device=device), torch.tensor([3], dtype=torch.int32, device=device), top_k=2
    )
    assert routes.counts.tolist() == [3, 3, 0, 0, 0]
    assert routes.pairs[:2].tolist() == [[0, 2, 4], [1, 3, 5]]
    torch.testing.assert_close(routes.weights.cpu(), torch.full((6,), 0.2))
