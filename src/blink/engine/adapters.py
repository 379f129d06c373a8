# SPDX-License-Identifier: Apache-2.0
"""The adapters of an engine: where the model reads them, and the server that frontends ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blink.adapters.memory import AdapterMemory
from blink.adapters.modules import find_weights
from blink.adapters.protocol import SOCKET
from blink.adapters.server import answer_adapters
from blink.config import EngineConfig
from blink.kernels.lora import WeightParts
from blink.lora_config import LoraConfig
from blink.models.decoder import Decoder
from blink.region.engine_socket import EngineSocket
from blink.region.memory import Region
from blink.runner.adapters import Adapters, HostAdapters
from blink.runner.run import Runner

MakeAdapters = Callable[[LoraConfig, Decoder, Mapping[int, WeightParts]], Adapters]  # of weights by identity


def make_host_adapters(lora: LoraConfig, model: Decoder, weights: Mapping[int, WeightParts]) -> Adapters:  # noqa: ARG001
    """Return the adapters of an engine whose steps the host runs."""
    return HostAdapters(lora.num_adapters)


def make_stores(config: EngineConfig, ranks: Sequence[Decoder], make: MakeAdapters) -> list[Adapters]:
    """Return where each part of a model reads its adapters; nothing where none are served.

    Raises:
        ConfigError: the model has no matrix that an adapter may change, or there is no memory for adapters.
    """
    return [make(config.lora, model, find_weights(model)) for model in ranks] if config.lora.enable_lora else []


def attach_stores(stores: Sequence[Adapters], runners: Sequence[Runner]) -> None:
    """Let each runner of a part of the model find there what adapters change of its steps."""
    for store, runner in zip(stores, runners, strict=False):
        runner.find_updates = store.find


def open_sockets(
    config: EngineConfig, region: Region, ranks: Sequence[Decoder], stores: Sequence[Adapters]
) -> list[EngineSocket]:
    """Return what answers frontends about an engine's adapters, which is yet to start; none where none are served.

    stores: of each part of the model.

    Raises:
        ConfigError: the socket cannot be made.
    """
    if not stores:
        return []
    memory = AdapterMemory(region, ranks, config.lora, stores)
    return [EngineSocket(config.region, SOCKET, lambda question, _: answer_adapters(memory, question))]
