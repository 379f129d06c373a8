# SPDX-License-Identifier: Apache-2.0
"""The adapters of an engine: where the model reads them, and the server that frontends ask for them."""

from __future__ import annotations

import torch

from blink.adapters.memory import AdapterMemory
from blink.adapters.modules import find_weights
from blink.adapters.server import AdapterServer
from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.models.decoder import Decoder
from blink.region.memory import Region
from blink.runner.adapters import Adapters, HostAdapters
from blink.runner.run import Runner


def make_store(config: EngineConfig, model: Decoder) -> Adapters | None:
    """Return where a model reads the adapters of --max-cpu-loras; None: none are served.

    Raises:
        ConfigError: the model has no matrix that an adapter may change, or its GPU cannot hold them.
    """
    lora = config.lora
    if not lora.enable_lora:
        return None
    weights = find_weights(model)
    if model.device.type == "cpu":
        return HostAdapters(lora.num_adapters)
    if lora.num_adapters > lora.max_loras:
        raise ConfigError("--max-cpu-loras: a GPU holds all adapters in its own memory; raise --max-loras instead")
    from blink.kernels.gpu.lora.memory import GpuAdapters
    from blink.kernels.gpu.lora.upload import Uploader

    like = torch.empty(0, dtype=model.dtype, device=model.device)
    try:
        return GpuAdapters(weights, lora.num_adapters, lora.max_lora_rank, like, Uploader())
    except torch.OutOfMemoryError as error:
        raise ConfigError("there is no GPU memory for the adapters: lower --max-loras or --max-lora-rank") from error


def open_server(config: EngineConfig, region: Region, runner: Runner) -> AdapterServer | None:
    """Return the server of an engine's adapters, which is yet to start; None: none are served.

    Raises:
        ConfigError: its socket cannot be made.
    """
    if runner.adapters is None:
        return None
    return AdapterServer(config.region, AdapterMemory(region, runner.model, config.lora, runner.adapters))
