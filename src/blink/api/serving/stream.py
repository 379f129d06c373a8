# SPDX-License-Identifier: Apache-2.0
"""The two ways to answer a request: a stream of server-sent events, or one body at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from typing import Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from blink.api.http.http1 import ResponseWriter, writer_of
from blink.api.serving.session import Session
from blink.errors import BlinkError, ClientGoneError
from blink.text.generation import Generation

EVENTS = "text/event-stream"
_MAX_UNSENT_BYTES = 1 << 20
# Without these, proxies gather the events before they pass them on.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Encoder(Protocol):
    """Who turns a session's output into the bytes of a stream."""

    def encode(self, generation: Generation) -> bytes:
        """Return what a sequence has gained."""
        ...

    def encode_end(self, error: BlinkError | None) -> bytes:
        """Return the last bytes of the stream."""
        ...


class NonStreamingBody(Protocol):
    """Who gathers a session's output for one body."""

    def take(self, generation: Generation) -> object:
        """Learn that a sequence has grown."""
        ...

    def encode(self) -> bytes:
        """Return the body when all sequences have ended."""
        ...


@cache
def _headers_of(media_type: str) -> list[tuple[bytes, bytes]]:
    response = Response(headers=_HEADERS, media_type=media_type)
    del response.headers["content-length"]
    return response.raw_headers


class EventStream(Response):
    """Write a session's output as it comes. Each batch of completions is one write to the transport."""

    def __init__(self, encoder: Encoder, session: Session, media_type: str = EVENTS) -> None:
        self.status_code, self.raw_headers = int(HTTPStatus.OK), [*_headers_of(media_type)]
        self._encoder = encoder
        self._session = session
        self._writer: ResponseWriter | None = None
        self._early = b""
        self._done = asyncio.Event()

    def update(self, generations: Sequence[Generation]) -> None:
        """Write what these sequences have gained."""
        data = b"".join([self._encoder.encode(generation) for generation in generations])
        if data:  # what is held back makes none; an empty chunk would end the body
            self._write(data)

    def close(self, error: BlinkError | None) -> None:
        """Write the end."""
        self._write(self._encoder.encode_end(error))
        self._done.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (called by the framework)."""
        del receive  # the body has been read
        writer = writer_of(scope)
        writer.prepare_stream()
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._writer = writer
            if self._early:
                writer.write(self._early)
            with writer.on_disconnect(self._abandon):
                await self._done.wait()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._session.fail(ClientGoneError(), "abort")

    def _abandon(self) -> None:
        self._writer = None
        self._session.fail(ClientGoneError(), "abort")

    def _write(self, data: bytes) -> None:
        if self._writer is None:  # the response has not started, or the client has gone
            self._early += data
        elif self._writer.write(data) > _MAX_UNSENT_BYTES:
            # A client that does not read must not fill this worker's memory.
            writer, self._writer = self._writer, None
            writer.abort()
            self._session.fail(ClientGoneError(), "abort")


class NonStreamingResult:
    """Wait for the end of a session."""

    def __init__(self, body: NonStreamingBody) -> None:
        self.body = body
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def update(self, generations: Sequence[Generation]) -> None:
        """Let the body take what these sequences have gained."""
        for generation in generations:
            self.body.take(generation)

    def close(self, error: BlinkError | None) -> None:
        """Wake the request's task."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def wait(self, session: Session, scope: Scope) -> None:
        """Return when all sequences have ended.

        Raises:
            BlinkError: the request failed or its client has gone.
        """
        try:
            with writer_of(scope).on_disconnect(lambda: session.fail(ClientGoneError(), "abort")):
                await self._ended
        finally:
            session.fail(ClientGoneError(), "abort")
