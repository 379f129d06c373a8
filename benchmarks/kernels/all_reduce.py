# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""Times the all-reduce of two GPUs in the shapes of a model: alone, with residual and norm, against that norm and NCCL.

The sum is timed in one shot (all to all, in lines) and in two (parts, then all parts); kernels/gpu/comm/boxes.py says
from which size on a model takes two. With residual and norm it takes what a model does; few rows are timed with a block
a row, and spread over clusters of blocks (kernels/gpu/comm/spread.py). GEMVs of one and two rows are timed alone,
and with the all-reduce behind them.

python benchmarks/kernels/all_reduce.py [--hidden 4096]
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from cuda.bindings import driver
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from blink.kernels.gpu.comm.all_reduce import GpuRanks
from blink.kernels.gpu.comm.boxes import ONE_SHOT_BYTES, Boxes
from blink.kernels.gpu.gemm import gemv
from blink.kernels.gpu.launch import check
from blink.kernels.gpu.rms_norm import rms_norm

_ROWS = (1, 8, 32, 128, 512, 2048)
_CALLS, _ROUNDS = 50, 5
_WEIGHTS = 4  # in turns, so that they come from memory
_EPS = 1e-5


def main() -> None:
    """Print microseconds a call, the least of some rounds of calls in one graph."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hidden", type=int, default=4096)
    hidden = parser.parse_args().hidden
    if torch.cuda.device_count() < 2:
        raise SystemExit("two GPUs are needed")
    devices = [torch.device("cuda", index) for index in range(2)]
    boxes = Boxes(devices, max(_ROWS) * hidden * 2, max(_ROWS) * hidden * 2)
    ranks = [GpuRanks(boxes, rank, (0, 1, 2)) for rank in range(2)]
    names = {"one us": 8, "two us": 8, "+norm us": 9, "spread us": 9, "norm us": 8, "NCCL us": 8}
    print(f"{'rows':>5} {'KB':>6} " + " ".join(f"{name:>{width}}" for name, width in names.items()))
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(run_nccl, (hidden, answers), nprocs=2)
    for rows in _ROWS:
        found = time_ours(ranks, devices, rows, hidden)
        nccl = answers.get()
        shown = "".join(f"{one:{width}.2f}" for one, width in zip(found, (9, 9, 10, 10, 9), strict=True))
        print(f"{rows:5} {rows * hidden * 2 // 1024:6}{shown} {nccl:8.2f}")
    names = ("alone us", "+norm us", "spread us")
    print(f"\nGEMV of {hidden} x {hidden}\n{'rows':>5} " + " ".join(f"{name:>9}" for name in names))
    for rows in (1, 2):
        print(f"{rows:5}" + "".join(f"{one:10.2f}" for one in time_gemvs(ranks, devices, rows, hidden)))


def time_ours(ranks: list[GpuRanks], devices: list[torch.device], rows: int, hidden: int) -> list[float]:
    """Return the times of the sum in one and in two shots, with residual and norm, spread, and of these alone."""
    parts, residuals, weights = [], [], []
    for device in devices:
        parts.append(torch.randn(rows, hidden, device=device).bfloat16())
        residuals.append(torch.zeros_like(parts[-1]))
        weights.append(torch.ones(hidden, device=device).bfloat16())

    def add_norm(rank: int) -> Tensor:
        return ranks[rank].add_norm(parts[rank], residuals[rank], weights[rank], _EPS)

    calls: tuple[tuple[int, bool, Callable[[int], Tensor]], ...] = (
        (parts[0].nbytes, False, lambda rank: ranks[rank].add(parts[rank])),
        (0, False, lambda rank: ranks[rank].add(parts[rank])),
        (ONE_SHOT_BYTES, False, add_norm),
        (ONE_SHOT_BYTES, True, add_norm),
        (ONE_SHOT_BYTES, False, lambda rank: rms_norm(parts[rank], weights[rank], _EPS, residuals[rank])),
    )
    found = []
    for most, spreads_rows, call in calls:
        for end in ranks:
            end.one_shot_bytes, end.spreads_rows = most, spreads_rows
        graphs = [capture(ranks[rank], device, call) for rank, device in enumerate(devices)]
        found.append(time_graphs(graphs))
        check_all_came(ranks)
    return found


def time_gemvs(ranks: list[GpuRanks], devices: list[torch.device], rows: int, hidden: int) -> list[float]:
    """Return the times of a GEMV alone, with the all-reduce of a block a row, and with a spread one."""
    inputs, residuals, norms, weights = [], [], [], []
    for device in devices:
        inputs.append(torch.randn(rows, hidden, device=device).bfloat16())
        residuals.append(torch.zeros_like(inputs[-1]))
        norms.append(torch.ones(hidden, device=device).bfloat16())
        each = [torch.randn(hidden, hidden, device=device).bfloat16() / hidden for _ in range(_WEIGHTS)]
        weights.append(itertools.cycle(each))

    def multiply(rank: int) -> Tensor:
        return gemv.linear(inputs[rank], next(weights[rank]))

    def sum_up(rank: int) -> Tensor:
        return ranks[rank].add_norm(multiply(rank), residuals[rank], norms[rank], _EPS)

    found = []
    for spreads_rows, call in ((False, multiply), (False, sum_up), (True, sum_up)):
        for end in ranks:
            end.one_shot_bytes, end.spreads_rows = ONE_SHOT_BYTES, spreads_rows
        found.append(time_graphs([capture(ranks[rank], device, call) for rank, device in enumerate(devices)]))
        check_all_came(ranks)
    return found


def check_all_came(ranks: list[GpuRanks]) -> None:
    """End the program if a rank was lost."""
    if any(lost >= 0 for lost in ranks[0].boxes.read_lost()):
        raise SystemExit("a rank did not come: what was timed waited for nothing")


class PeerGraph:
    """What one GPU enqueues, whole on that GPU before any GPU waits for another.

    torch.cuda.graph's own stream is the first GPU's. A launch that uploads a graph may wait for all GPUs: this one does
    not.
    """

    def __init__(self, device: torch.device, run: Callable[[], object]) -> None:
        """Capture what `run` enqueues, whose code is loaded."""
        self._device, self._graph = device, torch.cuda.CUDAGraph(keep_graph=True)
        self._run = run  # with the tensors that it works on
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            with torch.cuda.graph(self._graph, stream=self.stream):
                run()
            self._executable = check(driver.cuGraphInstantiate(driver.CUgraph(self._graph.raw_cuda_graph()), 0))
            check(driver.cuGraphUpload(self._executable, self.stream.cuda_stream))
            torch.cuda.synchronize()

    def launch(self) -> None:
        """Launch it after what was launched before."""
        with torch.cuda.device(self._device):
            check(driver.cuGraphLaunch(self._executable, self.stream.cuda_stream))


def capture(end: GpuRanks, device: torch.device, call: Callable[[int], Tensor]) -> PeerGraph:
    """Return a graph of calls on a GPU, which end one step."""
    failed = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        end.is_alone = True  # compiles
        call(end.rank)
        end.end_step(failed)
        end.is_alone = False

    def run() -> None:
        for _ in range(_CALLS):
            call(end.rank)
        end.end_step(failed)

    return PeerGraph(device, run)


def time_graphs(graphs: list[PeerGraph]) -> float:
    """Return the microseconds of a call, of graphs that each GPU runs at the same time."""
    times = []
    for _ in range(1 + _ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for index, graph in enumerate(graphs):
            graph.launch()  # in which they find each other
            if index == 0:
                begin.record(graph.stream)
            graph.launch()
            if index == 0:
                end.record(graph.stream)
        for index in range(len(graphs)):
            torch.cuda.synchronize(index)
        times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return min(times[1:])


def run_nccl(rank: int, hidden: int, answers: multiprocessing.SimpleQueue[float]) -> None:
    """Put the microseconds of NCCL's all-reduces, each captured in a graph of two processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=2)
    for rows in _ROWS:
        found = time_nccl(torch.zeros(rows, hidden, device="cuda", dtype=torch.bfloat16))
        if rank == 0:
            answers.put(found)
    distributed.destroy_process_group()


def time_nccl(part: Tensor) -> float:
    """Return the microseconds of an all-reduce."""
    for _ in range(3):
        distributed.all_reduce(part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            distributed.all_reduce(part)
    times = []
    for _ in range(1 + _ROUNDS):
        distributed.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return min(times[1:])


if __name__ == "__main__":
    main()
