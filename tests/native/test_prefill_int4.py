# SPDX-License-Identifier: Apache-2.0
"""GEMMs of weights of 4 bits with prompts' tokens, as device code on the host's threads, against the dequantised
weight's: blocks that share k, rings that are used again, edges of both operands; the same of the fused gate-up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import PackedWeight, pack
from blink.formats.schemes import GROUP
from blink.kernels.activation import activate
from conftest import CompileDevice

Multiply = Callable[[Tensor, PackedWeight, int, bool], Tensor]


@pytest.fixture(scope="module")
def multiply(compile_device: CompileDevice) -> Multiply:
    """Return multiply(x, weight, config, gated)."""
    words = dict.fromkeys(("prefill/warpgroups.cuh", "common/ptx.cuh"), "gpu_matrices.h")
    run = compile_device("prefill_int4.cpp", "prefill/gemm_int4.cu", words=words).multiply

    def multiply_rows(x: Tensor, weight: PackedWeight, config: int, gated: bool) -> Tensor:
        (rows, k), n = x.shape, weight.shape[0]
        out = torch.full((rows, n // 2 if gated else n), torch.nan, dtype=torch.bfloat16)
        assert weight.groups is not None
        tensors = (weight.values, x, weight.groups, out)
        run((ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors)), gated, config, n, rows, k)
        return out

    return multiply_rows


@pytest.mark.parametrize(
    ("config", "rows", "n", "k", "gated"),
    [
        (1, 100, 80, 512, False),
        (1, 100, 80, 512, True),
        (2, 64, 80, 1280, False),
        *(pytest.param(1, 40, 176, 2048, gated, marks=pytest.mark.long) for gated in (False, True)),
        *(pytest.param(2, 64, 80, 4352, gated, marks=pytest.mark.long) for gated in (False, True)),
    ],
)
def test_products_equal_those_of_the_dequantised_weight(
    multiply: Multiply, config: int, rows: int, n: int, k: int, gated: bool
) -> None:
    torch.manual_seed(rows)
    scales = ((torch.rand(n, k // GROUP) + 0.5) * k**-0.5 / 4).to(torch.float16).float()
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8)
    matrix = QuantizedMatrix(torch.randint(0, 16, (n, k), dtype=torch.uint8), scales, zeros)
    x = torch.randn(rows, k).bfloat16()
    found = multiply(x, pack([matrix]), config, gated)
    expected = x.float() @ matrix.dequantize(torch.float32).T
    expected = activate(expected) if gated else expected
    assert float((found.float() - expected).norm() / expected.norm()) < 4e-3
