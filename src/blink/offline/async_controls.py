# SPDX-License-Identifier: Apache-2.0
"""What an `AsyncLLM` can be told besides requests, by vLLM's names: to pause, to sleep, to take other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from blink.link.client import RegionInfo
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
from blink.offline.controls import call_of_workers, is_asleep
from blink.offline.local_engine import LocalEngine
from blink.offline.tensors import NamedTensors, stream_tensors

_LOOK_SECONDS = 0.002


class AsyncControls:
    """Calls of `AsyncLLM` that change its engine. Requests that come during a pause wait."""

    _engine: LocalEngine

    async def _await_engine(self) -> RegionInfo:
        raise NotImplementedError

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Let the engine launch nothing more; return when that is in effect.

        Args:
            mode: abort ends all requests, wait lets running ones end first, keep leaves them as they are, and retract
                takes only their KV cache.
            wait_for_inflight_requests: the same as mode "wait".
            clear_cache: whether cached prefixes are forgotten.
        Raises:
            BadRequestError: there is no such mode.
        """
        wanted = check_mode("wait" if wait_for_inflight_requests else mode)
        await self._await_engine()
        pause = Pause(self._engine.client, wanted, clears_cache=clear_cache)
        await self._until(lambda: pause.has_begun)

    async def resume_generation(self) -> None:
        """End a pause.

        Raises:
            BadRequestError: the engine sleeps, or its weights are undefined.
        """
        await self._await_engine()
        resume = Resume(self._engine.client)
        await self._until(lambda: resume.is_done)

    async def is_paused(self) -> bool:
        """Say whether the engine launches nothing: it is paused, or sleeps."""
        await self._await_engine()
        return self._engine.client.is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and free memory until wake_up(): at level 1 the KV cache, at level 2 the weights too.

        Raises:
            BadRequestError: this engine cannot sleep.
        """
        check_level(level)
        await asyncio.to_thread(check_sleeps, self._region)
        await self.pause_generation(mode=mode)
        await asyncio.to_thread(ask_sleep, self._region, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: weights, kv_cache, or both. The engine goes on when it has both.

        Raises:
            BadRequestError: there is no memory, or the weights cannot be read again.
        """
        check_obeys(self._region)
        if await asyncio.to_thread(ask_wake_up, self._region, check_tags(tags)):
            await self.resume_generation()

    async def is_sleeping(self) -> bool:
        """Say whether the engine lacks its KV cache or its weights."""
        await self._await_engine()
        return is_asleep(self._engine.client)

    async def update_weights_from_disk(
        self, model_path: str, load_format: str = "", *, flush_cache: bool = True
    ) -> None:
        """Read other weights of the same model in the place of these, as LLM.update_weights_from_disk() does.

        An engine that is not paused is so for the update, once the requests that run have ended.
        """
        check_obeys(self._region)
        await self._replace_weights(partial(ask_update, self._region, model_path, load_format), flush_cache)

    async def update_weights_from_tensor(self, named_tensors: NamedTensors, *, flush_cache: bool = True) -> None:
        """Take tensors in the place of the model's, as LLM.update_weights_from_tensor() does; paused as above."""
        check_obeys(self._region)
        if not await asyncio.to_thread(send_tensors, self._region, stream_tensors(named_tensors)):
            await self._replace_weights(partial(ask_commit, self._region), flush_cache)

    async def _replace_weights(self, order: Callable[..., None], flush_cache: bool) -> None:
        """Let the engine take other weights by an order, paused as long as that takes; a paused one stays so."""
        was_paused = await self.is_paused()
        if not was_paused:
            await self.pause_generation(mode="wait", clear_cache=flush_cache)
        try:
            await asyncio.to_thread(order, clears_cache=flush_cache)
        finally:
            if not was_paused and not self._engine.client.absent:
                await self.resume_generation()

    async def collective_rpc(
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
        return [await call_of_workers(self, method, self._engine)(*args, **(kwargs or {}))]

    @property
    def _region(self) -> str:
        return self._engine.config.engine.region

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(_LOOK_SECONDS)
            await self._await_engine()
