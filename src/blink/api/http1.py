# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP/1.1 protocol, opened up: a response may write its body straight to the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "blink.response_writer"
_MAX_HEAD_BYTES = 64 << 10
_MAX_PIPELINED = 16
_CLOSE_SECONDS = 1.0


class StreamingProtocol(HttpToolsProtocol):
    """Give each request its ResponseWriter; tell all of a connection's requests when the client goes away."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.leave_callbacks: set[Callable[[], None]] = set()
        self._head_bytes = 0
        self._reads_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for a request, but not for ever: uvicorn's own limit begins with the first response."""
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        """Parse, but let no request line and headers grow without end."""
        if self._reads_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._reads_head and self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request headers are too large.")

    def on_message_begin(self) -> None:
        """Start to count the bytes of the request's head."""
        self._reads_head = True
        self._limit_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Put the writer into the request's scope before its task runs."""
        super().on_headers_complete()
        self._reads_head, self._head_bytes = False, 0
        self._cancel_head_timer()
        scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
        scope["extensions"] = {_EXTENSION: ResponseWriter(self, self.cycle)}
        if self.pipeline and len(self.pipeline) < _MAX_PIPELINED:
            # uvicorn stops reading behind a pipelined request; the end of the connection would go unnoticed.
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that runs, which need not be the last one received."""
        super().connection_lost(exc)
        self._cancel_head_timer()
        self.pipeline.clear()
        leave_callbacks, self.leave_callbacks = self.leave_callbacks, set()
        for call_back in leave_callbacks:
            call_back()

    def shutdown(self) -> None:
        """Close an idle connection, let a busy one finish."""
        super().shutdown()
        self._abort_when_sent()

    def on_response_complete(self) -> None:
        """Go on with the next request, or see the connection closed."""
        super().on_response_complete()
        self._abort_when_sent()

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP, but never in the middle of another response."""
        answering = self.cycle and self.cycle.response_started and not self.cycle.response_complete
        if answering or self.pipeline:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _limit_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        # While a response is on its way, the end of that response decides.
        answering = self.cycle and not self.cycle.response_complete
        if not answering:
            self.transport.close()

    def _abort_when_sent(self) -> None:
        # A TLS connection that closes waits for its client's goodbye, half a minute long: do not.
        if not self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self.loop.call_later(_CLOSE_SECONDS, self._abort_when_sent)
        else:
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)


class ResponseWriter:
    """The body of one response, written straight to its connection; and the news that its client has gone."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: StreamingProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def prepare_stream(self) -> None:
        """Choose the framing of a body of unknown length; call before the response starts."""
        if self._cycle.scope["http_version"] != "1.1":
            # HTTP/1.0 knows no chunks: the end of the connection ends the body.
            self._cycle.chunked_encoding = False

    def write(self, data: bytes) -> int:
        """Write a part of the body; return the bytes that the client has not taken yet."""
        transport = self._cycle.transport
        if transport.is_closing():
            return 0
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._cycle.chunked_encoding else data)
        return transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection and throw away what was not sent."""
        self._cycle.transport.abort()

    @contextmanager
    def on_disconnect(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call back once if the client goes away inside the block. The request's body must have been read."""
        if self._cycle.transport.is_closing():
            callback()
        elif not self._protocol.pipeline:
            # A large body leaves reading paused, and so the end of the connection unnoticed.
            self._protocol.flow.resume_reading()
        self._protocol.leave_callbacks.add(callback)
        try:
            yield
        finally:
            self._protocol.leave_callbacks.discard(callback)


def writer_of(scope: Scope) -> ResponseWriter:
    """Return the writer of a request's response."""
    return scope["extensions"][_EXTENSION]
