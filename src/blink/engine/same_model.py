# SPDX-License-Identifier: Apache-2.0
"""Weights of the model that an engine has booted with, from other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.models.decoder import Decoder
from blink.models.weights.loader import ModelSource, open_model


def open_same_model(model: Decoder, config: ModelConfig, newer: Sequence[Path]) -> ModelSource:
    """Open weights for a model; newer: files with tensors that stand for some of them.

    Raises:
        ConfigError: they do not fit it, or are not there.
    """
    source = open_model(config, model.device, model.dtype, newer)
    if source.spec != model.spec.as_stored:
        raise ConfigError(f"{config.model} is another model, or has weights of another type, than the engine's.")
    if model.inputs is not None:  # where the table lies was chosen by the memory that was free
        return replace(source, table_device=model.inputs.table.device)
    return source
