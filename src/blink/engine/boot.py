# SPDX-License-Identifier: Apache-2.0
"""The engine process: boots the engine that fits the machine, then only watches for signals."""

from __future__ import annotations

import gc
import logging
import os
import signal
from dataclasses import replace
from functools import partial
from types import FrameType

import torch

from blink.config import FITTING_RANKS, EngineConfig
from blink.engine.base import Engine
from blink.engine.cpu import CpuEngine
from blink.engine.determinism import is_deterministic
from blink.engine.rank_fit import choose_size, measure_model
from blink.engine.vocabulary import ReadVocabulary, read_vocabulary
from blink.engine.vocabulary_child import VocabularyChild
from blink.errors import ConfigError

logger = logging.getLogger("blink.engine")


def run_engine(config: EngineConfig, child: VocabularyChild | None = None) -> int:
    """Run an engine until SIGTERM or SIGINT has drained it; a second signal stops it at once.

    child: reads the bytes of the model's tokens.

    Returns the process's exit status: 0, or 1 if the scheduler stopped on an error.

    Raises:
        ConfigError: model, options and machine do not fit together.
    """
    try:
        engine = create_engine(config, partial(read_vocabulary, child=child))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"there is not enough memory ({str(error).splitlines()[0]}): take a smaller model or dtype, or lower "
            "--max-num-seqs, --max-model-len or --kv-cache-memory-bytes"
        ) from error
    # The boot's objects live as long as the process: the collector need not walk them again.
    gc.freeze()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal signalled
        logger.info("%s: %s", signal.Signals(number).name, "stopping at once" if signalled else "draining")
        (engine.stop if signalled else engine.drain)()
        signalled = True

    signalled = False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    status = engine.run()
    if engine.is_dead:
        logging.shutdown()
        os._exit(status)  # an orderly end would wait for the device
    return status


def create_engine(config: EngineConfig, read: ReadVocabulary = read_vocabulary) -> Engine:
    """Load the model and prepare the engine for the configured device.

    Raises:
        ConfigError: the device is not there or not supported.
    """
    config = _settle_ranks(config)
    _check_adapters(config)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no GPU; run `blink doctor`, or use --device cpu")
    if config.device == "cpu" or not torch.cuda.is_available():
        return CpuEngine(config, read)
    from blink.engine.gpu import GpuEngine

    return GpuEngine(config, read)


def _settle_ranks(config: EngineConfig) -> EngineConfig:
    """Return a configuration with a number of ranks, where it asks for as few as the model fits on: on a CPU for one.

    Raises:
        ConfigError: the model does not fit on all GPUs together.
    """
    if config.tensor_parallel_size != FITTING_RANKS:
        return config
    size = 1
    if config.device != "cpu" and torch.cuda.is_available():
        # No question that would make a context on each GPU, of which most may stay unused.
        memory = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
        room = int(min(memory) * config.gpu_memory_utilization)
        size = choose_size(measure_model(config, room, len(memory)))
        logger.info("--tensor-parallel-size auto: %d of %d GPUs", size, len(memory))
    return replace(config, tensor_parallel_size=size)


def _check_adapters(config: EngineConfig) -> None:
    """Refuse what adapters do not go with.

    Raises:
        ConfigError: adapters are to be served with that.
    """
    if not config.lora.enable_lora:
        return
    if config.rdma_listen:
        raise ConfigError("--enable-lora: frontends of other machines (--rdma-listen) take no adapters yet")
    if is_deterministic(config):
        raise ConfigError("--deterministic does not go with --enable-lora: leave one of the two out")
