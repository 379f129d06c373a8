# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: the scheduler on a native thread, the model on the thread that calls run()."""

from __future__ import annotations

import logging

import numpy as np
import torch

from blink.config import EngineConfig
from blink.engine.base import EngineControl, served_name
from blink.engine.batch import Header, map_batch
from blink.engine.geometry import build_geometry
from blink.engine.rdma_listener import open_listener
from blink.engine.state import HostState
from blink.engine.weights import load_model, resolve_dtype
from blink.layout import EngineState
from blink.models.decoder import Decoder
from blink.native import lib
from blink.region import create_region, publish_region

logger = logging.getLogger("blink.engine")

_DEFAULT_KV_CACHE_BYTES = 1 << 30
_WAIT_MS = 200  # how often run() looks at drain and stop


class CpuEngine:
    """Own the model, its KV cache, the region and the scheduler of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and create the region, which frontends do not see before run().

        Raises:
            ConfigError: the model, the options and the machine do not fit together.
        """
        self._config = config
        self._listener = open_listener(config)
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        device = torch.device("cpu")
        self._model = load_model(config.model, device, resolve_dtype(config.model.dtype, device))
        spec = self._model.spec
        num_blocks = _num_blocks(config, self._model)
        geometry = build_geometry(
            config, max_model_len=spec.max_model_len, vocab_size=spec.vocab_size, num_blocks=num_blocks
        )
        self._region = create_region(config.region, geometry, served_name(config))
        self._control = EngineControl(self._region)
        self._state = HostState(self._region)
        self._batch = map_batch(self._state.tensor, int(geometry["num_slots"]))
        self._kv_cache = self._model.allocate_kv_cache(num_blocks, config.block_size)
        logger.info("KV cache: %d blocks of %d tokens", num_blocks, config.block_size)

    def run(self) -> int:
        """Serve until drained or stopped and return the exit status: 0, or 1 after an error."""
        loop = lib.blink_loop_start(self._state.address)
        publish_region(self._region, self._config.region)
        logger.info("engine ready: region %s", self._config.region)
        if self._listener is not None:
            self._listener.start()
        try:
            while (graph := lib.blink_loop_wait(loop, _WAIT_MS)) != -2:
                if graph >= 0:
                    lib.blink_loop_finish(loop, self._run_step())
                elif self._control.state == EngineState.DRAINED:
                    self.stop()
        finally:
            lib.blink_loop_stop(loop)
        return self._control.finish()

    def drain(self) -> None:
        """Let running requests end and refuse new ones; run() returns when all are done."""
        self._control.drain()

    def stop(self) -> None:
        """End the scheduler at its next pass; open requests are lost."""
        self._control.stop()

    def _run_step(self) -> int:
        header = self._batch.header
        try:
            num_tokens, num_rows = int(header[Header.NUM_TOKENS]), int(header[Header.NUM_ROWS])
            self._model.forward(self._batch, self._kv_cache, num_tokens, num_rows)
        except Exception:
            logger.exception("the model failed; the engine stops")
            return 1
        return 0


def _num_blocks(config: EngineConfig, model: Decoder) -> int:
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    shape = model.spec.kv_cache_shape(1, config.block_size)
    block_bytes = int(np.prod(shape)) * model.dtype.itemsize
    if config.kv_cache_memory_bytes:
        return config.kv_cache_memory_bytes // block_bytes
    one_sequence = -(-model.spec.max_model_len // config.block_size)
    return max(_DEFAULT_KV_CACHE_BYTES // block_bytes, one_sequence)
