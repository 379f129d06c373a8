# SPDX-License-Identifier: Apache-2.0
"""The GPU engine: boots the model and the resident scheduler, then sleeps. The host takes no part in serving."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from blink.config import EngineConfig
from blink.engine.base import Engine
from blink.engine.device_scheduler import DeviceScheduler, DeviceState
from blink.engine.energy import report_energy
from blink.engine.geometry import StepGraph, count_rows, list_graphs, spare_snapshots
from blink.engine.gpu_adapters import make_gpu_adapters
from blink.errors import ConfigError
from blink.host.heartbeat import HeartbeatAge
from blink.kernels.batch import Batch
from blink.kernels.gpu import autotuner, cublas
from blink.kernels.gpu.gemm import fused_gate_up
from blink.kernels.gpu.launch import compile_ahead
from blink.models.weights.files import cache_folder
from blink.plan.site import Bucket
from blink.region.layout import EngineState
from blink.runner.stream import Stream
from blink.speculation import refuse_on_gpu

logger = logging.getLogger("blink.engine")

_WATCH_SECONDS = 0.25
_HEARTBEAT_TIMEOUT = 10.0  # seconds without a heartbeat; a step may take as long, but the scheduler beats meanwhile
_GRAPH_RESERVE_BYTES = 1 << 30  # executables of all graphs and the workspaces that capture adds
_ENDED = (EngineState.STOPPED, EngineState.FAILED)


class GpuEngine(Engine):
    """Capture every step as a graph for the resident scheduler of one GPU, then only watch it."""

    default_step_tokens = 2048
    default_pooling_tokens = 8192  # nobody waits for a next token, and larger matrices are multiplied faster
    default_segment_ms = 1.0
    cost_seconds = 1.0
    captures_adapters = True
    make_adapters = staticmethod(make_gpu_adapters)

    def __init__(self, config: EngineConfig) -> None:
        refuse_on_gpu(config.speculation)
        # Code loaded at its first use would synchronise with a device on which the scheduler never ends.
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
        super().__init__(config, torch.device("cuda", torch.cuda.current_device()))
        self._scheduler = DeviceScheduler(self._state)
        self._heartbeat_age, self._heartbeat = HeartbeatAge(), 0
        self._capture()
        self._fill_costs()
        self._capture_segments()

    def _measure_free(self, config: EngineConfig) -> int:
        free, total = torch.cuda.mem_get_info()
        return free - int(total * (1 - config.gpu_memory_utilization))

    def _measure_room(self) -> int:
        """Return the bytes that are left for the KV cache beside the weights and the largest step.

        Raises:
            ConfigError: there is no room for a single block.
        """
        step_bytes = self._measure_step()
        free, total = torch.cuda.mem_get_info()
        used = total - free
        whole = self._measure_free(self._config) - step_bytes - _GRAPH_RESERVE_BYTES
        room = whole - self._state_bytes
        if self._config.enable_prefix_caching:
            room = spare_snapshots(room, self._slot_bytes)
        if room < self._cache_shape.least_bytes:
            states = f" and {(whole - room) >> 30} for states; lower --max-num-seqs" if self._state_bytes else ""
            raise ConfigError(
                f"no GPU memory is left for the KV cache: {used >> 30} of {total >> 30} GiB are in use{states}; raise "
                "--gpu-memory-utilization, lower --max-num-batched-tokens or free the GPU"
            )
        return room

    def _measure_step(self) -> int:
        """Return the bytes that the largest step allocates beside weights and KV cache."""
        config, model = self._config, self._model
        num_rows = count_rows(config, config.speculation.num_tokens)
        batch = Batch.allocate(
            max_tokens=config.max_num_batched_tokens,
            max_rows=num_rows,
            num_slots=1,
            max_blocks=self._cache_shape.max_blocks,
            max_model_len=model.spec.max_model_len,
            device=model.device,
            vector_floats=0 if model.spec.pooling is None else model.spec.pooling.width(model.spec.hidden_size),
        )
        batch.kv_slots.fill_(-1)
        kv_cache = model.allocate_kv_cache(1, config.block_size)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kinds = {"scoring": True, "adapters": config.lora.enable_lora}
        self._runner.forward(batch, kv_cache, config.max_num_batched_tokens, num_rows, **kinds)
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def _create_state(self) -> Callable[[str, torch.dtype], Tensor]:
        self._state = DeviceState(self._region, self._model.device)
        return self._state.array

    def _capture(self) -> None:
        """Capture all graphs, the largest first, as the later ones then reuse its memory."""
        cublas.reserve_sm()
        with autotuner.tuning(cache_folder() / "products.json"):
            self._compile_ahead()
            for index, graph in tqdm(self._largest_first(), desc="capturing graphs", unit="graph"):
                run = functools.partial(self._run_step, graph.bucket, scoring=graph.is_scoring)
                run()  # compiles and loads the kernels, and chooses among candidates to compute products
                torch.cuda.synchronize()
                self._scheduler.capture(index, run)

    def _largest_first(self) -> list[tuple[int, StepGraph]]:
        graphs = enumerate(list_graphs(self._geometry))
        return sorted(graphs, key=lambda graph: (graph[1].bucket.tokens, graph[1].bucket.rows), reverse=True)

    def _compile_ahead(self) -> None:
        """Compile on all cores the kernels of decoding rows and few tokens, of which each size has its own."""
        if self._model.spec.pooling is not None:  # whose steps all run as those of prompts do
            return
        sizes = [graph.bucket for graph in list_graphs(self._geometry) if not graph.is_scoring]

        def run() -> None:
            for size in reversed(sizes):
                if size.decoding or size.tokens <= fused_gate_up.MAX_ROWS:
                    kinds = {"decoding": size.decoding, "adapters": size.adapters}
                    self._runner.compute_logits(self._batch, self._kv_cache, size.tokens, size.rows, **kinds)

        compile_ahead(run)
        torch.cuda.synchronize()

    def _capture_segments(self) -> None:
        """Capture the graphs of long steps once more, in the segments in which those are launched that others pass."""
        long = [(index, graph.bucket) for index, graph in self._largest_first() if self._num_segments[index] > 1]
        for index, size in tqdm(long, desc="capturing segments", unit="graph"):
            count, left = self._num_segments[index], list[Stream | None]()
            runs = [functools.partial(self._run_behind, left, size, segment, count) for segment in range(count)]
            for run in runs:
                run()
            torch.cuda.synchronize()
            apart = any(part is not None for part in left)
            left.clear()
            self._scheduler.capture_segments(index, runs, apart=apart)

    def _run_behind(self, left: list[Stream | None], size: Bucket, segment: int, num_segments: int) -> None:
        """Run a segment of a step with what those before it left, and add what it leaves itself."""
        left.append(self._run_segment(size, segment, num_segments, left[-1] if left else None))

    def _time_step(self, graph: int) -> float:
        return self._scheduler.time(graph)

    def _start(self) -> None:
        self._scheduler.start()
        self._energy = report_energy(self._region, self._scheduler.bus_id)

    def _advance(self) -> bool:
        if self.state in _ENDED:
            return False
        time.sleep(_WATCH_SECONDS)
        if self._energy is not None:
            self._energy.look(time.monotonic())
        heartbeat = self._region.control_word("heartbeat")
        silent = self._heartbeat_age.look(time.monotonic(), heard=heartbeat != self._heartbeat)
        self._heartbeat = heartbeat
        if silent > _HEARTBEAT_TIMEOUT:
            logger.error("the GPU has given no sign of life for %.0f s; the kernel's log (dmesg) may say why", silent)
            self.is_dead = True
        return not self.is_dead

    def _end(self) -> None:
        if self.state in _ENDED:  # else an error of the host came first, and nothing may wait for the device
            torch.cuda.synchronize()  # the kernel has ended or is about to
            self._scheduler.destroy_graphs()
            self._state.close(self._region)
