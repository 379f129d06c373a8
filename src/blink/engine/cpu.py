# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: the scheduler on a native thread, the model on the thread that calls run()."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from blink.config import FITTING_LENGTH, EngineConfig, ModelConfig
from blink.engine.base import Engine
from blink.engine.cache_size import CacheSize
from blink.engine.costs import first_layer
from blink.engine.determinism import make_runner, write_fingerprint
from blink.engine.guessing import add_drafter
from blink.engine.host_tier import HostBlocks
from blink.engine.model_control import ModelControl
from blink.engine.ranks import Followers, RankMemory, load_parts
from blink.engine.rounding import check_rounding, find_rounding
from blink.engine.same_model import open_same_model
from blink.engine.state import HostState
from blink.engine.vocabulary import ReadVocabulary, read_vocabulary
from blink.errors import BadRequestError, StepFailedError
from blink.host.process import read_available_memory, release_memory
from blink.kernels.batch import Batch, Header
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from blink.models.weights.loader import ModelSource, load_model
from blink.plan.site import Bucket
from blink.region.layout import StepKind
from blink.region.native import lib
from blink.region.tensor_stream import TensorEntry
from blink.runner.run import Runner
from blink.runner.stream import Stream

logger = logging.getLogger("blink.engine")

_DEFAULT_KV_CACHE_BYTES = 1 << 29
_WAIT_MS = 200  # how often run() looks at drain and stop
_HELD_WAIT_MS = 10  # likewise at what is asked of the model, while no step can come
_ENDED = -2  # what blink_loop_wait returns once the scheduler has stopped; other negative numbers: no step yet


class CpuEngine(Engine):
    """Run each step when the scheduler's thread asks for it."""

    # A step of 2048 takes seconds on a CPU, for which every running sequence waits.
    default_step_tokens = default_pooling_tokens = 256
    # Prompt tokens cost as much in small steps: these keep the gaps between tokens short.
    patient_steps = 64
    default_segment_ms = 10.0
    cost_seconds = 0.02
    rank_timeout: ClassVar[float] = 30.0  # seconds that ranks wait for each other within a step

    def __init__(self, config: EngineConfig, read: ReadVocabulary = read_vocabulary) -> None:
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        self._followers: Followers | None = None
        try:
            super().__init__(config, torch.device("cpu"), read)
            write_fingerprint(self._region, self._config, self._config.model, self._model.device)
            self._fill_costs()
            self._host = self._allocate_host(self._model)
            self._control = ModelControl(self._region, self, self._config, self._model.device)
            self._open_control()
        except BaseException:
            self._end_followers()
            raise

    def _load(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Runner:
        check_rounding(config)
        self._followers = load_parts(config, device, dtype, self.rank_timeout)
        if self._followers is not None:
            return self._followers.runner
        return self._make_runner(load_model(config.model, device, dtype), config)

    def _make_runner(self, model: Decoder, config: EngineConfig) -> Runner:
        """Run a model, with the same bits whatever else runs if that is asked for; ConfigError: it cannot."""
        runner = make_runner(model, config)
        add_drafter(runner, config)
        runner.rounding = find_rounding(config)
        return runner

    def _allocate_kv_cache(self, size: CacheSize) -> KvCache:
        if self._followers is not None:
            self._followers.allocate(functools.partial(self._allocate_rank, size))
        return super()._allocate_kv_cache(size)

    def _allocate_rank(self, size: CacheSize, model: Decoder) -> RankMemory:
        """Allocate what a follower keeps, as large as what rank 0 does."""
        cache = model.allocate_kv_cache(size.num_blocks, self._config.block_size, *self._count_kept(size))
        residual = torch.zeros(self._config.max_num_batched_tokens, model.spec.hidden_size, dtype=model.dtype)
        store = self._stores[model.spec.shard.rank] if self._stores else None
        return RankMemory(self._batch, self._segmented_batch, cache, residual, store, self._allocate_host(model))

    def _allocate_host(self, model: Decoder) -> HostBlocks | None:
        """Allocate a rank's part of the blocks in host memory, if there are to be such."""
        count = int(self._geometry["num_host_blocks"])
        return HostBlocks(model, self._state, count, self._config.block_size) if count else None

    @property
    def _ranks(self) -> Sequence[Decoder]:
        return super()._ranks if self._followers is None else self._followers.models

    def _run_step(self, size: Bucket, *, scoring: bool = False) -> None:
        run = functools.partial(super()._run_step, size, scoring=scoring)
        if self._followers is None:
            run()
        else:
            self._followers.run_step(size, run, scoring=scoring)

    def _run_segment(
        self, size: Bucket, segment: int, num_segments: int, before: Stream | None = None
    ) -> Stream | None:
        run = functools.partial(super()._run_segment, size, segment, num_segments, before)
        if self._followers is None:
            return run()
        start, end = (first_layer(part, num_segments, self._model.spec.num_layers) for part in (segment, segment + 1))
        return self._followers.run_segment(size, range(start, end), run)

    def _end_followers(self) -> None:
        if self._followers is not None:
            self._followers.end()

    def _open_control(self) -> None:
        """Let frontends change the weights, unless updates of them, or parts on other ranks, would have to follow."""
        if self._followers is not None or self._sockets:
            return
        self._sockets.append(self._control.listen())

    def open_weights(self, config: ModelConfig, newer: Sequence[Path]) -> ModelSource:
        """Open weights of the same model; newer: files with tensors that stand for some of them.

        Raises:
            ConfigError: they do not fit it, or are not there.
        """
        return open_same_model(self._model, config, newer)

    def check_sleep(self) -> None:
        """Refuse nothing."""

    def open_shared(self, entries: Sequence[TensorEntry], handles: Sequence[Mapping[str, Any]]) -> NoReturn:
        """Refuse tensors of a GPU's memory.

        Raises:
            BadRequestError: always.
        """
        del entries, handles
        raise BadRequestError("CUDA IPC needs an engine on the trainer's GPU; this one is on a CPU: send a stream.")

    def load_weights(self, source: ModelSource) -> None:
        """Free the weights that are there, and load others.

        Raises:
            ConfigError: that fails; there are no weights then.
        """
        self.free_weights()
        self._runner = self._make_runner(source.load(), replace(self._config, model=source.config))
        self._model = self._runner.model
        write_fingerprint(self._region, self._config, source.config, self._model.device)

    def free_weights(self) -> None:
        """Free the weights."""
        self._model.free_weights()
        self._runner = Runner(self._model)  # whose plans know no weights
        release_memory()

    def store_weights(self) -> None:
        """Leave the weights where they are: the host's memory."""

    def restore_weights(self) -> None:
        """Find the weights where they were."""

    def free_kv_cache(self) -> None:
        """Free the KV cache."""
        self._kv_cache = KvCache({})
        release_memory()

    def fill_kv_cache(self) -> None:
        """Allocate the KV cache anew, all zeros.

        Raises:
            ConfigError: there is no memory.
        """
        self._kv_cache = self._allocate_kv_cache(self._size_kv_cache())

    def _measure_free(self, config: EngineConfig) -> int:
        del config
        return read_available_memory()

    def _measure_room(self) -> int:
        if self._config.model.max_model_len == FITTING_LENGTH:
            return _DEFAULT_KV_CACHE_BYTES
        shape = self._cache_shape
        longest = shape.count_bytes(CacheSize(shape.max_blocks, shape.most_window_blocks))
        return max(_DEFAULT_KV_CACHE_BYTES, longest)

    def _create_state(self) -> Callable[[str, torch.dtype], Tensor]:
        self._state = HostState(self._region)
        return self._state.tensor

    def _time_step(self, graph: int) -> float:
        del graph  # an eager step is as long as its batch
        start = time.perf_counter()
        self._run_step(self._size_of(self._batch))
        return time.perf_counter() - start

    def _start(self) -> None:
        self._loop: int = lib.blink_loop_start(self._state.address)

    def _advance(self) -> bool:
        kind = lib.blink_loop_wait(self._loop, _HELD_WAIT_MS if self._control.is_holding else _WAIT_MS)
        self._control.run_jobs()
        if kind >= 0:
            lib.blink_loop_finish(self._loop, self._compute(kind))
        return kind != _ENDED

    def _end(self) -> None:
        lib.blink_loop_stop(self._loop)
        self._control.close()
        self._end_followers()

    def _compute(self, kind: int) -> int:
        """Run what the scheduler has launched, a step or a segment; return what failed, as csrc's StepOutput has it."""
        try:
            if self._host is not None:
                self._host.copy(self._kv_cache)
            if kind == StepKind.WHOLE:
                is_scoring = int(self._batch.header[Header.GRAPH]) >= int(self._geometry["first_scoring_graph"])
                self._run_step(self._size_of(self._batch), scoring=is_scoring)
            else:
                graph, segment = self._segmented_batch.header[[Header.GRAPH, Header.SEGMENT]].tolist()
                self._run_segment(self._size_of(self._segmented_batch), segment, self._num_segments[graph])
        except StepFailedError as error:
            logger.error("%s; the engine stops", error)
            return error.output
        except Exception:
            logger.exception("the model failed; the engine stops")
            return 1
        return 0

    @staticmethod
    def _size_of(batch: Batch) -> Bucket:
        """Return the step's size; there is no padding on a CPU."""
        return Bucket(int(batch.header[Header.NUM_TOKENS]), int(batch.header[Header.NUM_ROWS]), decoding=False)
