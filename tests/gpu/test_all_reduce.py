# SPDX-License-Identifier: Apache-2.0
"""The exchanges of several GPUs in one process, against PyTorch on the CPU in the order of ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import Tensor

from gpu_rank_group import ROOM, Group, draw
from triton_interpreter import IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_INTERPRETED or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

COLUMNS = [0, 40, 71]  # of the two ranks' parts
EPS = 1e-5


@pytest.fixture(scope="module")
def group() -> Group:
    group = Group(columns=COLUMNS)
    group.end_step()  # compiles it
    return group


@pytest.fixture(autouse=True)
def _usual(request: pytest.FixtureRequest) -> None:
    if "group" in request.fixturenames:
        from blink.kernels.gpu.comm.boxes import ONE_SHOT_BYTES

        request.getfixturevalue("group").send_lines_up_to(ONE_SHOT_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 4096), (8, 4096), (7, 1), (3, 37), (256, 2048), (1, 1)], ids=str)
def test_all_ranks_have_the_bits_of_the_sum_in_their_order(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for step in range(3):
        parts = draw(group, shape, dtype, step)
        for _ in range(2):  # exchanges of one step
            found = group.run(lambda rank, parts=parts: group.ranks[rank].add(parts[rank]))
            expected = parts[0].cpu() + parts[1].cpu()
            assert all(torch.equal(one.cpu(), expected) for one in found)
        group.end_step()
    assert group.boxes.read_lost() == [-1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (3, 37), (1, 2049), (333, 1111), (1, 131073), (1024, 4096)], ids=str)
def test_two_shots_give_the_bits_of_one(group: Group, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for step in range(2):
        parts = draw(group, shape, dtype, step)
        sums = []
        for most in (0, ROOM, 0):
            group.send_lines_up_to(most)
            sums += group.run(lambda rank, parts=parts: group.ranks[rank].add(parts[rank]))
        expected = parts[0].cpu() + parts[1].cpu()
        assert all(torch.equal(one.cpu(), expected) for one in sums)
        group.end_step()
    assert group.boxes.read_lost() == [-1, -1]


@pytest.mark.parametrize(("dtype", "of_norm"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(1, 4096), (9, 2560), (256, 512), (2, 64), (300, 2048)], ids=str)
def test_the_sum_is_added_to_the_residual_and_normalised(
    group: Group, shape: tuple[int, int], dtype: torch.dtype, of_norm: torch.dtype
) -> None:
    parts, residual = draw(group, shape, dtype, 1), draw(group, shape, dtype, 2)[0].cpu()
    weight = draw(group, shape[1:], of_norm, 3)[0].cpu()
    residuals = [residual.to(device) for device in group.devices]
    weights = [weight.to(device) for device in group.devices]
    before = [one.clone() for one in residuals]

    def call(rank: int) -> Tensor:
        residuals[rank].copy_(before[rank])
        return group.ranks[rank].add_norm(parts[rank], residuals[rank], weights[rank], EPS)

    found = group.run(call)
    group.end_step()
    total = (parts[0].cpu() + parts[1].cpu()) + residual
    wide = total.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()
    assert all(torch.equal(one.cpu(), total) for one in residuals)
    assert torch.equal(found[0].cpu(), found[1].cpu())
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (8e-3, 1e-3)
    torch.testing.assert_close(found[0].cpu().float(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 128])
def test_the_first_rank_gets_all_columns(group: Group, rows: int, dtype: torch.dtype) -> None:
    whole = draw(group, (rows, COLUMNS[-1]), dtype, 4)[0].cpu()
    parts = [whole[:, COLUMNS[rank] : COLUMNS[rank + 1]].to(device) for rank, device in enumerate(group.devices)]
    for _ in range(3):  # of one step, with nothing between them
        first, other = group.run(lambda rank: group.ranks[rank].join(parts[rank]))
        assert torch.equal(first.cpu(), whole)
        assert len(other) == 0
    group.end_step()


@pytest.mark.parametrize("kinds", [(ROOM,), (0,), (ROOM, 0), (ROOM, 0, 0)], ids=["one", "two", "turns", "mixed"])
def test_many_exchanges_in_graphs_are_all_right(group: Group, kinds: tuple[int, ...]) -> None:
    """Graphs run without a wait of the host: the ranks alone keep each other in step. All exchanges differ."""
    num_exchanges, num_steps = 40, 200
    base = torch.arange(4 * 1024).float().view(4, 1024)
    parts = [(base + rank).to(device) for rank, device in enumerate(group.devices)]
    wanted = [(2 * base + 1).to(device) for device in group.devices]
    wrong = [torch.zeros(1, dtype=torch.int64, device=device) for device in group.devices]

    def exchange(rank: int, most: int) -> Tensor:
        group.ranks[rank].one_shot_bytes = most
        total = group.ranks[rank].add(parts[rank])
        wrong[rank].add_((total != wanted[rank]).sum())
        parts[rank].add_(rank + 1)
        wanted[rank].add_(3)  # of both ranks: whole numbers, so that all sums are exact
        return total

    def run_step(rank: int) -> None:
        for _, most in zip(range(num_exchanges), itertools.cycle(kinds), strict=False):
            exchange(rank, most)
        group.ranks[rank].end_step(group.failed[rank])

    group.run(lambda rank: group.ranks[rank].add(parts[rank]))
    group.end_step()
    for rank in range(len(group.devices)):
        group.compile(rank, lambda rank: [exchange(rank, most) for most in set(kinds)])
        wrong[rank].zero_()
    group.synchronize()
    group.launch_graphs(run_step, num_steps)
    assert group.boxes.read_lost() == [-1, -1]
    assert [int(one) for one in wrong] == [0, 0]
    assert float(wanted[0][0, 0]) == 1 + 3 * (num_exchanges * num_steps + len(set(kinds)))


@pytest.mark.parametrize("most", [ROOM, 0], ids=["one", "two"])
def test_a_rank_that_does_not_come_is_named(most: int) -> None:
    from blink.region.layout import CONSTANTS

    group = Group()
    group.send_lines_up_to(most)
    parts = draw(group, (8, 1024), torch.float32, 6)
    start = time.monotonic()
    group.run(lambda rank: group.ranks[rank].add(parts[rank]), ranks=(0,))
    with torch.cuda.device(group.devices[0]):
        group.ranks[0].add(parts[0])  # waits for nothing any more
        group.ranks[0].end_step(group.failed[0])
    group.synchronize()
    assert 1 < time.monotonic() - start < 15
    assert int(group.failed[0]) == CONSTANTS["first_lost_rank"] + 1
    assert group.boxes.read_lost() == [1, 1]
