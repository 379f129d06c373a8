# SPDX-License-Identifier: Apache-2.0
"""GEMMs of weights of 4 bits with prompts' tokens against the dequantised weight's: every config, edges of both
operands, more tokens than a block takes, and what is not finite; the same of the fused gate-up."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from blink.kernels.cpu.activation import activate
from blink.kernels.gpu.device import has_warpgroups
from blink.runner.matmul import gated_linear, linear

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_hi_lo import draw, draw_weight, error

from blink.kernels.gpu.gemm import prefill_int4
from blink.kernels.gpu.gemm.prefill_int4 import CONFIGS, TileConfig

pytestmark = pytest.mark.skipif(not has_warpgroups(), reason="needs the warpgroup products of Hopper")


def compute_matmul(x: Tensor, plain: Tensor, gated: bool) -> Tensor:
    product = x.float() @ plain.T
    return activate(product) if gated else product


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_split_gives_the_products_of_the_dequantised_weight(config: TileConfig, gated: bool) -> None:
    torch.manual_seed(1)
    for (n, k), rows in itertools.product(((208, 512), (1168, 3072)), (config.tokens - 27, 2 * config.tokens + 5)):
        (weight, plain), x = draw_weight("int4", n, k), draw(rows, k)
        out = torch.full((rows, n // 2 if gated else n), torch.nan, dtype=torch.bfloat16, device="cuda")
        prefill_int4.launch_gemm(x, weight, out, config, gated=gated)
        assert error(out, compute_matmul(x, plain, gated)) < 4e-3


@pytest.mark.parametrize(("rows", "n", "k"), [(97, 8, 1024), (200, 4096, 4096), (333, 6144, 4096), (1024, 384, 14336)])
def test_products_of_prompts_are_those_of_the_dequantised_weight(rows: int, n: int, k: int) -> None:
    torch.manual_seed(2)
    (weight, plain), x = draw_weight("int4", n, k), draw(rows, k)
    found = linear(x, weight)
    assert torch.equal(found, prefill_int4.multiply(x, weight)) and torch.equal(found, linear(x, weight))
    assert error(found, x.float() @ plain.T) < 4e-3


@pytest.mark.parametrize("rows", [7, 96, 97, 250, 2049])
def test_gates_and_ups_give_what_the_activation_gives_of_their_products(rows: int) -> None:
    torch.manual_seed(4)
    (weight, plain), x = draw_weight("int4", 2 * 1800, 1536), draw(rows, 1536)
    found = gated_linear(x, weight, "silu")
    assert torch.equal(found, gated_linear(x, weight, "silu"))
    assert error(found, compute_matmul(x, plain, gated=True)) < 5e-3
    expected = activate(x.float() @ plain.T, "gelu_tanh")
    assert error(gated_linear(x, weight, "gelu_tanh"), expected) < 5e-3


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(value: float, gated: bool) -> None:
    torch.manual_seed(3)
    (weight, plain), x = draw_weight("int4", 256, 1024), draw(150, 1024)
    x[77, 5] = value
    found, others = prefill_int4.multiply(x, weight, gated=gated), torch.arange(150, device="cuda") != 77
    expected = compute_matmul(x, plain, gated)
    assert not found[77].isfinite().any() and error(found[others], expected[others]) < 4e-3
