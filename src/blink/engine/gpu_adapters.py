# SPDX-License-Identifier: Apache-2.0
"""The adapters of a GPU engine: all of them in GPU memory, which is taken at boot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blink.errors import ConfigError
from blink.kernels.gpu.lora.memory import GpuAdapters
from blink.kernels.gpu.lora.upload import Uploader
from blink.kernels.lora import WeightParts
from blink.lora_config import LoraConfig
from blink.models.decoder import Decoder


def make_gpu_adapters(lora: LoraConfig, model: Decoder, weights: Mapping[int, WeightParts]) -> GpuAdapters:
    """Return the memory of a GPU's adapters; weights: by identity.

    Raises:
        ConfigError: more adapters are to be loaded than run at once, or there is no memory for them.
    """
    if lora.num_adapters > lora.max_loras:
        raise ConfigError("--max-cpu-loras: a GPU holds all adapters in its own memory; raise --max-loras instead")
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    try:
        return GpuAdapters(weights, lora.num_adapters, lora.max_lora_rank, like, Uploader())
    except torch.OutOfMemoryError as error:
        raise ConfigError("there is no GPU memory for the adapters: lower --max-loras or --max-lora-rank") from error
