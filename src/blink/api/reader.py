# SPDX-License-Identifier: Apache-2.0
"""Reads bodies: light ones at once, others in a child process, so that no body keeps the event loop waiting.

The child starts with the first such body, has a deadline for each, and is replaced when it dies.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import IO, Any

from blink.api.reading import Bounds, Read, is_light, read_body, without_texts
from blink.config import FrontendConfig
from blink.errors import BadRequestError, BlinkError, EngineUnavailableError, OverloadedError
from blink.host.logs import set_up_logging
from blink.text.assets import ModelAssets, load_assets

_SMALL_BYTES = 2 << 10  # of a body that may live as long as its request
_MAX_WAITING = 256
_BOOT_SECONDS = 60.0
_READ_SECONDS = 20.0
_CHILD_BYTES = 2 << 30  # beyond what its model's assets take
_NICENESS = 5
_LENGTH = struct.Struct("<Q")

logger = logging.getLogger(__name__)


@dataclass(order=True)
class _Job:
    """A body that waits for the child; the smallest goes first."""

    num_bytes: int
    number: int
    kind: str = field(compare=False)
    data: bytearray = field(compare=False)
    bounds: Bounds = field(compare=False)
    result: asyncio.Future[Read] = field(compare=False)


class Reader:
    """Turn bodies into requests. Use from the event loop only."""

    def __init__(self, config: FrontendConfig, assets: ModelAssets) -> None:
        self._config = config
        self._assets = assets
        self._jobs: list[_Job] = []
        self._num_jobs = 0
        self._work: asyncio.Task[None] | None = None
        self._child: _Child | None = None

    async def read(self, kind: str, data: bytearray, bounds: Bounds) -> Read:
        """Parse, check and tokenize a body. The bytes are this object's from then on.

        Raises:
            BlinkError: the request is refused, or too many large ones wait.
        """
        if is_light(data):
            read = read_body(kind, data, self._assets, bounds)
            return read if len(data) <= _SMALL_BYTES else without_texts(read)
        if len(self._jobs) >= _MAX_WAITING:
            raise OverloadedError("Too many large requests wait to be read. Retry later.")
        self._num_jobs += 1
        job = _Job(len(data), self._num_jobs, kind, data, bounds, asyncio.get_running_loop().create_future())
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
                    read = await asyncio.to_thread(self._run, job)
                except Exception as error:
                    failure = error if isinstance(error, BlinkError) else BlinkError("Internal error: a body's reader.")
                    if failure is not error:
                        logger.exception("a body could not be read")
                    if not job.result.done():
                        job.result.set_exception(failure)
                else:
                    if not job.result.done():
                        job.result.set_result(read)
        finally:
            self._work = None

    def _run(self, job: _Job) -> Read:
        if self._child is None or not self._child.is_alive:
            self._child = _Child(self._config)
        try:
            return self._child.read(job.kind, job.data, job.bounds)
        except (OSError, EOFError, TimeoutError, pickle.UnpicklingError) as error:
            self._child.kill()
            logger.warning("the reader of a body of %d bytes was stopped: %s", job.num_bytes, error or "it died")
            raise BadRequestError("The body takes too much time or memory to read.") from error


class _Child:
    """The process that reads, and the pipes to it. Blocks: for use from a thread."""

    def __init__(self, config: FrontendConfig) -> None:
        command = [sys.executable, "-m", "blink.api.reader"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        try:
            _send(self._to, pickle.dumps(config))
            self._receive(_BOOT_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self.kill()
            raise EngineUnavailableError("The process that reads large requests does not start.") from error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def read(self, kind: str, data: bytearray, bounds: Bounds) -> Read:
        _send(self._to, pickle.dumps((kind, bounds)))
        _send(self._to, data)
        data.clear()
        result = pickle.loads(self._receive(_READ_SECONDS))
        if isinstance(result, Exception):
            raise result
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()

    def _receive(self, seconds: float) -> bytearray:
        deadline = time.monotonic() + seconds
        (length,) = _LENGTH.unpack(self._receive_bytes(_LENGTH.size, deadline))
        return self._receive_bytes(length, deadline)

    def _receive_bytes(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view, have = memoryview(data), 0
        while have < count:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("its time was over")
            part = self._from.readinto(view[have:])  # pyright: ignore[reportAttributeAccessIssue]  (a raw file)
            if not part:
                raise EOFError
            have += part
        return data


def _send(file: IO[bytes], data: bytes | bytearray) -> None:
    for part in (_LENGTH.pack(len(data)), data):
        with memoryview(part) as view:
            sent = 0
            while sent < len(view):
                sent += file.write(view[sent:])


def _take(file: IO[bytes]) -> bytearray | None:
    """Return the next message from the parent; None when it has gone."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        part = file.readinto(view[have:])  # pyright: ignore[reportAttributeAccessIssue]  (a raw file)
        if not part:
            return None
        have += part
    return data


def run_child() -> int:
    """Answer the parent until it goes (the child's program)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent finishes open requests first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The event loop runs before this process, also where both have one core and it has a real-time class.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(_NICENESS)
    with open(0, "rb", buffering=0) as source, open(1, "wb", buffering=0) as sink:
        config = _take(source)
        if config is None:
            return 0
        settings: FrontendConfig = pickle.loads(config)
        set_up_logging(settings.log_level, settings.log_format)
        assets = load_assets(settings)
        _limit_memory()
        _send(sink, b"")
        while (head := _take(source)) is not None:
            kind, bounds = pickle.loads(head)
            if (data := _take(source)) is None:
                break
            _send(sink, pickle.dumps(_try_to_read(kind, data, assets, bounds)))
    return 0


def _try_to_read(kind: str, data: bytearray, assets: ModelAssets, bounds: Bounds) -> Any:
    try:
        return without_texts(read_body(kind, data, assets, bounds))
    except BlinkError as error:
        return error


def _limit_memory() -> None:
    """Let no body take more memory than a fixed amount: beyond it this process fails alone."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    limit = used + _CHILD_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    sys.exit(run_child())
