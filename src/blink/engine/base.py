# SPDX-License-Identifier: Apache-2.0
"""What the engines share: the words of the region that the host writes, how a run ends, the KV cache's size."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from blink.config import EngineConfig
from blink.models.weights.files import resolve_model
from blink.region.layout import EngineState, ErrorCode, place_name
from blink.region.memory import Region

if TYPE_CHECKING:
    from blink.models.decoder import Decoder

logger = logging.getLogger("blink.engine")


class Engine(ABC):
    """A loaded engine and the control block of its region; frontends see it while run() runs."""

    def __init__(self, region: Region) -> None:
        self._region = region

    @abstractmethod
    def run(self) -> int:
        """Serve until drained or stopped and return the exit status: 0, or 1 after an error."""

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

    def _finish(self) -> int:
        """Clean up behind a scheduler that has ended and return the process's exit status."""
        if self.state != EngineState.FAILED:
            self._region.path.unlink(missing_ok=True)
            return 0
        # The file stays, so that frontends can read the error; the next engine replaces it.
        place, detail = (self._region.control_word(f"error_{word}") for word in ("place", "detail"))
        error = ErrorCode(self._region.control_word("error_code"))
        logger.error("the scheduler stopped: %s (%s, detail %d)", error.name, place_name(place), detail)
        return 1


def size_kv_cache(config: EngineConfig, model: Decoder, measure_room: Callable[[], int]) -> int:
    """Return the number of KV blocks: as configured, or what fits into the bytes that `measure_room` finds."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    return (config.kv_cache_memory_bytes or measure_room()) // block_bytes(config, model)


def block_bytes(config: EngineConfig, model: Decoder) -> int:
    """Return the size of one KV block over all layers."""
    return math.prod(model.spec.kv_cache_shape(1, config.block_size)) * model.dtype.itemsize


def blocks_of_one_sequence(config: EngineConfig, model: Decoder) -> int:
    """Return how many KV blocks the longest sequence takes."""
    return -(-model.spec.max_model_len // config.block_size)


def served_name(config: EngineConfig) -> str:
    """Return the model's name in the API: --served-model-name, or what MODEL names, or the default model's name."""
    model = config.model
    return model.served_model_name or model.model or resolve_model("").name.split(".")[0]
