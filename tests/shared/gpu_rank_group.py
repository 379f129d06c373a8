# SPDX-License-Identifier: Apache-2.0
"""For tests of exchanges between GPUs: all ranks of a group in this thread, which drives them in turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from benchmark_programs import load_benchmark
from gpu_counts import needs_gpus

ROOM = 1 << 24  # bytes of an exchange
SIZES = [
    pytest.param(2, id="two"),
    pytest.param(3, id="three", marks=needs_gpus(3, "needs three GPUs")),
    pytest.param(4, id="four", marks=needs_gpus(4, "needs four GPUs")),
]
DELAY_CYCLES = 20000  # at most, of a rank before a kernel: about 10 us


class Delays:
    """Kernels that take a while, before some of a rank's others: in other turns on each rank."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def enqueue(self) -> None:
        if self._chance.random() < 0.3:
            torch.cuda._sleep(self._chance.randrange(DELAY_CYCLES))


class Group:
    """Ranks on a GPU each: launches do not wait."""

    def __init__(self, size: int = 2, columns: Sequence[int] | None = None) -> None:
        """columns: where each rank's part of joined columns begins, and at the end how many there are."""
        from blink.kernels.gpu.comm.all_reduce import GpuRanks
        from blink.kernels.gpu.comm.boxes import Boxes

        self.devices = [torch.device("cuda", index) for index in range(size)]
        self.boxes = Boxes(self.devices, ROOM, ROOM)
        self.ranks = [GpuRanks(self.boxes, rank, columns or range(size + 1)) for rank in range(size)]
        self.failed = [torch.zeros(1, dtype=torch.int32, device=device) for device in self.devices]

    def run(self, call: Callable[[int], Tensor], ranks: Sequence[int] | None = None) -> list[Tensor]:
        """Call something of each rank on its GPU, compiled before; return what it returned."""
        chosen = range(len(self.ranks)) if ranks is None else ranks
        for rank in chosen:
            self.compile(rank, call)
        self.synchronize()
        found = []
        for rank in chosen:
            with torch.cuda.device(self.devices[rank]):
                found.append(call(rank))
        return found

    def compile(self, rank: int, call: Callable[[int], object]) -> None:
        """Load the code of what a rank calls, with nothing exchanged."""
        self.ranks[rank].is_alone = True
        with torch.cuda.device(self.devices[rank]):
            call(rank)
        self.ranks[rank].is_alone = False

    def compile_ahead(self, call: Callable[[int], object]) -> None:
        """Compile on all cores what a rank calls, which is given no numbers."""
        from blink.kernels.gpu.launch import compile_ahead

        with torch.cuda.device(self.devices[0]):
            self.ranks[0].is_alone = True
            compile_ahead(lambda: call(0))
            self.ranks[0].is_alone = False

    def launch_graphs(self, run_step: Callable[[int], None], times: int) -> None:
        """Capture a step of each rank, whose code is loaded, and launch it many times with no wait of the host."""
        peer_graph = load_benchmark("kernels/all_reduce").PeerGraph
        graphs = [peer_graph(device, lambda rank=rank: run_step(rank)) for rank, device in enumerate(self.devices)]
        for _ in range(times):
            for graph in graphs:
                graph.launch()
        self.synchronize()

    def send_lines_up_to(self, num_bytes: int) -> None:
        """Take two shots for larger sums."""
        for end in self.ranks:
            end.one_shot_bytes = num_bytes

    def end_step(self) -> None:
        for rank, end in enumerate(self.ranks):
            with torch.cuda.device(self.devices[rank]):
                end.end_step(self.failed[rank])
        self.synchronize()

    def synchronize(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)


def draw(group: Group, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return random numbers of each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for device in group.devices]
