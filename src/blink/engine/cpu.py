# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: the scheduler on a native thread, the model on the thread that calls run()."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from blink.adapters.memory import AdapterMemory
from blink.adapters.server import AdapterServer
from blink.config import FITTING_LENGTH, EngineConfig
from blink.engine.base import Engine
from blink.engine.cache_size import CacheSize
from blink.engine.state import HostState
from blink.host.process import read_available_memory
from blink.kernels.batch import Batch, Header
from blink.models.spec import ModelSpec
from blink.region.layout import StepKind
from blink.region.native import lib
from blink.speculation import check_recurrent

logger = logging.getLogger("blink.engine")

_DEFAULT_KV_CACHE_BYTES = 1 << 30
_WAIT_MS = 200  # how often run() looks at drain and stop
_ENDED = -2  # what blink_loop_wait returns once the scheduler has stopped; other negative numbers: no step yet


class CpuEngine(Engine):
    """Run each step when the scheduler's thread asks for it."""

    # A step of 2048 takes seconds on a CPU, for which every running sequence waits.
    default_step_tokens = default_pooling_tokens = 256
    default_segment_ms = 10.0
    cost_seconds = 0.02

    def __init__(self, config: EngineConfig) -> None:
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        super().__init__(config, torch.device("cpu"))
        self._fill_costs()
        self._adapters = self._open_adapters() if config.lora.enable_lora else None

    def _open_adapters(self) -> AdapterServer:
        try:
            memory = AdapterMemory(self._region, self._model, self._config.lora)
            self._runner.adapters = memory.updates
            return AdapterServer(self._config.region, memory)
        except BaseException:
            self._region.remove()
            raise

    def _measure_free(self, config: EngineConfig) -> int:
        del config
        return read_available_memory()

    def _fit_to_model(self, config: EngineConfig, spec: ModelSpec) -> EngineConfig:
        check_recurrent(config.speculation, self._slot_bytes > 0)
        return super()._fit_to_model(config, spec)

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
        self._run_step(*self._size_of(self._batch))
        return time.perf_counter() - start

    def _start(self) -> None:
        self._loop: int = lib.blink_loop_start(self._state.address)
        if self._adapters is not None:
            self._adapters.start()

    def _advance(self) -> bool:
        kind = lib.blink_loop_wait(self._loop, _WAIT_MS)
        if kind >= 0:
            lib.blink_loop_finish(self._loop, self._has_failed(kind))
        return kind != _ENDED

    def _end(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        lib.blink_loop_stop(self._loop)

    def _has_failed(self, kind: int) -> bool:
        """Run what the scheduler has launched, a step or a segment; return whether the model failed."""
        try:
            if kind == StepKind.WHOLE:
                is_scoring = int(self._batch.header[Header.GRAPH]) >= int(self._geometry["first_scoring_graph"])
                self._run_step(*self._size_of(self._batch), scoring=is_scoring)
            else:
                graph, segment = self._segmented_batch.header[[Header.GRAPH, Header.SEGMENT]].tolist()
                size = (*self._size_of(self._segmented_batch), False)
                self._run_segment(size, segment, self._num_segments[graph])
        except Exception:
            logger.exception("the model failed; the engine stops")
            return True
        return False

    @staticmethod
    def _size_of(batch: Batch) -> tuple[int, int]:
        """Return the step's tokens and rows; there is no padding on a CPU."""
        return int(batch.header[Header.NUM_TOKENS]), int(batch.header[Header.NUM_ROWS])
