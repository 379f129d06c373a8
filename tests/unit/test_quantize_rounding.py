# SPDX-License-Identifier: Apache-2.0
"""Calibrated rounding against rounding to nearest: never worse for correlated inputs, the same for independent ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.quantize.rounding import Fp8Grid, Grid, Int4Grid, round_e4m3, round_matrix, round_nearest

GRIDS = [Fp8Grid(), Int4Grid(64)]


def draw(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return a matrix, and inputs that few directions explain, as those of a model's layers are."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    hidden = torch.randn(4 * columns, columns // 8, generator=generator)
    mixed = hidden @ torch.randn(columns // 8, columns, generator=generator)
    return weight, mixed + torch.randn(mixed.shape, generator=generator) * 0.3


def error(weight: Tensor, x: Tensor, found: QuantizedMatrix) -> float:
    exact = x @ weight.T
    return float((x @ found.dequantize(torch.float32).T - exact).norm() / exact.norm())


@pytest.mark.parametrize("grid", GRIDS, ids=["fp8", "int4"])
def test_products_of_correlated_inputs_lose_less_than_half_of_what_rounding_to_nearest_loses(grid: Grid) -> None:
    weight, x = draw(96, 256)
    nearest, found = round_nearest(weight, grid), round_matrix(weight, x.T @ x, grid)
    assert error(weight, x, nearest) > 0.005
    assert error(weight, x, found) < 0.5 * error(weight, x, nearest)


@pytest.mark.parametrize("grid", GRIDS, ids=["fp8", "int4"])
def test_uncorrelated_inputs_give_what_rounding_to_nearest_gives(grid: Grid) -> None:
    weight, _ = draw(96, 256)
    found, nearest = round_matrix(weight, 3 * torch.eye(256), grid), round_nearest(weight, grid)
    assert torch.equal(found.values.float(), nearest.values.float())
    assert torch.equal(found.scales, nearest.scales)
    if nearest.zeros is not None:
        assert found.zeros is not None and torch.equal(found.zeros, nearest.zeros)


def compensate_plainly(weight: Tensor, hessian: Tensor, grid: Grid, scales: Tensor, zeros: Tensor) -> Tensor:
    """Round column by column, each time solving for what the rest should become; return the dequantised matrix.

    With damping as round_matrix has it; the order is that of falling importance.
    """
    hessian = hessian.double() + torch.eye(len(hessian)).double() * 0.01 * hessian.diagonal().mean()
    width = weight.shape[1] // scales.shape[1]
    rest, result = weight.double().clone(), torch.zeros_like(weight)
    left = hessian.diagonal().argsort(descending=True).tolist()
    while left:
        column = left.pop(0)
        group = slice(column // width, column // width + 1)
        current = rest[:, column : column + 1].float()
        code = grid.encode(current, scales[:, group], zeros[:, group])
        result[:, column] = ((code - zeros[:, group]) * scales[:, group])[:, 0]
        lost = rest[:, column] - result[:, column].double()
        if left:  # the least of |(lost, change) x| over the change of the columns that are left
            change = torch.linalg.solve(hessian[left][:, left], hessian[left, column])
            rest[:, left] += lost[:, None] * change
    return result


@pytest.mark.parametrize("grid", [Fp8Grid(num_scales=1), Int4Grid(16, num_ranges=1)], ids=["fp8", "int4"])
def test_each_column_is_made_up_for_by_those_behind_it(grid: Grid) -> None:
    weight, x = draw(6, 48)
    hessian = x.T @ x
    found = round_matrix(weight, hessian, grid)
    zeros = torch.zeros_like(found.scales) if found.zeros is None else found.zeros.float()
    expected = compensate_plainly(weight, hessian, grid, found.scales, zeros)
    # A number that lies between two codes may fall to either side by the order of sums.
    same = torch.isclose(found.dequantize(torch.float32), expected, rtol=1e-5, atol=1e-7).float().mean()
    assert same > 0.97


@pytest.mark.parametrize("grid", GRIDS, ids=["fp8", "int4"])
def test_inputs_that_are_always_zero_and_empty_rows_are_rounded(grid: Grid) -> None:
    weight, x = draw(16, 128)
    weight[3], x[:, 17] = 0, 0
    found = round_matrix(weight, x.T @ x, grid).dequantize(torch.float32)
    assert found.isfinite().all() and not found[3].any()
    assert round_matrix(weight, torch.zeros(128, 128), grid).dequantize(torch.float32).isfinite().all()


def test_scales_and_zero_points_of_4_bits_are_what_files_and_kernels_keep() -> None:
    weight, x = draw(32, 128)
    found = round_matrix(weight * torch.logspace(-4, 2, 32)[:, None], x.T @ x, Int4Grid(32))
    assert torch.equal(found.scales, found.scales.to(torch.bfloat16).to(torch.float16).float())
    assert found.zeros is not None and found.zeros.max() <= 15 and found.values.max() <= 15


def test_rounding_to_e4m3_is_that_of_the_cast() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2  # exact in float32
    near = [ties.nextafter(torch.tensor(side)) for side in (0.0, 500.0)]
    random = torch.randn(20000, generator=torch.Generator().manual_seed(1)).exp2() * 30
    values = torch.cat([codes, ties, *near, random.clamp(max=448), torch.tensor([1e-30, 0.0])])
    for signed in (values, -values):
        assert torch.equal(round_e4m3(signed), signed.to(FP8).float())
    assert round_e4m3(torch.tensor([460.0, -1e9])).tolist() == [448.0, -448.0]
