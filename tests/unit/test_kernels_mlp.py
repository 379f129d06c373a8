# SPDX-License-Identifier: Apache-2.0
"""Norm, products, activation and experts against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from blink.kernels.activation import activate
from blink.kernels.linear import pack_weight
from blink.kernels.moe import moe
from blink.kernels.rms_norm import rms_norm
from blink.runner.matmul import linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("size", [5, 64, 79])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_divides_by_the_root_mean_square(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(10)
    x, weight = torch.randn(5, size).to(dtype) * 3, torch.rand(size).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rms_norm_adds_to_the_residual_in_place_first() -> None:
    torch.manual_seed(11)
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.rand(64)
    total = x + residual
    normalised = rms_norm(x, weight, 1e-6, residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normalised, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_gates_the_second_half_with_the_first(dtype: torch.dtype) -> None:
    torch.manual_seed(12)
    gate_up = torch.randn(7, 48).to(dtype)
    gate, up = gate_up[:, :24].double(), gate_up[:, 24:].double()
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(activate(gate_up).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_with_packed_weights_equal_float64(dtype: torch.dtype, num_rows: int, with_bias: bool) -> None:
    torch.manual_seed(13)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((num_rows, 40), (72, 40), (72,)))
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    found = linear(x, pack_weight(weight), bias if with_bias else None)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_each_token_gets_the_weighted_sum_of_its_best_experts(renormalize: bool, top_k: int) -> None:
    torch.manual_seed(14)
    num_experts, hidden, size = 8, 16, 12
    x, logits = torch.randn(9, hidden), torch.randn(9, num_experts)
    gate_up, down = torch.randn(num_experts, 2 * size, hidden), torch.randn(num_experts, hidden, size)
    expected = torch.zeros(9, hidden, dtype=torch.float64)
    for token in range(9):
        probabilities = logits[token].double().softmax(0)
        best = sorted(range(num_experts), key=lambda expert: -float(probabilities[expert]))[:top_k]
        total = sum(float(probabilities[expert]) for expert in best) if renormalize else 1.0
        for expert in best:
            gate, up = (gate_up[expert].double() @ x[token].double()).split(size)
            inner = gate * gate.sigmoid() * up
            expected[token] += probabilities[expert] / total * (down[expert].double() @ inner)
    found = moe(x, logits, gate_up, down, top_k=top_k, renormalize=renormalize)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_row_on_a_cpu_has_the_same_bits_among_any_others() -> None:
    """By 7 threads, whose borders would be in the middle of vectors."""
    threads = torch.get_num_threads()
    torch.manual_seed(11)
    gate_up = torch.randn(64, 2 * 1536)
    alone = torch.cat([activate(gate_up[row : row + 1]) for row in range(64)])
    try:
        torch.set_num_threads(7)
        assert torch.equal(activate(gate_up), alone)
    finally:
        torch.set_num_threads(threads)
