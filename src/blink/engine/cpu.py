# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: the scheduler on a native thread, the model on the thread that calls run()."""

from __future__ import annotations

import logging

import torch

from blink.config import EngineConfig
from blink.engine.base import Engine, block_bytes, blocks_of_one_sequence, served_name, size_kv_cache
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.kernels.batch import Header, map_batch
from blink.link.rdma.listener import open_listener
from blink.models.weights.loader import load_model, resolve_dtype
from blink.region.layout import EngineState
from blink.region.memory import create_region, publish_region
from blink.region.native import lib

logger = logging.getLogger("blink.engine")

_DEFAULT_KV_CACHE_BYTES = 1 << 30
_WAIT_MS = 200  # how often run() looks at drain and stop


class CpuEngine(Engine):
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
        one_sequence = blocks_of_one_sequence(config, self._model) * block_bytes(config, self._model)
        num_blocks = size_kv_cache(config, self._model, lambda: max(_DEFAULT_KV_CACHE_BYTES, one_sequence))
        geometry = build_geometry(
            config, max_model_len=spec.max_model_len, vocab_size=spec.vocab_size, num_blocks=num_blocks
        )
        super().__init__(create_region(config.region, geometry, served_name(config)))
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
                elif self.state == EngineState.DRAINED:
                    self.stop()
        finally:
            lib.blink_loop_stop(loop)
        return self._finish()

    def _run_step(self) -> int:
        header = self._batch.header
        try:
            num_tokens, num_rows = int(header[Header.NUM_TOKENS]), int(header[Header.NUM_ROWS])
            self._model.forward(self._batch, self._kv_cache, num_tokens, num_rows)
        except Exception:
            logger.exception("the model failed; the engine stops")
            return 1
        return 0
