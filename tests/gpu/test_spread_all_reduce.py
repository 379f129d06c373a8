# SPDX-License-Identifier: Apache-2.0
"""The all-reduce of few rows on several GPUs: against that of one block a row, and in chains with delayed ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gpu_counts import TWO_GPUS
from gpu_rank_group import SIZES, Delays, Group, draw

pytestmark = [pytest.mark.gpu, TWO_GPUS]

EPS = 1e-5
ROWS = (1, 2, 3, 8, 16, 17, 31, 32, 64)
DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
WIDTHS = [2048, 2880, 4096, 5120, 8192]


@pytest.fixture(scope="module", params=SIZES)
def group(request: pytest.FixtureRequest) -> Group:
    group = Group(request.param)
    group.end_step()
    group.compile_ahead(lambda rank: compile_sums(group, rank))
    return group


def compile_sums(group: Group, rank: int) -> None:
    """Compile the sums of all tests."""
    for (dtype, of_norm), width, rows, on in itertools.product(DTYPES, WIDTHS, ROWS, (False, True)):
        numbers = torch.zeros(rows, width, dtype=dtype, device=group.devices[rank])
        group.ranks[rank].spreads_rows = on
        group.ranks[rank].add_norm(numbers, numbers, numbers[0].to(of_norm), EPS)


def spread_rows(group: Group, *, on: bool) -> None:
    for end in group.ranks:
        end.spreads_rows = on


def add_norms(
    group: Group, parts: list[Tensor], residuals: list[Tensor], weights: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return each rank's residual and its norm."""
    before = [one.clone() for one in residuals]
    own = [one.clone() for one in residuals]

    def call(rank: int) -> Tensor:
        own[rank].copy_(before[rank])
        return group.ranks[rank].add_norm(parts[rank], own[rank], weights[rank], EPS)

    norms = group.run(call)
    group.end_step()
    return [(one.cpu(), norm.cpu()) for one, norm in zip(own, norms, strict=True)]


@pytest.mark.parametrize(("dtype", "of_norm"), DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_residual_has_the_bits_of_one_block_a_row(
    group: Group, width: int, dtype: torch.dtype, of_norm: torch.dtype
) -> None:
    weights = [draw(group, (width,), of_norm, 3)[0].to(device) for device in group.devices]
    for rows in ROWS:
        residuals = [draw(group, (rows, width), dtype, 2)[0].to(device) for device in group.devices]
        for seed in range(3):
            parts = draw(group, (rows, width), dtype, 10 + seed)
            spread_rows(group, on=False)
            expected = add_norms(group, parts, residuals, weights)[0]
            spread_rows(group, on=True)
            found = add_norms(group, parts, residuals, weights)
            assert all(torch.equal(one, expected[0]) for one, _ in found), rows
            assert all(torch.equal(norm, found[0][1]) for _, norm in found), rows
            rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (8e-3, 1e-3)
            torch.testing.assert_close(found[0][1].float(), expected[1].float(), rtol=rtol, atol=atol)
    assert group.boxes.read_lost() == [-1] * len(group.ranks)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("width", [2048, 4096, 8192])
def test_chains_of_exchanges_with_delayed_ranks_repeat_their_bits(group: Group, width: int, rows: int) -> None:
    """Each norm is the next summand, with no other kernel between most of them. The first time the host waits."""
    spread_rows(group, on=True)
    num_exchanges, num_steps = 30, 60
    weights = [draw(group, (width,), torch.bfloat16, 3)[0].to(device) for device in group.devices]
    parts = draw(group, (rows, width), torch.bfloat16, 7)
    residuals = [torch.zeros_like(one) for one in parts]

    def exchange(rank: int, part: Tensor) -> Tensor:
        return group.ranks[rank].add_norm(part, residuals[rank], weights[rank], EPS)

    current = parts
    for _ in range(num_exchanges):
        current = group.run(lambda rank, current=current: exchange(rank, current[rank]))
        group.synchronize()
    group.end_step()
    expected = [(norm.clone(), residual.clone()) for norm, residual in zip(current, residuals, strict=True)]
    assert all(torch.equal(one.cpu(), expected[0][0].cpu()) for one, _ in expected)
    wrong = [torch.zeros(1, dtype=torch.int64, device=device) for device in group.devices]
    delays = Delays(width + rows)

    def run_step(rank: int) -> None:
        residuals[rank].zero_()
        part = parts[rank]
        for _ in range(num_exchanges):
            delays.enqueue()
            part = exchange(rank, part)
        wrong[rank].add_((part != expected[rank][0]).sum() + (residuals[rank] != expected[rank][1]).sum())
        group.ranks[rank].end_step(group.failed[rank])

    for rank in range(len(group.ranks)):
        group.compile(rank, run_step)
        wrong[rank].zero_()
    group.launch_graphs(run_step, num_steps)
    assert group.boxes.read_lost() == [-1] * len(group.ranks)
    assert [int(one) for one in wrong] == [0] * len(group.ranks)
