# SPDX-License-Identifier: Apache-2.0
"""A GPU engine's model as it is changed while it serves: other weights in the memory that its graphs read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from blink.config import EngineConfig, ModelConfig
from blink.engine.same_model import open_same_model
from blink.errors import ConfigError
from blink.models.decoder import Decoder
from blink.models.weights.loader import ModelSource

TAKES_WEIGHTS = False  # until tests/gpu/test_weight_update_gpu.py has run on a GPU; it sets this
_NO_SLEEP: Final = (
    "An engine on a GPU does not sleep yet: its graphs read memory that cannot be freed. Pause it instead."
)


def takes_weights(config: EngineConfig) -> bool:
    """Tell whether an engine's weights may be changed: not where parts of them are on other GPUs, or adapters."""
    return TAKES_WEIGHTS and config.tensor_parallel_size == 1 and not config.lora.enable_lora


class GpuWeights:
    """Changes the weights of an engine that has its GPU to itself meanwhile (device_leave.py)."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def check_sleep(self) -> NoReturn:
        """Refuse to sleep.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(_NO_SLEEP)

    def open_weights(self, config: ModelConfig, newer: Sequence[Path]) -> ModelSource:
        """Open weights of the same model, once all of them are known to fit; newer: as open_model() has it.

        Raises:
            ConfigError: they do not fit the model, or are not there, or there is no memory to load a layer beside it.
        """
        open_same_model(self._model, config, newer).check_over(self._model)
        return open_same_model(self._model, config, newer)  # anew: random weights are drawn from the first on

    def load_weights(self, source: ModelSource) -> None:
        """Write weights over those that are there.

        Raises:
            ConfigError: that fails, and the weights are undefined.
        """
        source.write_over(self._model)

    def free_weights(self) -> None:
        """Refuse, as sleep asks for it."""
        self.check_sleep()

    def free_kv_cache(self) -> None:
        """Refuse, as sleep asks for it."""
        self.check_sleep()

    def fill_kv_cache(self) -> None:
        """Leave the KV cache as it is, which is never freed."""
