# SPDX-License-Identifier: Apache-2.0
"""Products of weights of 4 bits with prompts' tokens against the dequantised weight's: every split, edges of both
operands, more tokens than a block takes, and what is not finite."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_decode_planes import draw, draw_weight, error

from blink.kernels.gpu import prompt_products, quantized
from blink.kernels.gpu.decode.launch import can_multiply_groups
from blink.kernels.gpu.prompt_products import SPLITS, Split

pytestmark = pytest.mark.skipif(not can_multiply_groups(), reason="needs the warpgroup products of Hopper")


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_products_of_the_dequantised_weight(split: Split) -> None:
    torch.manual_seed(1)
    for (n, k), rows in itertools.product(((200, 512), (1160, 3072)), (split.tokens - 27, 2 * split.tokens + 5)):
        (weight, plain), x = draw_weight("int4", n, k), draw(rows, k)
        out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        prompt_products.launch_product(x, weight, out, split)
        assert error(out, x.float() @ plain.T) < 4e-3


@pytest.mark.parametrize(("rows", "n", "k"), [(97, 8, 1024), (200, 4096, 4096), (333, 6144, 4096), (1024, 384, 14336)])
def test_products_of_prompts_are_those_of_the_dequantised_weight(rows: int, n: int, k: int) -> None:
    torch.manual_seed(2)
    (weight, plain), x = draw_weight("int4", n, k), draw(rows, k)
    found = quantized.multiply(x, weight)
    assert torch.equal(found, prompt_products.multiply(x, weight)) and torch.equal(found, quantized.multiply(x, weight))
    assert error(found, x.float() @ plain.T) < 4e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_row_alone(value: float) -> None:
    torch.manual_seed(3)
    (weight, plain), x = draw_weight("int4", 256, 1024), draw(150, 1024)
    x[77, 5] = value
    found, others = prompt_products.multiply(x, weight), torch.arange(150, device="cuda") != 77
    assert not found[77].isfinite().any() and error(found[others], x[others].float() @ plain.T) < 4e-3
