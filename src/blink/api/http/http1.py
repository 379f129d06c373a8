# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP/1.1 protocol, opened up: a response may write its body straight to the transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "blink.response_writer"
_MAX_HEAD_BYTES = 64 << 10  # of a head, of trailers, of a chunk's extensions
_SLICE_BYTES = 4 << 10  # parsed at once: what a client pipelines is looked at between two of them
_MAX_UNPARSED_BYTES = 64 << 10  # behind a request that is being answered; then its connection is read no further
_MIN_BODY_RATE = 16 << 10  # bytes per second, beyond the time that every body has
_CLOSE_SECONDS = 1.0
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one worker bears of its connections."""

    max_connections: int
    body_timeout: float


class StreamingProtocol(HttpToolsProtocol):
    """Give each request its ResponseWriter; tell all of a connection's requests when the client goes away.

    Requests of one connection are taken one after the other; a body has a deadline.
    """

    limits = ConnectionLimits(max_connections=1 << 20, body_timeout=30.0)  # of a worker: see limited_protocol()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = bytearray()
        self._is_parsing = False
        self._body_timer: asyncio.TimerHandle | None = None
        self._body_started = 0.0
        self._body_bytes = 0
        self._awaits_head = self._awaits_body = False
        self.leave_callbacks: set[Callable[[], None]] = set()
        self._newest: ResponseWriter | None = None  # of the last request whose head has come
        self._quiet_bytes = 0  # since the last head or part of a body
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for a request, but not for ever: uvicorn's own limit begins with the first response."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
            self._abort_when_sent()
            return
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        """Parse, but no further than the request behind the one that is being answered."""
        if self.transport.is_closing():
            return
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        if self._is_parsing:  # the parser called back
            return
        self._is_parsing = True
        try:
            done = 0
            while done < len(self._unparsed) and not self.pipeline and not self.transport.is_closing():
                part = bytes(self._unparsed[done : done + _SLICE_BYTES])
                done += len(part)
                self._parse_slice(part)
            del self._unparsed[:done]
        finally:
            self._is_parsing = False
        self._limit_rest()
        if len(self._unparsed) > _MAX_UNPARSED_BYTES:
            self.flow.pause_reading()

    def _parse_slice(self, part: bytes) -> None:
        self._quiet_bytes += len(part)
        super().data_received(part)
        if self._quiet_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request headers are too large.")

    def _limit_rest(self) -> None:
        """Give what has not come of a request its time; most requests come whole and need no timer."""
        if self._awaits_head:
            self._limit_head()
        elif self._awaits_body and self._body_timer is None:
            self._body_timer = self.loop.call_later(self.limits.body_timeout, self._check_body)

    def on_message_begin(self) -> None:
        """Await the request's head."""
        self._awaits_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Put the writer into the request's scope before its task runs."""
        super().on_headers_complete()
        self._quiet_bytes = 0
        self._cancel_head_timer()
        self._body_started, self._body_bytes = self.loop.time(), 0
        self._cancel_body_timer()
        self._awaits_head, self._awaits_body = False, True
        scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
        self._newest = ResponseWriter(self, self.cycle)
        scope["extensions"] = {_EXTENSION: self._newest}
        if self.pipeline:
            # uvicorn stops reading behind a pipelined request; the end of the connection would go unnoticed.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Count what comes."""
        self._quiet_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Let the body have taken its time."""
        if self._newest is not None:
            self._newest.received = time.perf_counter()
        self._quiet_bytes = 0
        self._awaits_body = False
        self._cancel_body_timer()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that runs, which need not be the last one received."""
        super().connection_lost(exc)
        self._cancel_head_timer()
        self._cancel_body_timer()
        self.pipeline.clear()
        self._unparsed.clear()
        leave_callbacks, self.leave_callbacks = self.leave_callbacks, set()
        for call_back in leave_callbacks:
            call_back()

    def shutdown(self) -> None:
        """Close an idle connection, let a busy one finish."""
        super().shutdown()
        self._abort_when_sent()

    def on_response_complete(self) -> None:
        """Go on with the next request, or see the connection closed."""
        if self.pipeline:
            self._body_started = self.loop.time()  # of the next one, which could not be read before
        super().on_response_complete()
        self._abort_when_sent()
        if self._unparsed:
            self.loop.call_soon(self._parse_more)

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP, but never in the middle of another response."""
        answering = self.cycle and self.cycle.response_started and not self.cycle.response_complete
        if answering or self.pipeline:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _parse_more(self) -> None:
        if self.parser is not None and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._parse()

    def _check_body(self) -> None:
        """End a request whose body is late; one that waits for its turn or for this worker has not had its time."""
        self._body_timer = None
        if self.transport.is_closing():
            return
        if self.pipeline or self.flow.read_paused:
            self._body_started = self.loop.time()
        late = self.loop.time() - self._body_started - self.limits.body_timeout - self._body_bytes / _MIN_BODY_RATE
        if late < 0:
            self._body_timer = self.loop.call_later(max(-late, _CLOSE_SECONDS), self._check_body)
            return
        if not self.cycle.response_started:
            self.transport.write(_TOO_LATE)
        self.transport.close()
        self._abort_when_sent()

    def _cancel_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

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


def limited_protocol(limits: ConnectionLimits) -> type[StreamingProtocol]:
    """Return the protocol with a worker's limits."""
    return type("LimitedProtocol", (StreamingProtocol,), {"limits": limits})


class ResponseWriter:
    """The body of one response, written straight to its connection; and the news that its client has gone."""

    __slots__ = ("_cycle", "_protocol", "received")

    def __init__(self, protocol: StreamingProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.received = 0.0  # when the request's last byte had come; seconds, time.perf_counter

    def take_body(self, most: int) -> bytearray | None:
        """Return the request's body if it is there as a whole, and small; else it must be received."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or len(cycle.body) > most:
            return None
        body, cycle.body = cycle.body, bytearray()
        return bytearray(body)

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


def find_writer(scope: Scope) -> ResponseWriter | None:
    """Return the writer of a request's response; none under another server."""
    return scope.get("extensions", {}).get(_EXTENSION)


def writer_of(scope: Scope) -> ResponseWriter:
    """Return the writer of a request's response."""
    return scope["extensions"][_EXTENSION]
