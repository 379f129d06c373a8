# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a tensor-parallel engine: one process, a rank on each. The first has the scheduler; the others follow it.

This thread prepares all ranks, one after the other: until the scheduler starts, no rank waits for another on the host.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from blink.config import EngineConfig
from blink.engine.device_follower import DeviceFollower, PulledBatches
from blink.engine.device_scheduler import DeviceArrays, DeviceScheduler, DeviceState
from blink.engine.geometry import count_rows
from blink.engine.gpu_host_tier import GpuHostBlocks
from blink.errors import ConfigError
from blink.kernels.gpu import cublas
from blink.kernels.gpu.comm.all_reduce import GpuRanks
from blink.kernels.gpu.comm.boxes import Boxes
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.weights.loader import open_model
from blink.plan.site import Bucket
from blink.region.layout import StepKind
from blink.region.memory import Region
from blink.runner.run import Runner
from blink.runner.stream import Stream

logger = logging.getLogger("blink.engine")

_SCORED_TOKENS = 128  # whose logits are joined at once: kernels/scoring.py
_FAILED = 2  # place of StepOutput's `failed`, in words
_END_SECONDS = 5.0

RunSegment = Callable[[Stream | None], Stream | None]  # enqueues a segment, with what the one before left


class Follower:
    """A rank that is not the first."""

    def __init__(self, runner: Runner, ranks: GpuRanks) -> None:
        self.runner, self.ranks, self.device = runner, ranks, runner.model.device
        self._host: GpuHostBlocks | None = None

    def prepare(self, region: Region, source: DeviceState, num_slots: int, block_size: int) -> None:
        """Allocate the batch that is copied from the scheduler's GPU."""
        with torch.cuda.device(self.device):
            arrays = DeviceArrays(region, self.device)
            self.failed = find_failed(arrays)
            self.batches = PulledBatches(source, arrays, num_slots, block_size)
            self.scheduler = DeviceFollower(arrays)

    def allocate(self, allocate: Callable[[Decoder], KvCache], max_tokens: int) -> None:
        """Allocate the KV cache, and what a step keeps between its segments."""
        model = self.runner.model
        with torch.cuda.device(self.device):
            self.kv_cache = allocate(model)
            self.residual = torch.zeros(max_tokens, model.spec.hidden_size, dtype=model.dtype, device=self.device)

    def keep_blocks(self, source: DeviceState, num_blocks: int, block_size: int) -> None:
        """Allocate this rank's part of blocks in host memory; source: whose scheduler lists the copies."""
        with torch.cuda.device(self.device):
            self._host = GpuHostBlocks(self.runner.model, source, self.kv_cache, num_blocks, block_size)

    def _copy_host_blocks(self) -> None:
        if self._host is not None:
            self._host.enqueue()

    def run_step(self, size: Bucket, *, scoring: bool) -> None:
        """Enqueue this rank's part of a step."""
        self._copy_host_blocks()
        batch = self.batches.pull(StepKind.WHOLE, size)
        self.runner.forward(batch, self.kv_cache, size, scoring=scoring)
        self.ranks.end_step(self.failed[StepKind.WHOLE])

    def run_segment(self, size: Bucket, layers: range, before: Stream | None) -> Stream | None:
        """Enqueue this rank's part of a segment, with what the one before left; return what it leaves itself."""
        self._copy_host_blocks()
        batch = self.batches.pull(StepKind.SEGMENTED, size)
        left = self.runner.forward_segment(batch, self.kv_cache, size, layers, self.residual, before)
        self.ranks.end_step(self.failed[StepKind.SEGMENTED])
        return left


class GpuGroup:
    """All ranks. That of the scheduler is the engine's own runner."""

    def __init__(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Load each rank's part of the model on a GPU of its own.

        Raises:
            ConfigError: there are too few GPUs, or the model cannot be split or loaded.
        """
        size, first = config.tensor_parallel_size, device.index or 0
        if first + size > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size {size} needs as many GPUs; there are {torch.cuda.device_count() - first}"
            )
        self.devices = [torch.device("cuda", first + rank) for rank in range(size)]
        source = open_model(config.model, self.devices[0], dtype)
        vocab_size = source.spec.vocab_size
        sums = config.max_num_batched_tokens * source.spec.hidden_size * dtype.itemsize
        self._boxes = Boxes(self.devices, sums, _count_logits(config, -(-vocab_size // size)) * dtype.itemsize)
        models = self._load(source.split(size, self.devices))
        starts = [*(model.spec.vocab_part.start for model in models), vocab_size]
        self.ranks = [GpuRanks(self._boxes, rank, starts) for rank in range(size)]
        self.runner = Runner(models[0], self.ranks[0])
        pairs = zip(models[1:], self.ranks[1:], strict=True)
        self.followers = [Follower(Runner(model, ranks), ranks) for model, ranks in pairs]

    def _load(self, load: Callable[[int], Decoder]) -> list[Decoder]:
        def on_own_gpu(rank: int) -> Decoder:
            with torch.cuda.device(self.devices[rank]):
                model = load(rank)
                torch.cuda.synchronize()
                return model

        with ThreadPoolExecutor(len(self.devices)) as pool:
            return list(pool.map(on_own_gpu, range(len(self.devices))))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no rank waits for another, and results are of one: for runs that load and time kernels."""
        for ranks in self.ranks:
            ranks.is_alone = True
        try:
            yield
        finally:
            for ranks in self.ranks:
                ranks.is_alone = False

    @property
    def models(self) -> list[Decoder]:
        """The parts of all ranks."""
        return [self.runner.model, *(follower.runner.model for follower in self.followers)]

    def capture(self, index: int, run: Callable[[Follower], None]) -> None:
        """Capture a graph of each follower, from what enqueues its part of the step."""
        for follower in self.followers:
            with torch.cuda.device(follower.device):
                with self.alone():
                    run(follower)
                torch.cuda.synchronize()
                follower.scheduler.capture(index, functools.partial(run, follower))

    def capture_segments(self, index: int, size: Bucket, layers: list[range]) -> None:
        """Capture the same graph of each follower in segments of layers."""
        for follower in self.followers:
            segments = [functools.partial(follower.run_segment, size, part) for part in layers]
            with torch.cuda.device(follower.device):
                capture_segments(follower.scheduler, index, segments, self.alone())

    def reserve_sm(self) -> None:
        """Let cuBLAS leave out, on each follower's GPU, the SM that its kernel holds."""
        for follower in self.followers:
            with torch.cuda.device(follower.device):
                cublas.reserve_sm()

    def launch(self, index: int, times: int) -> None:
        """Launch a graph of each follower from the host, so many times; before start()."""
        for follower in self.followers:
            with torch.cuda.device(follower.device):
                for _ in range(times):
                    follower.scheduler.launch(index)

    def end(self) -> bool:
        """Wait for the kernels that follow, which the scheduler has told to end; return whether they have."""
        deadline = time.monotonic() + _END_SECONDS
        while any(not follower.scheduler.stream.query() for follower in self.followers):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        for follower in self.followers:
            with torch.cuda.device(follower.device):
                if failure := follower.scheduler.read_failure():
                    logger.error("rank %d could not launch a step: CUDA error %d", follower.ranks.rank, failure)
                follower.scheduler.destroy_graphs()
        return True


def load_group(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> GpuGroup | None:
    """Load the parts of a model on as many GPUs as there are to be ranks; None: there is to be one.

    Raises:
        ConfigError: as GpuGroup().
    """
    return None if config.tensor_parallel_size == 1 else GpuGroup(config, device, dtype)


def capture_segments(
    scheduler: DeviceScheduler, index: int, segments: Sequence[RunSegment], alone: AbstractContextManager[None]
) -> None:
    """Capture a graph of the current GPU in segments; they run once before, in a context where they wait for nobody."""
    left: list[Stream | None] = []

    def run(segment: RunSegment) -> None:
        left.append(segment(left[-1] if left else None))

    runs = [functools.partial(run, segment) for segment in segments]
    with alone:
        for each in runs:
            each()
    torch.cuda.synchronize()
    apart = any(part is not None for part in left)
    left.clear()
    scheduler.capture_segments(index, runs, apart=apart)


def find_failed(arrays: DeviceArrays) -> dict[StepKind, Tensor]:
    """Return the word of each kind of step that says which rank was lost, int32 [1]."""
    outputs = {kind: arrays.array(kind.array("output"), torch.int32) for kind in StepKind}
    return {kind: output[_FAILED : _FAILED + 1] for kind, output in outputs.items()}


def _count_logits(config: EngineConfig, columns: int) -> int:
    """Return the most logits that a rank sends at once."""
    return max(count_rows(config), _SCORED_TOKENS) * columns
