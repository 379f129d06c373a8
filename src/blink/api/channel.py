# SPDX-License-Identifier: Apache-2.0
"""Where a streamed body goes: straight to the connection's transport, or through ASGI when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.types import Receive, Scope, Send

from blink.api.http1 import EXTENSION, Exchange


class Channel(Protocol):
    """The body of one streamed response."""

    def write(self, data: bytes) -> int:
        """Write without waiting; return the bytes that the client has not taken yet."""
        ...

    def abort(self) -> None:
        """Throw away what the client has not taken."""
        ...

    async def drain(self, done: asyncio.Event) -> None:
        """Return when `done` is set and everything written is on its way."""
        ...


class AsgiChannel:
    """Pass the body on as ASGI messages."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting = bytearray()
        self._wake = asyncio.Event()

    def write(self, data: bytes) -> int:
        """Keep the data for the task that sends it."""
        self._waiting += data
        self._wake.set()
        return len(self._waiting)

    def abort(self) -> None:
        """Forget what was not sent."""
        self._waiting.clear()

    async def drain(self, done: asyncio.Event) -> None:
        """Send whatever comes until the end."""
        waiter = asyncio.ensure_future(done.wait())
        waiter.add_done_callback(lambda _: self._wake.set())
        try:
            while self._waiting or not done.is_set():
                await self._wake.wait()
                self._wake.clear()
                data, self._waiting = bytes(self._waiting), bytearray()
                if data:
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            waiter.cancel()


class DirectChannel:
    """Write to the transport from the poller itself."""

    def __init__(self, exchange: Exchange) -> None:
        self.write = exchange.write
        self.abort = exchange.abort

    async def drain(self, done: asyncio.Event) -> None:
        """Wait for the end; the poller does the work."""
        await done.wait()


def open_channel(scope: Scope, send: Send) -> Channel:
    """Return the best channel for a response; call before it starts."""
    exchange = _exchange_of(scope)
    if exchange is None:
        return AsgiChannel(send)
    exchange.prepare_stream()
    return DirectChannel(exchange)


@contextmanager
def watch_disconnect(scope: Scope, receive: Receive, callback: Callable[[], None]) -> Iterator[None]:
    """Call back once if the client goes away inside the block. The request's body must have been read."""
    exchange = _exchange_of(scope)
    if exchange is not None:
        end_watch = exchange.watch(callback)
        try:
            yield
        finally:
            end_watch()
        return
    task = asyncio.ensure_future(_await_disconnect(receive, callback))
    try:
        yield
    finally:
        task.cancel()


def _exchange_of(scope: Scope) -> Exchange | None:
    return scope.get("extensions", {}).get(EXTENSION)


async def _await_disconnect(receive: Receive, callback: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    callback()
