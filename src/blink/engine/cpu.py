# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: the scheduler on a native thread, the model on the thread that calls run()."""

from __future__ import annotations

import logging
import os

import numpy as np
import torch

from blink.config import EngineConfig
from blink.engine.batch import HEADER_WORDS, PARAM_WORDS, Batch, Header
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.engine.weights import load_model, resolve_dtype
from blink.layout import BATCH_HEADER, CONSTANTS, EngineState, ErrorCode
from blink.model_files import resolve_model
from blink.models.decoder import Decoder
from blink.native import lib
from blink.region import Region, create_region, publish_region

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
        torch.set_num_threads(config.cpu_threads or len(os.sched_getaffinity(0)))
        device = torch.device("cpu")
        self._model = load_model(config.model, device, resolve_dtype(config.model.dtype, device))
        spec = self._model.spec
        num_blocks = _num_blocks(config, self._model)
        geometry = build_geometry(
            config, max_model_len=spec.max_model_len, vocab_size=spec.vocab_size, num_blocks=num_blocks
        )
        self.region: Region = create_region(config.region, geometry, served_name(config))
        self._state = HostState(self.region)
        self._batch = map_batch(self._state, geometry)
        self._kv_cache = self._model.allocate_kv_cache(num_blocks, config.block_size)
        logger.info("KV cache: %d blocks of %d tokens", num_blocks, config.block_size)

    def run(self) -> int:
        """Serve until drained or stopped and return the exit status: 0, or 1 after an error."""
        loop = lib.blink_loop_start(self._state.address)
        publish_region(self.region, self._config.region)
        logger.info("engine ready: region %s", self._config.region)
        try:
            while (graph := lib.blink_loop_wait(loop, _WAIT_MS)) != -2:
                if graph >= 0:
                    lib.blink_loop_finish(loop, self._run_step())
                elif self._state_word() == EngineState.DRAINED:
                    self.stop()
        finally:
            lib.blink_loop_stop(loop)
        return self._finish()

    def drain(self) -> None:
        """Let running requests end and refuse new ones; run() returns when all are done."""
        self.region.store_control("drain", 1)

    def stop(self) -> None:
        """End the scheduler at its next pass; open requests are lost."""
        self.region.store_control("stop", 1)

    def _run_step(self) -> int:
        header = self._batch.header
        try:
            num_tokens, num_rows = int(header[Header.NUM_TOKENS]), int(header[Header.NUM_ROWS])
            self._model.forward(self._batch, self._kv_cache, num_tokens, num_rows)
        except Exception:
            logger.exception("the model failed; the engine stops")
            return 1
        return 0

    def _state_word(self) -> int:
        return self.region.control_word("state")

    def _finish(self) -> int:
        if self._state_word() == EngineState.FAILED:
            # The file stays, so that frontends can read the error; the next engine replaces it.
            place, detail = (self.region.control_word(f"error_{word}") for word in ("place", "detail"))
            error = ErrorCode(self.region.control_word("error_code"))
            logger.error("the scheduler stopped: %s (place %d, detail %d)", error.name, place, detail)
            return 1
        self.region.path.unlink(missing_ok=True)
        return 0


def served_name(config: EngineConfig) -> str:
    """Return the model's name in the API: --served-model-name, or what MODEL names, or the default model's name."""
    model = config.model
    return model.served_model_name or model.model or resolve_model("").name.split(".")[0]


def _num_blocks(config: EngineConfig, model: Decoder) -> int:
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    shape = model.spec.kv_cache_shape(1, config.block_size)
    block_bytes = int(np.prod(shape)) * model.dtype.itemsize
    if config.kv_cache_memory_bytes:
        return config.kv_cache_memory_bytes // block_bytes
    one_sequence = -(-model.spec.max_model_len // config.block_size)
    return max(_DEFAULT_KV_CACHE_BYTES // block_bytes, one_sequence)


def map_batch(state: HostState, geometry: np.ndarray) -> Batch:  # type: ignore[type-arg]
    """View the scheduler's arrays as the model's batch."""
    slots = int(geometry["num_slots"])

    def ints(name: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(state.array(name, "i4").reshape(shape or (-1,)))

    def floats(name: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(state.array(name, "f4").reshape(shape or (-1,)))

    assert BATCH_HEADER.itemsize == 4 * HEADER_WORDS
    return Batch(
        header=ints("batch"),
        input_ids=ints("input_ids"),
        positions=ints("positions"),
        kv_slots=ints("kv_slots"),
        query_starts=ints("query_starts"),
        context_lens=ints("context_lens"),
        row_slots=ints("row_slots"),
        block_tables=ints("block_tables", slots, -1),
        tokens=ints("tokens", slots, -1),
        params=ints("params", slots, PARAM_WORDS),
        stop_tokens=ints("stop_tokens", slots, CONSTANTS["max_stop_tokens"]),
        bias_tokens=ints("bias_tokens", slots, CONSTANTS["max_logit_biases"]),
        bias_values=floats("bias_values", slots, CONSTANTS["max_logit_biases"]),
        sampled_tokens=ints("sampled_tokens"),
        sampled_logprobs=floats("sampled_logprobs"),
        top_tokens=ints("top_tokens", -1, CONSTANTS["max_logprobs"]),
        top_logprobs=floats("top_logprobs", -1, CONSTANTS["max_logprobs"]),
    )
