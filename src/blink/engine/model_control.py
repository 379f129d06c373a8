# SPDX-License-Identifier: Apache-2.0
"""What is asked of an engine's model while it serves: sleep, wake up, other weights. One thing at a time.

Questions come on threads of the host process. The engine's own thread carries them out, while the scheduler is held.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Protocol

import torch

from blink.config import EngineConfig, ModelConfig
from blink.engine.hold import Hold
from blink.engine.tensor_updates import TensorUpdates
from blink.errors import BadRequestError, BlinkError, ConfigError
from blink.link.model_orders import SOCKET, check_level, check_tags
from blink.models.weights.loader import ModelSource
from blink.models.weights.staged_tensors import ReadTensor
from blink.region.engine_socket import EngineSocket
from blink.region.layout import Absent, Drop
from blink.region.memory import Region
from blink.region.tensor_stream import TensorEntry

logger = logging.getLogger("blink.engine")

_WEIGHTS = Absent.WEIGHTS | Absent.DISCARDED
_BITS = {"weights": _WEIGHTS, "kv_cache": Absent.KV_CACHE}


class ChangeableModel(Protocol):
    """An engine's model, as its memory is freed and filled; for the engine's own thread."""

    def check_sleep(self) -> None:
        """Refuse to sleep where memory cannot be freed; ConfigError: that is so."""
        ...

    def open_shared(self, entries: Sequence[TensorEntry], handles: Sequence[Mapping[str, Any]]) -> ReadTensor:
        """Return what reads tensors in another process's memory, by handles; BadRequestError: none can."""
        ...

    def open_weights(self, config: ModelConfig, newer: Sequence[Path]) -> ModelSource:
        """Open weights of the same model; newer: files that stand for some; ConfigError: they do not fit."""
        ...

    def load_weights(self, source: ModelSource) -> None:
        """Free the weights that are there, and load others; ConfigError: that fails."""
        ...

    def free_weights(self) -> None:
        """Free the weights."""
        ...

    def store_weights(self) -> None:
        """Free what weights take of a GPU, if they lie there, and keep them; ConfigError: nowhere has room."""
        ...

    def restore_weights(self) -> None:
        """Take stored weights back, if they were stored; ConfigError: there is no memory."""
        ...

    def free_kv_cache(self) -> None:
        """Free the KV cache."""
        ...

    def fill_kv_cache(self) -> None:
        """Allocate the KV cache anew; ConfigError: there is no memory."""
        ...


@dataclass(frozen=True, slots=True)
class _Weights:
    """Where weights are: files of a configuration, and tensors that stand for some of them."""

    config: ModelConfig
    newer: tuple[Path, ...] = ()


class ModelControl:
    """Changes an engine's model."""

    def __init__(
        self,
        region: Region,
        model: ChangeableModel,
        config: EngineConfig,
        device: torch.device,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """config: of the weights that are loaded; around: in what the engine's thread does each thing."""
        self._region, self._name = region, config.region
        self._hold, self._model, self._weights = Hold(region), model, _Weights(config.model)
        self._around, self._asked = around, threading.Event()
        self._tensors = TensorUpdates(device, self._have_device)
        self._has_weights = True
        self._turn = threading.Lock()
        self._jobs = queue.SimpleQueue[tuple[Callable[[], None], Future[None]]]()

    def listen(self) -> EngineSocket:
        """Open the socket on which frontends ask.

        Raises:
            ConfigError: it cannot be made; the region is removed.
        """
        try:
            return EngineSocket(self._name, SOCKET, self.answer)
        except BaseException:
            self._region.remove()
            raise

    @property
    def is_holding(self) -> bool:
        """Whether the scheduler is held, so that jobs may come at any time."""
        return self._hold.is_on

    def run_jobs(self, seconds: float = 0.0) -> None:
        """Carry out what was asked, or is within some seconds; for the engine's own thread."""
        self._asked.wait(seconds)
        self._asked.clear()
        while not self._jobs.empty():
            job, done = self._jobs.get()
            try:
                with self._around():
                    job()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def answer(self, question: dict[str, Any], rest: BufferedIOBase) -> dict[str, Any]:
        """Do what a frontend asks (link/model_orders.py); on any thread but the engine's own.

        rest: the stream of tensors that follows, if one does.

        Raises:
            BadRequestError: it cannot be done.
            EngineUnavailableError: the scheduler does not run.
        """
        orders: dict[str, Callable[..., None]] = {
            "check_sleep": self._model.check_sleep,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "update": self.update,
            "join": self._tensors.join,
            "leave": self._tensors.leave,
            "begin": self._tensors.begin,
            "receive": lambda: self._tensors.receive(self._weights.config.model, rest),
            "share": lambda **asked: self._tensors.share(self._weights.config.model, self._model.open_shared, **asked),
            "broadcast": lambda **asked: self._tensors.broadcast(self._weights.config.model, **asked),
            "commit": self.commit,
        }
        with self._turn:
            orders[question["order"]](**question["values"])
            return {"awake": not self._hold.absent, "is_open": self._tensors.is_open}

    def sleep(self, level: int) -> None:
        """Free the KV cache and the weights, which at level 1 are kept by the host; sequences compute their KV anew."""
        check_level(level)
        self._model.check_sleep()
        self._hold.begin(Drop.KV_CACHE)
        self._hold.absent |= Absent.KV_CACHE | Absent.WEIGHTS
        self._run(self._model.free_kv_cache)
        if level > 1:
            self._has_weights = False
            self._hold.absent |= Absent.DISCARDED
            self._run(self._model.free_weights)
        else:
            self._run(self._model.store_weights)
        logger.info("the engine sleeps: the weights are %s", "in the host's memory" if level == 1 else "freed")

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory back; the scheduler goes on once nothing is absent."""
        for tag in check_tags(tags):
            if not self._hold.absent & _BITS[tag]:
                continue
            if tag == "kv_cache":
                self._run(self._model.fill_kv_cache)
            elif self._has_weights:
                self._run(self._model.restore_weights)
            else:
                self._load(self._weights)
            self._hold.absent &= ~_BITS[tag]
        self._go_on()

    def update(self, path: str, load_format: str, clears_cache: bool) -> None:
        """Take other weights of the same model; until they are there as a whole, the weights are undefined."""
        config = self._weights.config
        config = replace(config, model=path, load_format=load_format or config.load_format)
        self._change(_Weights(config), clears_cache=clears_cache)
        self._tensors.close()
        logger.info("the weights are those of %s", path)

    def commit(self, clears_cache: bool) -> None:
        """Take the tensors that have come over those of the model's files."""
        self._tensors.end()
        config = replace(self._weights.config, load_format="safetensors")
        try:
            self._change(_Weights(config, self._tensors.files), clears_cache=clears_cache)
        except BaseException:
            self._tensors.drop()
            raise
        self._tensors.commit()
        self._weights = _Weights(config, self._tensors.files)
        logger.info("the weights are those that tensors have brought")

    def close(self) -> None:
        """Remove what tensors have brought."""
        self._tensors.close()

    def _change(self, weights: _Weights, *, clears_cache: bool) -> None:
        self._hold.begin(Drop.PREFIX_CACHE if clears_cache else Drop.NOTHING)
        try:
            self._load(weights)
            self._hold.absent &= ~(Absent.UNDEFINED | _WEIGHTS)
            self._weights = weights
        finally:
            self._go_on()

    def _load(self, weights: _Weights) -> None:
        self._run(lambda: self._replace_weights(weights))
        self._has_weights = True

    def _replace_weights(self, weights: _Weights) -> None:
        # Refuses what does not fit before anything is lost.
        source = self._model.open_weights(weights.config, weights.newer)
        self._hold.absent |= Absent.UNDEFINED
        self._has_weights = False
        self._model.load_weights(source)
        self._hold.absent &= ~Absent.UNDEFINED

    def _have_device(self, job: Callable[[], None]) -> None:
        """Do what needs the model's device, while the scheduler is held; requests are kept as they are."""
        was_on = self._hold.is_on
        if not was_on:
            self._hold.begin(Drop.NOTHING)
        try:
            self._run(job)
        finally:
            if not was_on:
                self._go_on()

    def _go_on(self) -> None:
        if self._hold.is_on and not self._hold.absent:
            self._hold.end()

    def _run(self, job: Callable[[], None]) -> None:
        """Let the engine's thread do something, and wait for it."""
        done = Future[None]()
        self._jobs.put((job, done))
        self._asked.set()
        try:
            done.result()
        except ConfigError as error:
            raise BadRequestError(error.message) from error
        except BlinkError:
            raise
        except Exception as error:
            logger.exception("the engine's model could not be changed")
            raise BadRequestError(f"The engine's model could not be changed: {type(error).__name__}.") from error
