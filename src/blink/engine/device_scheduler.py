# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""The resident scheduler of one GPU: its memory, the step graphs that it launches, and its start.

Once start() has returned, nothing in this process may synchronise with the device or allocate on it: the scheduler
never ends, so such a call would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from cuda.core import Device, Kernel, LaunchConfig, Stream, launch

from blink.engine.device_code import compile_scheduler
from blink.engine.state import array_places
from blink.kernels.gpu.decode.launch import check
from blink.region.layout import CONSTANTS, DEVICE_PROGRAM, GRAPH_PAIR, STATE
from blink.region.memory import Region
from blink.region.native import lib

_DEVICE_LAUNCH = int(driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
_LANES = CONSTANTS["device_lanes"]
IDLE_SLEEP_NS = 40_000  # a first token waits for up to twice that; benchmarks/idle_power.py varies it
_EXECUTABLES: int = GRAPH_PAIR["executables"].shape[0]


class DeviceState:
    """The scheduler's state in GPU memory, over a region that the GPU reaches by its mapped address."""

    def __init__(self, region: Region, device: torch.device) -> None:
        """Register the region with CUDA and upload the initial state."""
        geometry = np.ascontiguousarray(region.geometry)
        self._arrays = array_places(geometry)
        size = lib.blink_state_bytes(geometry.ctypes.data)
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)  # also makes the device's context current
        check(driver.cuMemHostRegister(region.address, len(region.bytes), driver.CU_MEMHOSTREGISTER_DEVICEMAP))
        region_address = int(check(driver.cuMemHostGetDevicePointer(region.address, 0)))
        self.address = self.memory.data_ptr()
        head = np.zeros(STATE.itemsize, np.uint8)
        lib.blink_state_build(head.ctypes.data, region.address, self.address, region_address)
        self.memory[: len(head)].copy_(torch.from_numpy(head))

    def close(self, region: Region) -> None:
        """Take the region back from CUDA, once the scheduler has ended."""
        check(driver.cuMemHostUnregister(region.address))

    def array(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one of the state's arrays, flat, as `dtype`."""
        offset, size, count = self._arrays[name]
        return self.memory[offset : offset + size * count].view(dtype)

    def array_address(self, name: str) -> int:
        """Return the device address of one of the state's arrays."""
        return self.address + self._arrays[name][0]


class DeviceScheduler:
    """Capture step graphs, then start the kernel that launches them."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._device = state.memory.device
        core = Device(self._device.index or 0)
        core.set_current()
        code = compile_scheduler(f"sm_{core.arch}")
        self._kernel: Kernel = code.get_kernel("blink_scheduler")
        self._passes: Kernel = code.get_kernel("blink_scheduler_passes")
        self._mark_done: Kernel = code.get_kernel("blink_mark_done")
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pairs: dict[int, list[Any]] = {}

    def capture(self, index: int, run_step: Callable[[], None]) -> None:
        """Capture graph `index` of the geometry's table from a function that enqueues one step.

        Capture the largest first: all graphs share one memory pool.
        """

        def run() -> None:
            run_step()
            self._enqueue(self._mark_done, 1, self._state.array_address("batch"), self._state.array_address("output"))

        graph = self._capture(run)
        self._graphs[index] = graph
        self._pairs[index] = [self._instantiate(graph) for _ in range(_EXECUTABLES)]

    def start(self) -> None:
        """Launch the resident kernel; it runs until the region's stop word or an error."""
        self._build_program()
        graph = self._capture(lambda: self._enqueue(self._kernel, _LANES, self._program.data_ptr()))
        self._resident = (graph, self._instantiate(graph))
        torch.cuda.synchronize(self._device)
        check(driver.cuGraphLaunch(self._resident[1], self._stream.cuda_stream))

    def run_passes(self, passes: int) -> None:
        """Run a bounded number of scheduler passes and wait for them and their steps, for tests."""
        if not hasattr(self, "_program"):
            self._build_program()
            graph = self._capture(
                lambda: self._enqueue(self._passes, _LANES, self._program.data_ptr(), np.uint32(passes))
            )
            self._resident = (graph, self._instantiate(graph))
        check(driver.cuGraphLaunch(self._resident[1], self._stream.cuda_stream))
        torch.cuda.synchronize(self._device)

    def _build_program(self) -> None:
        """Write csrc/gpu/program.h's DeviceProgram and its table of executables."""
        table = np.zeros(len(self._pairs), GRAPH_PAIR)
        for index, pair in self._pairs.items():
            table[index]["executables"] = [int(executable) for executable in pair]
        self._table = self._upload(table)
        program = np.zeros(1, DEVICE_PROGRAM)
        program["state"], program["graphs"] = self._state.address, self._table.data_ptr()
        program["idle_sleep_ns"] = IDLE_SLEEP_NS
        self._program = self._upload(program)

    def _upload(self, structs: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(structs.view(np.uint8)).to(self._device)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph

    def _enqueue(self, kernel: Kernel, threads: int, *arguments: Any) -> None:
        stream = Stream.from_handle(torch.cuda.current_stream(self._device).cuda_stream)
        launch(stream, LaunchConfig(grid=1, block=threads), kernel, *arguments)

    def _instantiate(self, graph: torch.cuda.CUDAGraph) -> Any:
        raw = driver.CUgraph(graph.raw_cuda_graph())
        executable = check(driver.cuGraphInstantiate(raw, _DEVICE_LAUNCH))
        check(driver.cuGraphUpload(executable, self._stream.cuda_stream))
        return executable
