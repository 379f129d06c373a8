# SPDX-License-Identifier: Apache-2.0
"""The GPU engine: boots the model and the resident scheduler, then sleeps. The host takes no part in serving."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from tqdm import tqdm

from blink.config import EngineConfig
from blink.engine import gpu_weights
from blink.engine.base import Engine
from blink.engine.cache_size import CacheSize
from blink.engine.costs import first_layer
from blink.engine.determinism import make_runner, write_fingerprint
from blink.engine.device_leave import without_scheduler
from blink.engine.device_scheduler import TIMED_LAUNCHES, DeviceScheduler, DeviceState
from blink.engine.energy import report_energy
from blink.engine.geometry import StepGraph, count_rows, list_graphs, spare_snapshots
from blink.engine.gpu_adapters import capture_copies, make_gpu_adapters
from blink.engine.gpu_group import Follower, GpuGroup, capture_segments, find_failed, load_group
from blink.engine.gpu_host_tier import GpuHostBlocks
from blink.engine.guessing import add_drafter, count_head_bytes, reserve_residuals
from blink.engine.model_control import ModelControl
from blink.engine.rank_fit import DEFAULT_STEP_TOKENS, GRAPH_BYTES
from blink.engine.vocabulary import ReadVocabulary, read_vocabulary
from blink.errors import ConfigError
from blink.host.heartbeat import HeartbeatAge
from blink.kernels.batch import Batch
from blink.kernels.gpu import autotuner, cublas
from blink.kernels.gpu.gemm import fused_gate_up
from blink.kernels.gpu.launch import compile_ahead
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.spec import ModelSpec
from blink.models.weights.files import cache_folder
from blink.models.weights.loader import open_model
from blink.plan.site import Bucket
from blink.region.layout import EngineState, StepKind
from blink.runner.run import Runner
from blink.runner.stream import Stream
from blink.speculation import check_on_gpu

logger = logging.getLogger("blink.engine")

_WATCH_SECONDS = 0.25
_HEARTBEAT_TIMEOUT = 10.0  # seconds without a heartbeat; a step may take as long, but the scheduler beats meanwhile
_ENDED = (EngineState.STOPPED, EngineState.FAILED)


class GpuEngine(Engine):
    """Capture every step as a graph for the resident scheduler of one GPU, then only watch it."""

    default_step_tokens = DEFAULT_STEP_TOKENS
    default_pooling_tokens = 8192  # nobody waits for a next token, and larger matrices are multiplied faster
    default_segment_ms = 1.0
    cost_seconds = 1.0
    captures_larger = True
    make_adapters = staticmethod(make_gpu_adapters)
    _group: GpuGroup | None = None  # of several ranks
    _control: ModelControl | None = None  # of changes to the model

    def __init__(self, config: EngineConfig, read: ReadVocabulary = read_vocabulary) -> None:
        # Code loaded at its first use would synchronise with a device on which the scheduler never ends.
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
        device = torch.device("cuda", torch.cuda.current_device())
        self._parts = gpu_weights.reserve_parts(device) if config.enable_sleep_mode else None
        super().__init__(config, device, read)
        write_fingerprint(self._region, self._config, self._config.model, self._model.device)
        self._host = self._allocate_host()
        self._scheduler = DeviceScheduler(self._state, [one.scheduler.plan_word for one in self._followers])
        self._heartbeat_age, self._heartbeat = HeartbeatAge(), 0
        reserve_residuals(self._runner, self._segmented_batch, self._residual)
        self._capture()
        capture_copies(self._scheduler, self._stores, self._array("copy_order", torch.int32))
        self._fill_costs()
        self._capture_segments()
        self._control = self._open_control()

    def _open_control(self) -> ModelControl | None:
        """Let frontends change the weights, unless updates of them, or parts on other ranks, would have to follow."""
        if self._group is not None or self._sockets:
            return None
        leave = functools.partial(without_scheduler, self._region, self._scheduler)
        control = ModelControl(
            self._region, gpu_weights.GpuWeights(self._model, self._parts), self._config, self._model.device, leave
        )
        self._sockets.append(control.listen())
        return control

    def _allocate_host(self) -> GpuHostBlocks | None:
        """Allocate blocks in host memory, if there are to be such."""
        count = int(self._geometry["num_host_blocks"])
        if not count:
            return None
        for follower in self._followers:
            follower.keep_blocks(self._state, count, self._config.block_size)
        return GpuHostBlocks(self._model, self._state, self._kv_cache, count, self._config.block_size)

    def _begin_step(self) -> None:
        if self._host is not None:
            self._host.enqueue()

    def _fit_to_model(self, config: EngineConfig, spec: ModelSpec) -> EngineConfig:
        check_on_gpu(config.speculation, spec, spec.shard.size)
        return super()._fit_to_model(config, spec)

    def _load(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Runner:
        self._group = load_group(config, device, dtype)
        if self._group is not None:
            return self._group.runner
        if self._parts is None:
            runner = super()._load(config, device, dtype)
        else:
            runner = make_runner(open_model(config.model, device, dtype).load(self._parts.weights.place), config)
        add_drafter(runner, config, count_rows(config))
        return runner

    def _allocate_kv_cache(self, size: CacheSize) -> KvCache:
        for follower in self._followers:
            follower.allocate(functools.partial(self._allocate_rank, size), self._config.max_num_batched_tokens)
        if self._parts is not None:
            self._model.allocate_cells = self._parts.cells.allocate
        return super()._allocate_kv_cache(size)

    def _allocate_rank(self, size: CacheSize, model: Decoder) -> KvCache:
        return model.allocate_kv_cache(size.num_blocks, self._config.block_size, *self._count_kept(size))

    @property
    def _ranks(self) -> Sequence[Decoder]:
        return super()._ranks if self._group is None else self._group.models

    @property
    def _runners(self) -> Sequence[Runner]:
        return [*super()._runners, *(follower.runner for follower in self._followers)]

    @property
    def _followers(self) -> list[Follower]:
        return [] if self._group is None else self._group.followers

    @property
    def _schedulers(self) -> list[DeviceScheduler]:
        """What launches each GPU's graphs: those that follow before the one that they follow."""
        return [*(follower.scheduler for follower in self._followers), self._scheduler]

    def _alone(self) -> AbstractContextManager[None]:
        """Within it steps wait for no other rank."""
        return nullcontext() if self._group is None else self._group.alone()

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
        whole = self._measure_free(self._config) - step_bytes - GRAPH_BYTES
        whole -= count_head_bytes(self._model, self._config)
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
        num_rows = count_rows(config)
        batch = Batch.allocate(
            max_tokens=config.max_num_batched_tokens,
            max_rows=num_rows,
            num_slots=1,
            max_blocks=self._cache_shape.max_blocks,
            max_model_len=model.spec.max_model_len,
            device=model.device,
            vector_floats=0 if model.spec.pooling is None else model.spec.pooling.width(model.spec.hidden_size),
            has_draft_head=model.head is not None,
        )
        batch.kv_slots.fill_(-1)
        kv_cache = model.allocate_kv_cache(1, config.block_size)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        more = {"does_more": config.has_larger_steps, "guesses": bool(config.speculation.head)}
        size = Bucket.of_graph(config.max_num_batched_tokens, num_rows, decoding=False, **more)
        with self._alone():
            self._runner.forward(batch, kv_cache, size, scoring=True)
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def _create_state(self) -> Callable[[str, torch.dtype], Tensor]:
        self._state = DeviceState(self._region, self._model.device)
        self._failed = find_failed(self._state)
        for follower in self._followers:
            follower.prepare(self._region, self._state, int(self._geometry["num_slots"]), self._config.block_size)
        return self._state.array

    def _capture(self) -> None:
        """Capture all graphs, the largest first, as the later ones then reuse its memory."""
        cublas.reserve_sm()
        if self._group is not None:
            self._group.reserve_sm()
        with autotuner.tuning(cache_folder() / "products.json"):
            self._compile_ahead()
            for index, graph in tqdm(self._largest_first(), desc="capturing graphs", unit="graph"):
                run = functools.partial(self._run_step, graph.bucket, scoring=graph.is_scoring)
                with self._alone():
                    run()  # compiles and loads the kernels, and chooses among candidates to compute products
                torch.cuda.synchronize()
                self._scheduler.capture(index, run)
                if self._group is not None:
                    self._group.capture(index, functools.partial(_run_part, graph))

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
                    self._runner.compute_logits(self._batch, self._kv_cache, size)
                    self._runner.run_head(self._batch, self._kv_cache, size)

        with self._alone():
            compile_ahead(run)
        torch.cuda.synchronize()

    def _capture_segments(self) -> None:
        """Capture the graphs of long steps once more, in the segments in which those are launched that others pass."""
        long = [(index, graph.bucket) for index, graph in self._largest_first() if self._num_segments[index] > 1]
        for index, size in tqdm(long, desc="capturing segments", unit="graph"):
            count = self._num_segments[index]
            segments = [functools.partial(self._run_segment, size, segment, count) for segment in range(count)]
            capture_segments(self._scheduler, index, segments, self._alone())
            if self._group is not None:
                starts = [first_layer(part, count, self._model.spec.num_layers) for part in range(count + 1)]
                layers = [range(*pair) for pair in itertools.pairwise(starts)]
                self._group.capture_segments(index, size, layers)

    def _run_step(self, size: Bucket, *, scoring: bool = False) -> None:
        self._begin_step()
        super()._run_step(size, scoring=scoring)
        self._end_step(StepKind.WHOLE)

    def _run_segment(
        self, size: Bucket, segment: int, num_segments: int, before: Stream | None = None
    ) -> Stream | None:
        self._begin_step()
        left = super()._run_segment(size, segment, num_segments, before)
        self._end_step(StepKind.SEGMENTED)
        return left

    def _end_step(self, kind: StepKind) -> None:
        if self._group is not None:
            self._group.ranks[0].end_step(self._failed[kind])

    def _time_step(self, graph: int) -> float:
        if self._group is not None:
            torch.cuda.synchronize()  # the batch that they copy is there
            self._group.launch(graph, 1 + TIMED_LAUNCHES)
        return self._scheduler.time(graph)

    def _start(self) -> None:
        for scheduler in self._schedulers:  # while none runs: to capture one may wait for all GPUs
            scheduler.prepare()
        for scheduler in self._schedulers:
            scheduler.start()
        self._energy = report_energy(self._region, self._scheduler.bus_id)

    def _advance(self) -> bool:
        if self.state in _ENDED:
            return False
        if self._control is None:
            time.sleep(_WATCH_SECONDS)
        else:
            self._control.run_jobs(_WATCH_SECONDS)
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
        if self._control is not None:
            self._control.close()
        if self.state in _ENDED:  # else an error of the host came first, and nothing may wait for the device
            torch.cuda.synchronize()  # the kernel has ended or is about to
            self._scheduler.destroy_graphs()
            if self._group is not None and not self._group.end():
                self.is_dead = True
                return
            self._state.close(self._region)


def _run_part(graph: StepGraph, follower: Follower) -> None:
    follower.run_step(graph.bucket, scoring=graph.is_scoring)
