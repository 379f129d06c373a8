# SPDX-License-Identifier: Apache-2.0
"""What is asked of an engine's model while it serves: sleep, wake up, other weights. One thing at a time.

Questions come on threads of the host process. The engine's own thread carries them out, while the scheduler is held.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from blink.config import ModelConfig
from blink.engine.hold import Hold
from blink.errors import BadRequestError, BlinkError, ConfigError
from blink.link.model_orders import check_level, check_tags
from blink.models.weights.loader import ModelSource
from blink.region.layout import Absent, Drop
from blink.region.memory import Region

logger = logging.getLogger("blink.engine")

_WEIGHTS = Absent.WEIGHTS | Absent.DISCARDED
_BITS = {"weights": _WEIGHTS, "kv_cache": Absent.KV_CACHE}


class ChangeableModel(Protocol):
    """An engine's model, as its memory is freed and filled; for the engine's own thread."""

    def open_weights(self, config: ModelConfig) -> ModelSource:
        """Open weights of the same model; ConfigError: they do not fit it, or are not there."""
        ...

    def load_weights(self, source: ModelSource) -> None:
        """Free the weights that are there, and load others; ConfigError: that fails."""
        ...

    def free_weights(self) -> None:
        """Free the weights."""
        ...

    def free_kv_cache(self) -> None:
        """Free the KV cache."""
        ...

    def fill_kv_cache(self) -> None:
        """Allocate the KV cache anew; ConfigError: there is no memory."""
        ...


class ModelControl:
    """Changes an engine's model."""

    def __init__(self, region: Region, model: ChangeableModel, config: ModelConfig) -> None:
        """config: of the weights that are loaded."""
        self._hold, self._model, self._config = Hold(region), model, config
        self._has_weights = True
        self._turn = threading.Lock()
        self._jobs = queue.SimpleQueue[tuple[Callable[[], None], Future[None]]]()

    @property
    def is_holding(self) -> bool:
        """Whether the scheduler is held, so that jobs may come at any time."""
        return self._hold.is_on

    def run_jobs(self) -> None:
        """Carry out what was asked; for the engine's own thread."""
        while not self._jobs.empty():
            job, done = self._jobs.get()
            try:
                job()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do what a frontend asks (link/model_orders.py); on any thread but the engine's own.

        Raises:
            BadRequestError: it cannot be done.
            EngineUnavailableError: the scheduler does not run.
        """
        with self._turn:
            if "sleep" in question:
                self.sleep(question["sleep"])
            elif "wake_up" in question:
                self.wake_up(question["wake_up"])
            else:
                drop = Drop.PREFIX_CACHE if question["clears_cache"] else Drop.NOTHING
                self.update(question["update"], question["load_format"], drop)
        return {"awake": not self._hold.absent}

    def sleep(self, level: int) -> None:
        """Free the KV cache, at level 2 the weights too; sequences are to compute their KV anew."""
        check_level(level)
        self._hold.begin(Drop.KV_CACHE)
        self._hold.absent |= Absent.KV_CACHE | Absent.WEIGHTS
        self._run(self._model.free_kv_cache)
        if level > 1:
            self._has_weights = False
            self._hold.absent |= Absent.DISCARDED
            self._run(self._model.free_weights)
        logger.info("the engine sleeps: %s", "the KV cache is freed" if level == 1 else "all of its memory is freed")

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory back; the scheduler goes on once nothing is absent."""
        for tag in check_tags(tags):
            if not self._hold.absent & _BITS[tag]:
                continue
            if tag == "kv_cache":
                self._run(self._model.fill_kv_cache)
            elif not self._has_weights:
                self._load(self._config)
            self._hold.absent &= ~_BITS[tag]
        self._go_on()

    def update(self, path: str, load_format: str, drop: Drop) -> None:
        """Take other weights of the same model; until they are there as a whole, the weights are undefined."""
        config = replace(self._config, model=path, load_format=load_format or self._config.load_format)
        self._hold.begin(drop)
        try:
            self._load(config)
            self._hold.absent &= ~(Absent.UNDEFINED | _WEIGHTS)
            self._config = config
        finally:
            self._go_on()
        logger.info("the weights are those of %s", path)

    def _load(self, config: ModelConfig) -> None:
        self._run(lambda: self._replace_weights(config))
        self._has_weights = True

    def _replace_weights(self, config: ModelConfig) -> None:
        source = self._model.open_weights(config)  # refuses what does not fit before anything is lost
        self._hold.absent |= Absent.UNDEFINED
        self._has_weights = False
        self._model.load_weights(source)
        self._hold.absent &= ~Absent.UNDEFINED

    def _go_on(self) -> None:
        if self._hold.is_on and not self._hold.absent:
            self._hold.end()

    def _run(self, job: Callable[[], None]) -> None:
        """Let the engine's thread do something, and wait for it."""
        done = Future[None]()
        self._jobs.put((job, done))
        try:
            done.result()
        except ConfigError as error:
            raise BadRequestError(error.message) from error
        except BlinkError:
            raise
        except Exception as error:
            logger.exception("the engine's model could not be changed")
            raise BadRequestError(f"The engine's model could not be changed: {type(error).__name__}.") from error
