# SPDX-License-Identifier: Apache-2.0
"""The copies of recurrent states on the GPU against those of plain PyTorch; in Triton's interpreter too."""

from __future__ import annotations

import random

import pytest
import torch

from blink.kernels.cpu import snapshots as reference
from blink.kernels.layer_cache import StateCache
from blink.kernels.snapshots import SnapshotRows
from triton_interpreter import IS_INTERPRETED, large

pytest.importorskip("triton")
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from blink.kernels.gpu.recurrent import snapshots

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
SEQUENCES, SNAPSHOTS = 70, 5
SMALL, ODD, LARGE = (2, 16, 16, 64), (3, 24, 40, 100), (32, 128, 128, 8192)  # value heads, dk, dv, channels
SIZES = [SMALL, ODD, pytest.param(LARGE, marks=large)]


def draw_group(layers: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, slots: int) -> StateCache:
    *state, channels = sizes
    states = torch.randn(layers, slots, *state, device=DEVICE)
    return StateCache(states, torch.randn(layers, slots, 4, channels, device=DEVICE).to(dtype))


def copy(group: StateCache) -> StateCache:
    return StateCache(group.states.clone(), group.inputs.clone())


def draw_rows(num_rows: int, marked: list[int]) -> SnapshotRows:
    """Return rows of different slots, of which those marked have different snapshots."""
    rng = random.Random(num_rows)
    marks = torch.zeros(num_rows, dtype=torch.int32)
    marks[marked] = torch.tensor(rng.sample(range(1, SNAPSHOTS + 1), len(marked)), dtype=torch.int32)
    slots = torch.tensor(rng.sample(range(SEQUENCES), num_rows), dtype=torch.int32)
    return SnapshotRows(marks.to(DEVICE), slots.to(DEVICE), SEQUENCES)


def check(found: StateCache, wanted: StateCache) -> None:
    """Compare every slot bit by bit, also where NaN lies."""
    for kept, expected in ((found.states, wanted.states), (found.inputs, wanted.inputs)):
        assert torch.equal(kept.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("num_rows", "marked"), [(7, [0, 3, 4]), (1, []), (1, [0]), (7, [6]), (64, [1, 2, 40, 63]), (65, [])]
)
def test_marked_rows_are_copied_and_nothing_else(
    num_rows: int, marked: list[int], sizes: tuple[int, int, int, int], dtype: torch.dtype, *, saves: bool
) -> None:
    torch.manual_seed(num_rows)
    group = draw_group(2, sizes, dtype, SEQUENCES + SNAPSHOTS)
    group.states[:, SEQUENCES // 2] = group.inputs[:, SEQUENCES // 2] = torch.nan
    wanted, rows = copy(group), draw_rows(num_rows, marked)
    reference.copy_states(wanted, rows, saves=saves)
    snapshots.copy_states(group, rows, saves=saves)
    check(group, wanted)


def test_marks_behind_the_rows_of_a_step_mean_nothing() -> None:
    """The buffer keeps what an earlier step of more rows left there."""
    group = draw_group(1, SMALL, torch.float32, SEQUENCES + SNAPSHOTS)
    wanted, rows = copy(group), draw_rows(40, [3, 20])
    few = SnapshotRows(rows.marks[:17], rows.slots[:17], rows.first)
    reference.copy_states(wanted, few, saves=True)
    snapshots.copy_states(group, few, saves=True)
    check(group, wanted)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter captures no graphs")
def test_a_captured_copy_reads_the_marks_of_each_launch() -> None:
    group = draw_group(2, SMALL, torch.bfloat16, SEQUENCES + SNAPSHOTS)
    rows = draw_rows(8, [])
    snapshots.copy_states(group, rows, saves=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        snapshots.copy_states(group, rows, saves=True)
    for marked in ([], [2], [0, 7], []):
        wanted, drawn = copy(group), draw_rows(8, marked)
        rows.marks.copy_(drawn.marks)
        reference.copy_states(wanted, rows, saves=True)
        graph.replay()
        check(group, wanted)


@pytest.mark.skipif(IS_INTERPRETED, reason="a shape more that takes Triton's interpreter seconds")
def test_slots_may_lie_far_apart() -> None:
    """As those of 30 layers and 40 sequences of Qwen3.6-35B-A3B do; the last layer begins behind 2^31 words."""
    sequences, layers = 160, 30
    states = torch.zeros(layers, sequences + 1, 32, 128, 128, dtype=torch.float32, device=DEVICE)
    inputs = torch.zeros(layers, sequences + 1, 4, 8192, dtype=torch.bfloat16, device=DEVICE)
    states[:, 150] = torch.randn(32, 128, 128, device=DEVICE)
    inputs[:, 150] = torch.randn(4, 8192, device=DEVICE).bfloat16()
    marks, slots = (torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (1, 150))
    snapshots.copy_states(StateCache(states, inputs), SnapshotRows(marks, slots, sequences), saves=True)
    assert torch.equal(states[:, 150], states[:, sequences])
    assert torch.equal(inputs[:, 150], inputs[:, sequences])
    assert not states[:, :150].any()
