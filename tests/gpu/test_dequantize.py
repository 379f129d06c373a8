# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportMissingParameterType=false
"""FP8 numbers as 16 bits: each of them, by assembly on the GPU and as Triton converts them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blink.formats.fp8 import FP8
from blink.kernels.gpu.gemm.dequantize import dequantize_fp8
from triton_interpreter import IS_INTERPRETED


@triton.jit
def _dequantize(values, result, FAST: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(result + place, dequantize_fp8(tl.load(values + place), tl.bfloat16, FAST))


@pytest.mark.parametrize("fast", [False, True])
def test_each_number_is_unpacked_exactly(fast: bool, device: torch.device) -> None:
    if fast and IS_INTERPRETED:
        pytest.skip("assembly needs a GPU")
    values = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)
    result = torch.empty(256, dtype=torch.bfloat16, device=device)
    _dequantize[(1,)](values, result, FAST=fast)
    expected = values.float()
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(result.float()[is_number], expected[is_number])
