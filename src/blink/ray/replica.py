# SPDX-License-Identifier: Apache-2.0
"""A replica: `blink serve` as a child process on a Unix socket, and the way of requests to it.

The child keeps engine and frontend alive; Serve replaces the replica only when the child gives up. No torch here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import IO

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from yarl import URL

from blink.cli.supervision import describe_exit
from blink.errors import LOST_REQUEST
from blink.ray.call import Call, Head, broken_end, forwarded, unavailable_json
from blink.view.samples import Samples

_BOOT_LOOK_SECONDS = 0.1
_PROBE_SECONDS = 5.0
_LAST_LINES = 5
_STOP_SECONDS = 60.0
_LOST = f"{LOST_REQUEST}: the frontend ended."


class Replica:
    """An engine with its frontend."""

    async def __init__(self, command: list[str]) -> None:  # pyright: ignore[reportGeneralTypeIssues]  # Serve awaits it
        """Start `blink COMMAND` and wait until it serves.

        Raises:
            RuntimeError: it ended; the message is what it said last.
        """
        self._name = serve.get_replica_context().replica_id.unique_id
        self._folder = tempfile.mkdtemp(prefix="blink-ray-")
        socket = f"{self._folder}/http"
        self._child = subprocess.Popen(
            [sys.executable, "-m", "blink.ray.child", str(os.getpid()), self._folder, *command, f"--uds={socket}"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._child.stderr is not None
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        threading.Thread(target=self._pass_on, args=(self._child.stderr,), daemon=True).start()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket, limit=0),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
        )
        while not await self._is_ready():
            self._check_child()
            await asyncio.sleep(_BOOT_LOOK_SECONDS)

    async def send(self, call: Call) -> AsyncIterator[Head | bytes]:
        """Pass a request to the frontend; yield the head of its answer, then its bytes as they come."""
        head: Head | None = None
        try:
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in call.headers]
            async with self._http.request(
                call.method, _url(call.target), data=call.body or None, headers=headers, allow_redirects=False
            ) as response:
                head = Head(self._name, response.status, forwarded(response.raw_headers))
                yield head
                async for data in response.content.iter_any():
                    yield data
        except aiohttp.ClientError as error:
            if head is None:
                yield Head(self._name, HTTPStatus.SERVICE_UNAVAILABLE, [(b"content-type", b"application/json")])
                yield unavailable_json("Not available: the frontend has not started." if _is_refusal(error) else _LOST)
            elif head.is_stream:
                yield broken_end(call, _LOST)
            else:
                raise

    async def check_health(self) -> None:
        """Tell Serve whether the child lives; an engine that starts again is no reason to replace all.

        Raises:
            RuntimeError: it ended.
        """
        self._check_child()

    async def record_routing_stats(self) -> dict[str, float | bool]:
        """Return what the router decides by."""
        samples = await self._samples()
        return {
            "is_ready": samples.value("blink:engine_up") == 1,
            "load": samples.value("vllm:num_requests_running") + samples.value("vllm:num_requests_waiting"),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy decides by."""
        samples = await self._samples()
        return {name: samples.value(f"vllm:num_requests_{name}") for name in ("running", "waiting")}

    async def __del__(self) -> None:
        """Stop the child in order; Serve calls this when the last request has ended."""
        self._child.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._await_end)
        await self._http.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _await_end(self) -> None:
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _pass_on(self, stream: IO[bytes]) -> None:
        """Write what the child says to the replica's log, and keep the last of it."""
        for line in stream:
            self._said.append(line.decode(errors="replace").rstrip())
            sys.stderr.buffer.write(line)
            sys.stderr.flush()

    def _check_child(self) -> None:
        status = self._child.poll()
        if status is not None:
            raise RuntimeError(f"blink serve {describe_exit(status)}: " + " | ".join(self._said))

    async def _is_ready(self) -> bool:
        try:
            async with self._http.get(_url("/health"), timeout=aiohttp.ClientTimeout(_PROBE_SECONDS)) as response:
                return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _samples(self) -> Samples:
        """Read the frontend's metrics: nothing where it is away."""
        try:
            async with self._http.get(_url("/metrics"), timeout=aiohttp.ClientTimeout(_PROBE_SECONDS)) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            text = ""
        return Samples(text_string_to_metric_families(text), time.monotonic())


def _url(target: str) -> URL:
    return URL(f"http://replica{target}", encoded=True)


def _is_refusal(error: aiohttp.ClientError) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError)
