# SPDX-License-Identifier: Apache-2.0
"""What an LLM in this process can be told besides requests: to pause, to sleep, to take other weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blink.errors import BadRequestError
from blink.link.client import EngineClient, RegionInfo
from blink.link.model_orders import (
    ask_commit,
    ask_sleep,
    ask_update,
    ask_wake_up,
    check_level,
    check_obeys,
    check_sleeps,
    check_tags,
    send_tensors,
)
from blink.link.pause import Pause, Resume, check_mode
from blink.offline.local_engine import LocalEngine
from blink.offline.tensors import NamedTensors, stream_tensors
from blink.region.layout import Absent

_LOOK_SECONDS = 0.001
_WORKER_CALLS = ("sleep", "wake_up", "reload_weights")


class EngineControls:
    """Calls of `LLM` that change its engine."""

    _engine: LocalEngine
    _client: EngineClient
    _turn: threading.Lock

    def _await_engine(self) -> RegionInfo:
        raise NotImplementedError

    def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Let the engine launch nothing more; requests are refused until resume().

        Args:
            mode: abort, wait, keep or retract; no request runs between calls, so all come to the same here.
            clear_cache: whether cached prefixes are forgotten.
        """
        with self._turn:
            self._pause(check_mode(mode), clears_cache=clear_cache)

    def resume(self) -> None:
        """End a pause.

        Raises:
            BadRequestError: the engine sleeps, or its weights are undefined.
        """
        with self._turn:
            self._resume()

    def is_paused(self) -> bool:
        """Say whether the engine launches nothing: it is paused, or sleeps."""
        return self._client.is_paused

    def is_sleeping(self) -> bool:
        """Say whether the engine lacks its KV cache or its weights."""
        return is_asleep(self._client)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until wake_up(): at level 1 the KV cache, at level 2 the weights too.

        Raises:
            BadRequestError: this engine cannot sleep.
        """
        check_level(level)
        check_sleeps(self._region)
        self.pause(mode)
        with self._turn:
            ask_sleep(self._region, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: weights, kv_cache, or both. The engine goes on when it has both.

        Raises:
            BadRequestError: there is no memory, or the weights cannot be read again.
        """
        check_obeys(self._region)
        wanted = check_tags(tags)
        with self._turn:
            if ask_wake_up(self._region, wanted):
                self._resume()

    def update_weights_from_disk(self, model_path: str, load_format: str = "", *, flush_cache: bool = True) -> None:
        """Read other weights of the same model in the place of these.

        Args:
            model_path: a folder or file, as `model` of the LLM.
            load_format: as the LLM's option; empty: that of the weights before.
            flush_cache: whether cached prefixes, which the weights before have computed, are forgotten.
        Raises:
            BadRequestError: they are of another model, and nothing has changed; or they cannot be read as a whole, and
                the engine refuses requests until an update succeeds.
        """
        with self._turn:
            self._await_engine()
            check_obeys(self._region)
            ask_update(self._region, model_path, load_format, clears_cache=flush_cache)

    def update_weights_from_tensor(self, named_tensors: NamedTensors, *, flush_cache: bool = True) -> None:
        """Take tensors in the place of those of the same names in the model's files; others stay as they are.

        Args:
            named_tensors: tensors of any device by the names of the model's files, or pairs of name and tensor.
            flush_cache: as update_weights_from_disk() has it.
        Raises:
            BadRequestError: a tensor does not fit, and nothing has changed.
        """
        with self._turn:
            self._await_engine()
            check_obeys(self._region)
            if not send_tensors(self._region, stream_tensors(named_tensors)):
                ask_commit(self._region, clears_cache=flush_cache)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call what vLLM's workers have that is here: sleep, wake_up and reload_weights.

        Raises:
            BadRequestError: it is something else.
        """
        del timeout
        return [call_of_workers(self, method, self._engine)(*args, **(kwargs or {}))]

    @property
    def _region(self) -> str:
        return self._engine.config.engine.region

    def _pause(self, mode: str, *, clears_cache: bool) -> None:
        self._await_engine()
        pause = Pause(self._client, mode, clears_cache=clears_cache)
        while not pause.has_begun:
            self._wait_a_moment()

    def _resume(self) -> None:
        self._await_engine()
        resume = Resume(self._client)
        while not resume.is_done:
            self._wait_a_moment()

    def _wait_a_moment(self) -> None:
        time.sleep(_LOOK_SECONDS)
        self._await_engine()


def is_asleep(client: EngineClient) -> bool:
    """Say whether an engine lacks its KV cache or its weights."""
    return bool(client.absent & (Absent.WEIGHTS | Absent.KV_CACHE))


def call_of_workers(controls: Any, method: str | Callable[..., Any], engine: LocalEngine) -> Callable[..., Any]:
    """Return the call of an LLM that does what a method of vLLM's workers does.

    Raises:
        BadRequestError: there is none.
    """
    if method in _WORKER_CALLS[:2]:
        return getattr(controls, str(method))
    if method != _WORKER_CALLS[2]:
        raise BadRequestError(f"collective_rpc() takes {', '.join(_WORKER_CALLS)}: the engine has no Python workers.")

    def reload_weights(weights_path: str | None = None) -> Any:
        return controls.update_weights_from_disk(weights_path or engine.config.engine.model.model)

    return reload_weights
