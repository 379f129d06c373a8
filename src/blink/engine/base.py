# SPDX-License-Identifier: Apache-2.0
"""One boot for every engine: listener, model, KV cache, region and batch; then serving until drained or stopped.

Engines differ in how a step is launched, where the scheduler's state lives and how memory is measured.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from blink.config import FITTING_LENGTH, EngineConfig
from blink.engine.adapters import MakeAdapters, attach_stores, make_host_adapters, make_stores, open_sockets
from blink.engine.cache_size import CacheShape, CacheSize
from blink.engine.combinations import check_combinations
from blink.engine.conclusion import conclude
from blink.engine.costs import describe_costs, first_layer, measure_costs
from blink.engine.determinism import make_runner
from blink.engine.geometry import (
    build_geometry,
    count_slots,
    count_snapshots,
    fit_sequences,
    pooling_sizes,
)
from blink.engine.host_tier import host_sizes
from blink.engine.kv_publisher import open_publishers
from blink.engine.vocabulary import ReadVocabulary, read_vocabulary, write_vocabulary
from blink.errors import ConfigError
from blink.host.process import read_available_memory
from blink.kernels.batch import map_batch
from blink.kernels.layer_cache import KvCache
from blink.link.rdma.listener import open_listener
from blink.models.decoder import Decoder
from blink.models.spec import ModelSpec
from blink.models.weights.files import served_name
from blink.models.weights.loader import load_model, resolve_dtype
from blink.plan.site import Bucket
from blink.region.layout import EngineState, StepKind
from blink.region.memory import create_region, publish_region
from blink.region.step_tokens import StepTokens
from blink.runner.run import Runner

if TYPE_CHECKING:
    from blink.runner.stream import Stream

logger = logging.getLogger("blink.engine")

_ADVICE = "lower --kv-cache-memory-bytes or --num-gpu-blocks-override"


class Engine(ABC):
    """Own the model, its KV cache and the region of a scheduler; frontends see the region while run() runs."""

    default_step_tokens: ClassVar[int]  # where the configuration names none
    default_pooling_tokens: ClassVar[int]  # likewise of a model that pools
    default_segment_ms: ClassVar[float]  # likewise
    patient_steps: ClassVar[int] = 0  # with decode rows, in which prompts should be computed; 0: few, and bursts
    cost_seconds: ClassVar[float]  # of boot, for each half of the cost table
    captures_larger: ClassVar[bool] = False  # whether steps that do more have graphs of their own
    make_adapters: ClassVar[MakeAdapters] = staticmethod(make_host_adapters)
    _num_snapshots = 0  # until the KV cache is sized

    def __init__(self, config: EngineConfig, device: torch.device, read: ReadVocabulary = read_vocabulary) -> None:
        """Load the model and lay out all memory; frontends see nothing before run().

        Raises:
            ConfigError: the model, the options and the machine do not fit together.
        """
        check_combinations(config, device.type)
        has_step_tokens = config.max_num_batched_tokens > 0
        config = self._config = self._complete(config)
        self._listener = open_listener(config)
        spec = self._load_parts(config, device)
        if spec.pooling is not None:
            config = self._fit_to_pooling(config, has_step_tokens=has_step_tokens)
        config = self._config = self._fit_to_model(config, spec)
        vocabulary = read(config, spec.vocab_size)
        size = self._size_kv_cache()
        self._num_snapshots = self._count_snapshots(size.num_blocks)
        self._check_memory(size)
        self._geometry = build_geometry(
            config,
            max_model_len=self._longest_sequence(size.num_blocks),
            vocab_size=spec.vocab_size,
            num_blocks=size.num_blocks,
            vocab_bytes=len(vocabulary.text),
            num_snapshots=self._num_snapshots,
            windows=self._cache_shape.window_sizes(size),
            others=pooling_sizes(spec.pooling, spec.hidden_size)
            | host_sizes(config, self._cache_shape, size, self._model)
            | {"patient_steps": self.patient_steps},
            captures_larger=self.captures_larger and config.has_larger_steps,
        )
        self._region = create_region(config.region, self._geometry, served_name(config.model))
        try:
            self._array = self._create_state()
            num_slots = int(self._geometry["num_slots"])
            self._batch, self._segmented_batch = (map_batch(self._array, num_slots, kind) for kind in StepKind)
            write_vocabulary(vocabulary, self._array)
            self._kv_cache = self._allocate_kv_cache(size)
            sizes = config.max_num_batched_tokens, spec.hidden_size
            self._residual = torch.zeros(sizes, dtype=self._model.dtype, device=self._model.device)
            self._sockets = open_sockets(config, self._region, self._ranks, self._stores)
            self._publishers = open_publishers(self._region, config)
        except BaseException:
            self.remove_region()
            raise
        self._has_lost_region = False
        self.is_dead = False  # whether the scheduler gives no sign of life any more, so that nothing may wait for it
        self._log_memory(size)

    def _load_parts(self, config: EngineConfig, device: torch.device) -> ModelSpec:
        self._runner = self._load(config, device, resolve_dtype(config.model.dtype, device))
        self._model = self._runner.model
        for part in self._ranks:
            part.keep_rollback(config.speculation.num_tokens)
        self._stores = make_stores(config, self._ranks, type(self).make_adapters)
        attach_stores(self._stores, self._runners)
        return self._model.spec

    def _load(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Runner:
        return make_runner(load_model(config.model, device, dtype), config)

    @property
    def _ranks(self) -> Sequence[Decoder]:
        """The parts of the model, one on each rank."""
        return [self._model]

    @property
    def _runners(self) -> Sequence[Runner]:
        """What runs the parts of the model, as far as this thread has it."""
        return [self._runner]

    def _log_memory(self, size: CacheSize) -> None:
        config, dtype = self._config, str(self._model.kv_dtype).removeprefix("torch.")
        logger.info("weights: %.2f GB", self._model.num_weight_bytes / 1e9)
        if (inputs := self._model.inputs) is not None and inputs.table.device != self._model.device:
            logger.info("%.2f GB of them are per-layer embeddings in the host's memory", inputs.table.nbytes / 1e9)
        logger.info("KV cache: %d blocks of %d tokens, %s", size.num_blocks, config.block_size, dtype)
        if size.num_window_blocks:
            spec, longest = self._model.spec, self._cache_shape.bytes_of_longest / 1e9
            logger.info("%d window blocks: layers see %d tokens", size.num_window_blocks, spec.cache_layout.window)
            logger.info("one sequence of %d tokens keeps %.2f GB", spec.max_model_len, longest)
        if self._state_bytes:
            told = "recurrent states: %.2f GB, of %d sequences and %d prefixes"
            logger.info(told, self._state_bytes / 1e9, *self._count_kept(size)[:2])

    @abstractmethod
    def _measure_free(self, config: EngineConfig) -> int:
        """Return the bytes that are free beside the weights."""

    @abstractmethod
    def _measure_room(self) -> int:
        """Return the bytes that the KV cache may take where neither its size nor its blocks are configured."""

    @abstractmethod
    def _create_state(self) -> Callable[[str, torch.dtype], Tensor]:
        """Place the scheduler's state beside the model; return what finds its arrays by name, flat, as a type."""

    @abstractmethod
    def _time_step(self, graph: int) -> float:
        """Run the step that the batch describes as one of this graph; return the seconds that it takes."""

    @abstractmethod
    def _start(self) -> None:
        """Start the scheduler."""

    @abstractmethod
    def _advance(self) -> bool:
        """Do what the scheduler needs of this thread, for a fraction of a second; return whether it still runs."""

    @abstractmethod
    def _end(self) -> None:
        """Free what the scheduler used."""

    def run(self) -> int:
        """Serve until drained or stopped and return the exit status: 0, or 1 after an error."""
        self._start()
        try:
            for one in (*self._sockets, *self._publishers):
                one.start()
            publish_region(self._region, self._config.region)
            self._region.keep_spare(self._config.region)
            logger.info("engine ready: region %s", self._config.region)
            if self._listener is not None:
                self._listener.start()
            sizes = StepTokens(self._region)
            while self._advance():
                sizes.look(time.monotonic())
                if self.state == EngineState.DRAINED or not self._keep_region():
                    self.stop()
        finally:
            for one in (*self._sockets, *self._publishers):
                one.close()
            self._end()
            self._region.remove_spare()
        if self._has_lost_region or self.is_dead:
            self._region.remove()
            return 1
        return conclude(self._region)

    def remove_region(self) -> None:
        """Delete the region's file, unless it is another engine's by now, and give back its memory."""
        self._region.remove()
        self._region.close()

    def _keep_region(self) -> bool:
        """Restore the region's file if it was deleted; return whether frontends can find it."""
        if self._region.is_current():
            return True
        if self._region.restore():
            logger.warning("%s was deleted, and is there again", self._region.path)
            return True
        if not self._has_lost_region:
            logger.error("%s was deleted, replaced or truncated: no frontend can reach this engine", self._region.path)
        self._has_lost_region = True
        return False

    @property
    def state(self) -> int:
        """The scheduler's state, a layout.EngineState."""
        return self._region.control_word("state")

    def drain(self) -> None:
        """Let running requests end and refuse new ones; run() returns when all are done."""
        self._region.store_control("drain", 1)

    def stop(self) -> None:
        """End the scheduler at its next pass; open requests are lost."""
        self._region.store_control("stop", 1)

    def _run_step(self, size: Bucket, *, scoring: bool = False) -> None:
        self._runner.forward(self._batch, self._kv_cache, size, scoring=scoring)

    def _run_segment(
        self, size: Bucket, segment: int, num_segments: int, before: Stream | None = None
    ) -> Stream | None:
        """Run a segment of a step, with what the one before returned; return what the next has to be given."""
        start, end = (first_layer(part, num_segments, self._model.spec.num_layers) for part in (segment, segment + 1))
        return self._runner.forward_segment(
            self._segmented_batch, self._kv_cache, size, range(start, end), self._residual, before
        )

    def _fill_costs(self) -> None:
        """Measure what steps take, and give the scheduler its table."""
        num_layers = self._model.spec.num_layers
        costs = measure_costs(
            self._geometry, self._batch, self._time_step, num_layers=num_layers, budget=self.cost_seconds
        )
        self._array("costs", torch.uint8).copy_(torch.from_numpy(costs.view("u1")))
        self._num_segments: list[int] = costs["num_segments"].tolist()
        logger.info("a step takes %s", describe_costs(self._geometry, costs))

    def _complete(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration that says how many tokens a step takes, and how long a segment."""
        tokens = config.max_num_batched_tokens or max(self.default_step_tokens, config.max_num_seqs)
        return replace(config, max_num_batched_tokens=tokens, segment_ms=config.segment_ms or self.default_segment_ms)

    def _fit_to_pooling(self, config: EngineConfig, *, has_step_tokens: bool) -> EngineConfig:
        """Return a configuration for a model that pools: keys and values are not kept, and steps may be longer."""
        tokens = config.max_num_batched_tokens if has_step_tokens else self.default_pooling_tokens
        return replace(config, enable_prefix_caching=False, max_num_batched_tokens=max(tokens, config.max_num_seqs))

    def _fit_to_model(self, config: EngineConfig, spec: ModelSpec) -> EngineConfig:
        """Return a configuration with what its values mean for a model."""
        if config.max_num_seqs == EngineConfig.max_num_seqs:
            config = self._lower_sequences(config)
        most = config.max_num_seqs * spec.max_model_len  # tokens of all sequences together
        return replace(config, max_num_batched_tokens=min(config.max_num_batched_tokens, most))

    def _lower_sequences(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration of which as many sequences run as have room for their recurrent states."""
        fitting = fit_sequences(config.max_num_seqs, self._measure_free(config), self._slot_bytes)
        if fitting < config.max_num_seqs:
            logger.warning("%d sequences run at once; the state of each takes %s", fitting, _gib(self._slot_bytes))
        return replace(config, max_num_seqs=fitting)

    def _size_kv_cache(self) -> CacheSize:
        """Return the number of KV blocks: as configured, or what fits into the bytes configured or measured."""
        if self._config.num_gpu_blocks_override:
            return self._cache_shape.complete(self._config.num_gpu_blocks_override)
        return self._cache_shape.divide(self._config.kv_cache_memory_bytes or self._measure_room())

    def _longest_sequence(self, num_blocks: int) -> int:
        """Return how many tokens a sequence may have: the model's or the configured limit, or as many as fit."""
        limit, room = self._model.spec.max_model_len, num_blocks * self._config.block_size
        if self._config.model.max_model_len != FITTING_LENGTH or room >= limit:
            return limit
        logger.info("--max-model-len auto: %d of the model's %d tokens fit the KV cache", room, limit)
        return room

    def _check_memory(self, size: CacheSize) -> None:
        """Refuse a KV cache that is larger than a host's memory, before anything is taken for it."""
        free = read_available_memory()
        wanted = (self._cache_shape.count_bytes(size) + self._state_bytes) * len(self._ranks)
        if self._model.device.type == "cpu" and wanted > free:
            raise ConfigError(f"{self._name_cache(size)} does not fit into {_gib(free)} of free memory: {_ADVICE}")

    def _allocate_kv_cache(self, size: CacheSize) -> KvCache:
        try:
            return self._model.allocate_kv_cache(size.num_blocks, self._config.block_size, *self._count_kept(size))
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"there is no memory for {self._name_cache(size)}: {_ADVICE}") from error

    def _count_kept(self, size: CacheSize) -> tuple[int, int, int]:
        """Return what a rank's cache holds besides blocks: slots, snapshots and window blocks."""
        return count_slots(self._config.max_num_seqs), self._num_snapshots, size.num_window_blocks

    def _name_cache(self, size: CacheSize) -> str:
        states = f" and the states of {_gib(self._state_bytes)}" if self._state_bytes else ""
        return f"the KV cache of {_gib(self._cache_shape.count_bytes(size))}{states}"

    @property
    def _cache_shape(self) -> CacheShape:
        """What sequences take of the KV cache."""
        config, spec = self._config, self._model.spec
        return CacheShape(
            layout=spec.cache_layout,
            block_size=config.block_size,
            itemsize=self._model.kv_dtype.itemsize,
            max_model_len=spec.max_model_len,
            step_tokens=config.max_num_batched_tokens,
        )

    @property
    def _state_bytes(self) -> int:
        """The size of what recurrent layers keep, of all slots."""
        return self._slot_bytes * (count_slots(self._config.max_num_seqs) + self._num_snapshots)

    @property
    def _slot_bytes(self) -> int:
        """The size of what recurrent layers keep of one sequence."""
        return self._model.spec.cache_layout.bytes_per_sequence(self._model.dtype.itemsize)

    def _count_snapshots(self, num_blocks: int) -> int:
        """Return of how many prefixes the states are kept."""
        sizes = sum(self._cache_shape.block_bytes), self._slot_bytes
        return count_snapshots(num_blocks, *sizes) if self._config.enable_prefix_caching else 0


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
