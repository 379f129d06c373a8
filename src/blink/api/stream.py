# SPDX-License-Identifier: Apache-2.0
"""The two ways to answer a request: a stream of server-sent events, or one body at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Response
from starlette.types import Receive, Scope, Send

from blink.api.channel import Channel, open_channel, watch_disconnect
from blink.api.chunks import ChunkEncoder
from blink.api.reply import Reply
from blink.api.session import Session
from blink.errors import BlinkError
from blink.text.generation import Generation

_MAX_UNSENT_BYTES = 1 << 20
# Without these, proxies gather the events before they pass them on.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def disconnect_error() -> BlinkError:
    """Return the error of a request whose client has gone; nobody reads it."""
    return BlinkError("The client closed the connection.")


class EventStream(Response):
    """Write a session's output as it comes. Each batch of completions is one write to the transport."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, session: Session) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._encoder = ChunkEncoder(reply, session)
        self._session = session
        self._channel: Channel | None = None
        self._early = b""
        self._done = asyncio.Event()

    def update(self, generations: Sequence[Generation]) -> None:
        """Write what these sequences have gained."""
        self._write(b"".join([self._encoder.encode(generation) for generation in generations]))

    def close(self, error: BlinkError | None) -> None:
        """Write the end."""
        self._write(self._encoder.encode_end(error))
        self._done.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (called by the framework)."""
        channel = open_channel(scope, send)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._channel = channel
            if self._early:
                channel.write(self._early)
            with watch_disconnect(scope, receive, self._abandon):
                await channel.drain(self._done)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._session.fail(disconnect_error(), "abort")

    def _abandon(self) -> None:
        self._channel = None
        self._session.fail(disconnect_error(), "abort")

    def _write(self, data: bytes) -> None:
        if self._channel is None:  # the response has not started, or the client has gone
            self._early += data
        elif self._channel.write(data) > _MAX_UNSENT_BYTES:
            # A client that does not read must not fill this worker's memory.
            channel, self._channel = self._channel, None
            channel.abort()
            self._session.fail(disconnect_error(), "abort")


class WholeResult:
    """Wait for the end of a session."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def update(self, generations: Sequence[Generation]) -> None:
        """Leave the output with the sequences: it is taken at the end."""

    def close(self, error: BlinkError | None) -> None:
        """Wake the request's task."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def wait(self, session: Session, scope: Scope, receive: Receive) -> None:
        """Return when all sequences have ended.

        Raises:
            BlinkError: the request failed or its client has gone.
        """
        try:
            with watch_disconnect(scope, receive, lambda: session.fail(disconnect_error(), "abort")):
                await self._ended
        finally:
            session.fail(disconnect_error(), "abort")
