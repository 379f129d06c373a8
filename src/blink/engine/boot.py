# SPDX-License-Identifier: Apache-2.0
"""The engine process: boots the engine that fits the machine, then only watches for signals."""

from __future__ import annotations

import gc
import logging
import os
import signal
from functools import partial
from types import FrameType

import torch

from blink.config import EngineConfig
from blink.engine.base import Engine
from blink.engine.cpu import CpuEngine
from blink.engine.rank_fit import settle_ranks
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
    config = settle_ranks(config, measure_gpus)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no GPU; run `blink doctor`, or use --device cpu")
    if config.device == "cpu" or not torch.cuda.is_available():
        return CpuEngine(config, read)
    from blink.engine.gpu import GpuEngine

    return GpuEngine(config, read)


def measure_gpus() -> list[int]:
    """Return the memory of each GPU in bytes, by no question that makes a context there: most may stay unused."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
