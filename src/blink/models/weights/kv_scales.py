# SPDX-License-Identifier: Apache-2.0
"""The scales of a KV cache in FP8, as checkpoints bring them: one number for a layer's keys, one for its values."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from blink.errors import ConfigError
from blink.kernels.operands import UNSCALED, KvScales
from blink.models.weights.checkpoint import SafetensorsCheckpoint

logger = logging.getLogger("blink.model")

# Names behind a layer's "self_attn.", by compressed-tensors, vLLM and ModelOpt; kv_scale is of both.
_KEY_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_VALUE_NAMES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def read_kv_scales(directory: Path | None, num_layers: int) -> list[KvScales]:
    """Return each layer's scales, 1 where the checkpoint has none; directory: None if there can be none.

    Raises:
        ConfigError: a scale is no positive number, or there are several of a layer.
    """
    scales = [UNSCALED] * num_layers
    if directory is not None:
        files = SafetensorsCheckpoint(directory)
        scales = [
            KvScales(_read(files, layer, _KEY_NAMES), _read(files, layer, _VALUE_NAMES)) for layer in range(num_layers)
        ]
    if all(scale == UNSCALED for scale in scales):
        logger.info("KV cache in FP8: the checkpoint has no scales for it, keys and values are rounded as they are")
    else:
        logger.info("KV cache in FP8, with the scales of the checkpoint")
    return scales


def _read(files: SafetensorsCheckpoint, layer: int, names: tuple[str, ...]) -> float:
    stored = next((name for end in names if files.has(name := f"model.layers.{layer}.self_attn.{end}")), None)
    if stored is None:
        return 1.0
    values = files.read(stored, _FLOATS).float().flatten()
    if len(values) != 1 or not 0 < float(values[0]) < math.inf:
        raise ConfigError(
            f"{files.place}: '{stored}' must be one positive number, the scale of a layer's keys or values in an FP8 KV"
            " cache; leave --kv-cache-dtype out to serve without it."
        )
    return float(values[0])
