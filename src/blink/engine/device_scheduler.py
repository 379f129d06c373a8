# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""The resident scheduler of one GPU: its memory, the step graphs that it launches, and its start.

Once start() has returned, nothing in this process may synchronise with the device or allocate on it: the scheduler
never ends, so such a call would wait for ever. device_leave.py has the exception.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from cuda.core import Device, Kernel, LaunchConfig, Stream, launch

from blink.engine.device_code import compile_scheduler
from blink.engine.state import array_places
from blink.kernels.gpu.launch import check
from blink.region.layout import CONSTANTS, DEVICE_PROGRAM, STATE, STEP_GRAPHS, StepKind
from blink.region.memory import Region
from blink.region.native import lib

_DEVICE_LAUNCH = int(driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
_LANES = CONSTANTS["device_lanes"]
IDLE_SLEEP_NS = 40_000  # a first token waits for up to twice that; benchmarks/idle_power.py varies it
_EXECUTABLES: int = STEP_GRAPHS["whole"].shape[0]
TIMED_LAUNCHES = 3


class DeviceArrays:
    """The arrays of a scheduler's state in GPU memory, all zeros."""

    def __init__(self, region: Region, device: torch.device) -> None:
        """Allocate them as the region's geometry says."""
        geometry = np.ascontiguousarray(region.geometry)
        self._arrays = array_places(geometry)
        size = lib.blink_state_bytes(geometry.ctypes.data)
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)  # also makes the device's context current
        self.address = self.memory.data_ptr()

    def array(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one of the state's arrays, flat, as `dtype`."""
        offset, size, count = self._arrays[name]
        return self.memory[offset : offset + size * count].view(dtype)

    def array_address(self, name: str) -> int:
        """Return the device address of one of the state's arrays."""
        return self.address + self._arrays[name][0]

    def array_span(self, name: str) -> tuple[int, int]:
        """Return where one of the state's arrays begins in its memory, and the bytes of an element."""
        return self._arrays[name][:2]


class DeviceState(DeviceArrays):
    """The scheduler's state in GPU memory, over a region that the GPU reaches by its mapped address."""

    def __init__(self, region: Region, device: torch.device) -> None:
        """Register the region with CUDA and upload the initial state."""
        super().__init__(region, device)
        check(driver.cuMemHostRegister(region.address, len(region.bytes), driver.CU_MEMHOSTREGISTER_DEVICEMAP))
        region_address = int(check(driver.cuMemHostGetDevicePointer(region.address, 0)))
        head = np.zeros(STATE.itemsize, np.uint8)
        lib.blink_state_build(head.ctypes.data, region.address, self.address, region_address)
        self.memory[: len(head)].copy_(torch.from_numpy(head))

    def close(self, region: Region) -> None:
        """Take the region back from CUDA, once the scheduler has ended."""
        check(driver.cuMemHostUnregister(region.address))


class DeviceScheduler:
    """Capture step graphs, then start the kernel that launches them."""

    kernel, threads = "blink_scheduler", _LANES

    def __init__(self, state: DeviceArrays, plan_words: Sequence[torch.Tensor] = ()) -> None:
        """plan_words: those of the ranks on other GPUs, which follow this scheduler."""
        self._state, self._plan_words = state, plan_words
        self._device = state.memory.device
        core = Device(self._device.index or 0)
        core.set_current()
        self.bus_id: str = core.pci_bus_id
        names = self.kernel, "blink_scheduler_passes", "blink_mark_done"
        self._kernel, self._passes, self._mark_done = _load_kernels(f"sm_{core.arch}", names)
        self._pool, self._pool_apart = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self._device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pairs: dict[int, list[Any]] = {}
        self._segments: dict[int, list[tuple[torch.cuda.CUDAGraph, Any]]] = {}
        self._copies: list[Any] = []  # what carries out copies while steps run
        self._executables: list[Any] = []  # all that were instantiated

    def capture(self, index: int, run_step: Callable[[], None]) -> None:
        """Capture graph `index` of the geometry's table from a function that enqueues one step.

        Capture the largest first: all graphs share one memory pool.
        """

        graph = self._capture(lambda: self._enqueue_launch(run_step, StepKind.WHOLE), self._pool)
        self._graphs[index] = graph
        self._pairs[index] = [self._instantiate(graph) for _ in range(_EXECUTABLES)]

    def capture_segments(self, index: int, segments: Sequence[Callable[[], None]], *, apart: bool = False) -> None:
        """Capture graph `index` once more, in segments; each function enqueues one of them.

        apart: in memory that no whole step writes, for what a segment allocates and a later one reads. One step at a
        time is launched in segments, so those of other graphs may share that memory.
        """
        pool = self._pool_apart if apart else self._pool
        runs = [functools.partial(self._enqueue_launch, run, StepKind.SEGMENTED) for run in segments]
        graphs = [self._capture(run, pool) for run in runs]
        self._segments[index] = [(graph, self._instantiate(graph)) for graph in graphs]

    def capture_copy(self, copy: Callable[[], None]) -> None:
        """Capture what carries out csrc's CopyOrder, from a function that enqueues it."""
        self._copy = self._capture(copy, self._pool)
        self._copies = [self._instantiate(self._copy) for _ in range(_EXECUTABLES)]

    def launch(self, index: int) -> None:
        """Launch the whole graph `index` from the host, for the step that the batch describes; before start()."""
        check(driver.cuGraphLaunch(self._pairs[index][0], self.stream.cuda_stream))

    def time(self, index: int) -> float:
        """Return the seconds that a launch of the graph `index` takes.

        It is the mean of a few launches one after the other, behind one that is not counted.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        for launch_number in range(1 + TIMED_LAUNCHES):
            if launch_number == 1:
                begin.record(self.stream)
            self.launch(index)
        end.record(self.stream)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / TIMED_LAUNCHES

    def prepare(self) -> None:
        """Capture the resident kernel: the last that allocates memory or waits for the GPU."""
        with torch.cuda.device(self._device):
            self._build_program()
            place = self._program.data_ptr()
            graph = self._capture(lambda: self._enqueue(self._kernel, self.threads, place), self._pool)
            self._resident = (graph, self._instantiate(graph))
            torch.cuda.synchronize()

    def start(self) -> None:
        """Launch the resident kernel that is prepared; it runs until the region's stop or leave word, or an error."""
        with torch.cuda.device(self._device):
            check(driver.cuGraphLaunch(self._resident[1], self.stream.cuda_stream))

    def has_ended(self) -> bool:
        """Whether nothing of the resident kernel, or of what it has launched, is in flight."""
        return self.stream.query()

    def run_passes(self, passes: int) -> None:
        """Run a bounded number of scheduler passes and wait for them and their steps, for tests."""
        if not hasattr(self, "_program"):
            self._build_program()
            graph = self._capture(
                lambda: self._enqueue(self._passes, _LANES, self._program.data_ptr(), np.uint32(passes)), self._pool
            )
            self._resident = (graph, self._instantiate(graph))
        check(driver.cuGraphLaunch(self._resident[1], self.stream.cuda_stream))
        torch.cuda.synchronize(self._device)

    def destroy_graphs(self) -> None:
        """Destroy what was instantiated of the graphs, once the scheduler has ended."""
        for executable in self._executables:
            check(driver.cuGraphExecDestroy(executable))
        self._executables.clear()

    def _build_program(self) -> None:
        """Write csrc/device/program.h's DeviceProgram."""
        program = np.zeros(1, DEVICE_PROGRAM)
        program["state"], program["graphs"] = self._state.address, self._build_table().data_ptr()
        program["idle_sleep_ns"], program["num_followers"] = IDLE_SLEEP_NS, len(self._plan_words)
        self._word_places = self._upload(np.array([word.data_ptr() for word in self._plan_words], np.uint64))
        program["plan_words"] = self._word_places.data_ptr()
        if self._copies:
            program["copies"] = [int(executable) for executable in self._copies]
        self._program = self._upload(program)

    def _build_table(self) -> torch.Tensor:
        """Return the table of all executables."""
        table = np.zeros(len(self._pairs), STEP_GRAPHS)
        self._segment_lists = {
            index: self._upload(np.array([int(executable) for _, executable in segments], np.uint64))
            for index, segments in self._segments.items()
        }
        for index, pair in self._pairs.items():
            table[index]["whole"] = [int(executable) for executable in pair]
            if index in self._segment_lists:
                table[index]["segments"] = self._segment_lists[index].data_ptr()
        self._table = self._upload(table)
        return self._table

    def _enqueue_launch(self, run: Callable[[], None], kind: StepKind) -> None:
        """Enqueue work, and behind it the mark that it is done, for the step of this kind."""
        run()
        places = (self._state.array_address(kind.array(name)) for name in ("header", "output"))
        self._enqueue(self._mark_done, 1, *places)

    def _upload(self, structs: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(structs.view(np.uint8)).to(self._device)

    def _capture(self, run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            run()
        return graph

    def _enqueue(self, kernel: Kernel, threads: int, *arguments: Any) -> None:
        stream = Stream.from_handle(torch.cuda.current_stream(self._device).cuda_stream)
        launch(stream, LaunchConfig(grid=1, block=threads), kernel, *arguments)

    def _instantiate(self, graph: torch.cuda.CUDAGraph) -> Any:
        raw = driver.CUgraph(graph.raw_cuda_graph())
        executable = check(driver.cuGraphInstantiate(raw, _DEVICE_LAUNCH))
        self._executables.append(executable)
        check(driver.cuGraphUpload(executable, self.stream.cuda_stream))
        return executable


def _load_kernels(arch: str, names: Sequence[str]) -> list[Kernel]:
    """Return kernels of the scheduler's program, with their code on the current GPU: captures load none."""
    code = compile_scheduler(arch)
    kernels: list[Kernel] = [code.get_kernel(name) for name in names]
    for kernel in kernels:
        check(driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle))))
    return kernels
