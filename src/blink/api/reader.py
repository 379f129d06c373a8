# SPDX-License-Identifier: Apache-2.0
"""Reads bodies: light ones at once, others in a child process, so that no body keeps the event loop waiting.

The child starts with the first such body, has a deadline for each, and is replaced when it dies.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

from blink.api.reading import is_light, read_body
from blink.api.serving.parsed_request import Bounds, HeavyRequestError, ParsedRequest
from blink.config import FrontendConfig
from blink.errors import BadRequestError, BlinkError, EngineUnavailableError, OverloadedError
from blink.host.child import Child, Parent, limit_data
from blink.host.logs import set_up_logging
from blink.text.assets import ModelAssets, load_assets

_MAX_WAITING = 256
_BOOT_SECONDS = 60.0
_READ_SECONDS = 20.0
_CHILD_BYTES = 2 << 30  # beyond what its model's assets take
_NICENESS = 5

logger = logging.getLogger(__name__)


@dataclass(order=True)
class _Job:
    """A body that waits for the child; the smallest goes first."""

    num_bytes: int
    number: int
    kind: str = field(compare=False)
    data: bytearray = field(compare=False)
    bounds: Bounds = field(compare=False)
    result: asyncio.Future[ParsedRequest] = field(compare=False)


class Reader:
    """Turn bodies into requests. Use from the event loop only."""

    def __init__(self, config: FrontendConfig, assets: ModelAssets) -> None:
        self._config = config
        self._assets = assets
        self._jobs: list[_Job] = []
        self._num_jobs = 0
        self._work: asyncio.Task[None] | None = None
        self._child: Child | None = None

    async def read(self, kind: str, data: bytearray, bounds: Bounds) -> ParsedRequest:
        """Parse, check and tokenize a body within hurried bounds. The bytes are this object's from then on.

        Raises:
            BlinkError: the request is refused, or too many large ones wait.
        """
        if is_light(data):
            try:
                return read_body(kind, data, self._assets, bounds)
            except HeavyRequestError:
                pass
        if len(self._jobs) >= _MAX_WAITING:
            raise OverloadedError("Too many large requests wait to be read. Retry later.")
        self._num_jobs += 1
        patient, result = replace(bounds, is_hurried=False), asyncio.get_running_loop().create_future()
        job = _Job(len(data), self._num_jobs, kind, data, patient, result)
        heapq.heappush(self._jobs, job)
        if self._work is None:
            self._work = asyncio.create_task(self._work_off())
        return await job.result

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    async def _work_off(self) -> None:
        try:
            while self._jobs:
                job = heapq.heappop(self._jobs)
                if job.result.done():  # its request was cancelled
                    continue
                try:
                    parsed = await self._run(job)
                except Exception as error:
                    failure = error if isinstance(error, BlinkError) else BlinkError("Internal error: a body's reader.")
                    if failure is not error:
                        logger.exception("a body could not be read")
                    if not job.result.done():
                        job.result.set_exception(failure)
                else:
                    if not job.result.done():
                        job.result.set_result(parsed)
        finally:
            self._work = None

    async def _run(self, job: _Job) -> ParsedRequest:
        child = await self._ready_child()
        try:
            await asyncio.wait_for(_ask(child, job), _READ_SECONDS)
            result = pickle.loads(await asyncio.wait_for(child.receive(), _READ_SECONDS))
        except (OSError, EOFError, asyncio.TimeoutError, pickle.UnpicklingError) as error:
            child.kill()
            logger.warning("the reader of a body of %d bytes was stopped: %r", job.num_bytes, error)
            raise BadRequestError("The body takes too much time or memory to read.") from error
        if isinstance(result, Exception):
            raise result
        return result

    async def _ready_child(self) -> Child:
        if self._child is not None and self._child.is_alive:
            return self._child
        try:
            self._child = Child(__name__, niceness=_NICENESS)
            await self._child.send(pickle.dumps(self._config))
            await asyncio.wait_for(self._child.receive(), _BOOT_SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            self.close()
            raise EngineUnavailableError("The process that reads large requests does not start.") from error
        return self._child


async def _ask(child: Child, job: _Job) -> None:
    await child.send(pickle.dumps((job.kind, job.bounds)))
    await child.send(job.data)
    job.data.clear()


def run(parent: Parent) -> None:
    """Answer the parent until it goes (the child's program)."""
    config = parent.take()
    if config is None:
        return
    settings: FrontendConfig = pickle.loads(config)
    set_up_logging(settings.log_level, settings.log_format)
    assets = load_assets(settings)
    limit_data(_CHILD_BYTES)
    parent.send(b"")
    while (head := parent.take()) is not None:
        kind, bounds = pickle.loads(head)
        if (data := parent.take()) is None:
            break
        parent.send(pickle.dumps(_try_to_read(kind, data, assets, bounds)))


def _try_to_read(kind: str, data: bytearray, assets: ModelAssets, bounds: Bounds) -> Any:
    try:
        return read_body(kind, data, assets, bounds)
    except BlinkError as error:
        return error
