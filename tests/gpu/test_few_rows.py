# SPDX-License-Identifier: Apache-2.0
"""GEMMs of few rows without a norm, which ranks take and one GPU may take, against the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from blink.formats.base import matrix_of
from blink.formats.fp8 import FP8, FP8_MAX, quantize_fp8
from blink.formats.packed import pack
from blink.kernels.cpu.activation import activate
from blink.kernels.gpu.device import has_clusters, has_warpgroups

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from blink.formats.layouts import Layout
from blink.kernels.gpu import autotuner
from blink.kernels.gpu.gemm import few_rows, quantized
from blink.runner.gpu_device import GpuDevice, RankDevice

pytestmark = pytest.mark.skipif(not has_clusters() or not has_warpgroups(), reason="needs Hopper")
DEVICE = RankDevice()
MOST_RANK_GEMV_ROWS = {"bf16": 2, "fp8": 1}


def draw(kind: str, n: int, k: int) -> tuple[object, Tensor]:
    """Return a weight and what it stands for."""
    weight = torch.randn(n, k, device="cuda") * k**-0.5
    if kind == "bf16":
        return weight.bfloat16(), weight.bfloat16().float()
    matrix = quantize_fp8(weight)
    return pack([matrix]), matrix.dequantize(torch.float32)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert float((found.float() - expected).norm() / expected.norm()) < 0.02


def round_to_fp8(x: Tensor) -> Tensor:
    """Return what rows stand for whose largest number is FP8's largest."""
    scales = x.float().abs().amax(1, keepdim=True) / FP8_MAX
    return (x.float() / scales).to(FP8).float() * scales


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 20, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(3072, 4096), (4096, 2048), (4096, 7168)])
def test_each_kernel_that_takes_a_gemm_computes_it(kind: str, rows: int, n: int, k: int) -> None:
    torch.manual_seed(rows)
    weight, exact = draw(kind, n, k)
    x, bias = torch.randn(rows, k, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
    matrix = matrix_of(weight)  # pyright: ignore[reportArgumentType]
    taken = [one for one in DEVICE.matmuls[matrix.layout] if one.refuses(matrix, rows) is None]
    assert (taken[0] is few_rows.RANK_GEMV) == (rows <= MOST_RANK_GEMV_ROWS[kind])
    assert (few_rows.GEMV.refuses(matrix, rows) is None) == (rows <= 2)
    assert len(taken) > (kind == "bf16" or rows <= 32)
    for one in [few_rows.GEMV, *taken] if rows <= 2 else taken:
        expected = (round_to_fp8(x) if one is quantized.FP8_ROWS else x.float()) @ exact.T
        assert_near(one.multiply(x, weight, None), expected)
        assert_near(one.multiply(x, weight, bias), expected + bias.float())


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 20, 32])
def test_gated_gemms_have_the_activation(kind: str, rows: int) -> None:
    torch.manual_seed(rows)
    weight, exact = draw(kind, 2 * 7168, 4096)
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    matrix = matrix_of(weight)  # pyright: ignore[reportArgumentType]
    taken = [one for one in (few_rows.GATED_GEMV, few_rows.GATED_GEMM) if one.refuses(matrix, rows) is None]
    assert len(taken) == (2 if rows <= 2 else 1)
    assert (few_rows.GATED_RANK_GEMV.refuses(matrix, rows) is None) == (rows <= MOST_RANK_GEMV_ROWS[kind])
    for one in taken:
        assert_near(one.multiply(x, weight), activate(x.float() @ exact.T, "silu"))


@pytest.mark.usefixtures("_nothing_is_chosen")
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("n", "k"), [(1344, 2048), (5120, 768), (2048, 5120)], ids=["qkv", "q_b", "o_proj"])
def test_what_is_measured_at_boot_computes_the_gemm_and_gives_each_row_the_same_bits(
    kind: str, rows: int, n: int, k: int, tmp_path: Path
) -> None:
    """The shapes are GLM-4.7-Flash's. Rows of drafts are compared with rows of one token."""
    torch.manual_seed(rows)
    weight, exact = draw(kind, n, k)
    matrix = matrix_of(weight)  # pyright: ignore[reportArgumentType]
    measured = GpuDevice.matmuls[matrix.layout][0]
    if measured.refuses(matrix, rows) is not None:
        assert matrix.layout is Layout.UNITS and rows > 2
        return
    x = torch.randn(1, k, device="cuda").bfloat16().expand(rows, -1).contiguous()
    with autotuner.tuning(tmp_path / "products.json"):
        found = measured.multiply(x, weight, None)
    assert_near(found, x.float() @ exact.T)
    assert torch.equal(found, found[:1].expand(rows, -1))
