# SPDX-License-Identifier: Apache-2.0
"""An engine on a thread of this process, for `LLM`."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from blink.config import EngineConfig
from blink.engine.base import Engine
from blink.engine.boot import create_engine


class EngineThread:
    """Boot an engine and run it, on one thread: OpenMP keeps a pool for each thread that computes."""

    def __init__(self, config: EngineConfig) -> None:
        """Return when the engine is loaded.

        Raises:
            ConfigError: the model, the options and the machine do not fit together.
        """
        boot: Future[Engine] = Future()
        self._thread = threading.Thread(target=_run, args=(config, boot), name="blink-engine", daemon=True)
        self._thread.start()
        self._engine = boot.result()

    def stop(self) -> None:
        """Stop the engine, wait for its end and give back its memory."""
        self._engine.stop()
        if self._thread is threading.current_thread():  # a garbage collection may run there
            return
        self._thread.join()
        if self._engine.is_dead:  # whose memory may still be written, and to free it would wait for the device
            return
        del self._engine
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _run(config: EngineConfig, boot: Future[Engine]) -> None:
    try:
        engine = create_engine(config)
    except BaseException as error:
        boot.set_exception(error)
        return
    boot.set_result(engine)
    try:
        engine.run()
    finally:
        engine.remove_region()  # after a failure nobody comes to read the error
