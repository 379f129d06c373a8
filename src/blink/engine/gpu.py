# SPDX-License-Identifier: Apache-2.0
"""The GPU engine: boots the model and the resident scheduler, then sleeps. The host takes no part in serving."""

from __future__ import annotations

import logging
import os
import time

import torch
from tqdm import tqdm

from blink.config import EngineConfig
from blink.engine.base import Engine, blocks_of_one_sequence, served_name, size_kv_cache
from blink.engine.device_scheduler import DeviceScheduler, DeviceState
from blink.engine.geometry import build_geometry, graph_sizes
from blink.errors import ConfigError
from blink.kernels.batch import Batch, map_batch
from blink.link.rdma.listener import open_listener
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model, resolve_dtype
from blink.region.layout import EngineState
from blink.region.memory import create_region, publish_region

logger = logging.getLogger("blink.engine")

_WATCH_SECONDS = 0.25
_GRAPH_RESERVE_BYTES = 1 << 30  # executables of all graphs and the workspaces that capture adds


class GpuEngine(Engine):
    """Own the model, its KV cache, the region and the resident scheduler of one GPU."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model, size the KV cache, capture every graph; frontends see nothing before run().

        Raises:
            ConfigError: the model, the options and the GPU do not fit together.
        """
        # Code loaded at its first use would synchronise with a device on which the scheduler never ends.
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
        self._config = config
        self._listener = open_listener(config)
        device = torch.device("cuda", torch.cuda.current_device())
        self._model = load_model(config.model, device, resolve_dtype(config.model.dtype, device))
        spec = self._model.spec
        num_blocks = size_kv_cache(config, self._model, lambda: _measure_room(config, self._model))
        self._geometry = build_geometry(
            config, max_model_len=spec.max_model_len, vocab_size=spec.vocab_size, num_blocks=num_blocks
        )
        super().__init__(create_region(config.region, self._geometry, served_name(config)))
        self._state = DeviceState(self._region, device)
        self._batch = map_batch(self._state.array, int(self._geometry["num_slots"]))
        self._kv_cache = self._model.allocate_kv_cache(num_blocks, config.block_size)
        logger.info("KV cache: %d blocks of %d tokens", num_blocks, config.block_size)
        self._scheduler = DeviceScheduler(self._state)
        self._capture()

    def run(self) -> int:
        """Serve until drained or stopped and return the exit status: 0, or 1 after an error."""
        self._scheduler.start()
        publish_region(self._region, self._config.region)
        logger.info("engine ready: region %s", self._config.region)
        if self._listener is not None:
            self._listener.start()
        while (state := self.state) not in (EngineState.STOPPED, EngineState.FAILED):
            if state == EngineState.DRAINED:
                self.stop()
            time.sleep(_WATCH_SECONDS)
        torch.cuda.synchronize()  # the kernel has ended or is about to
        self._state.close(self._region)
        return self._finish()

    def _capture(self) -> None:
        """Capture all graphs, the largest first, as the later ones then reuse its memory."""
        graphs = list(enumerate(graph_sizes(self._geometry)))
        graphs.sort(key=lambda graph: graph[1], reverse=True)
        for index, (num_tokens, num_rows) in tqdm(graphs, desc="capturing graphs", unit="graph"):
            self._run_step(num_tokens, num_rows)  # compiles and loads the kernels
            torch.cuda.synchronize()
            self._scheduler.capture(index, lambda tokens=num_tokens, rows=num_rows: self._run_step(tokens, rows))

    def _run_step(self, num_tokens: int, num_rows: int) -> None:
        self._model.forward(self._batch, self._kv_cache, num_tokens, num_rows)


def _measure_room(config: EngineConfig, model: Decoder) -> int:
    """Return the bytes that are left for the KV cache beside the weights and the largest step.

    Raises:
        ConfigError: there is no room for a single block.
    """
    step_bytes = _measure_step(config, model)
    free, total = torch.cuda.mem_get_info()
    room = int(total * config.gpu_memory_utilization) - (total - free) - step_bytes - _GRAPH_RESERVE_BYTES
    if size_kv_cache(config, model, lambda: room) < 1:
        raise ConfigError(
            f"no GPU memory is left for the KV cache: {(total - free) >> 30} of {total >> 30} GiB are in use; raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens or free the GPU"
        )
    return room


def _measure_step(config: EngineConfig, model: Decoder) -> int:
    """Return the bytes that the largest step allocates beside weights and KV cache."""
    batch = Batch.allocate(
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        num_slots=1,
        max_blocks=blocks_of_one_sequence(config, model),
        max_model_len=model.spec.max_model_len,
        device=model.device,
    )
    batch.kv_slots.fill_(-1)
    kv_cache = model.allocate_kv_cache(1, config.block_size)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.forward(batch, kv_cache, config.max_num_batched_tokens, config.max_num_seqs)
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak
