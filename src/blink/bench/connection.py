# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection of the load generator: writes a prepared request, stamps what comes back.

The hot path is `data_received`: one clock reading per read, one count per event, no JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, cast

import httptools

from blink.bench.events import EventReader, error_message
from blink.bench.record import Outcome, PlannedRequest, Record

_MAX_ERROR_BYTES: Final = 4096
_REJECTIONS: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class Exchange:
    """One request and its answer so far."""

    def __init__(self, request: PlannedRequest, start: float, on_end: Callable[[Exchange], None]) -> None:
        self.request = request
        self.record = Record(request.index, request.at, request.input_len, request.output_len, request.request_class)
        self.is_over = False
        self._start = start
        self._on_end = on_end
        self._reader = EventReader()
        self._error_body = b""
        self.record.sent = time.monotonic() - start

    @property
    def has_all_events(self) -> bool:
        """Whether the event that ends a stream has come."""
        return self._reader.is_done

    def take(self, data: bytes, status: int, now: float) -> None:
        """Take a piece of the answer's body that came at `now` (monotonic)."""
        if status == HTTPStatus.OK:
            for _ in range(self._reader.feed(data)):
                self.record.times.append(now - self._start)
        elif len(self._error_body) < _MAX_ERROR_BYTES:
            self._error_body += data

    def complete(self, status: int) -> None:
        """End with the answer's own end."""
        error = self._reader.error()
        if status != HTTPStatus.OK:
            self.end("rejected" if status in _REJECTIONS else "failed", f"HTTP {status}: {self._error_text()}")
        elif error:
            self.end("failed", f"error in the stream: {error}")
        elif not self._reader.is_done or not self.record.times:
            self.end("failed", "the answer is no complete stream of events")
        else:
            self.record.output_tokens = self._reader.completion_tokens()
            self.record.input_tokens = self._reader.prompt_tokens()
            self.end("ok", "")

    def end(self, outcome: Outcome, error: str) -> None:
        """Note how it ended, once."""
        if self.is_over:
            return
        self.is_over = True
        self.record.outcome, self.record.error = outcome, error
        self.record.ended = time.monotonic() - self._start
        self._on_end(self)

    def _error_text(self) -> str:
        try:
            return error_message(json.loads(self._error_body))
        except ValueError:
            return self._error_body[:200].decode(errors="replace")


class Connection(asyncio.Protocol):
    """Carries one exchange after another; says when it is free for the next."""

    def __init__(self, on_free: Callable[[Connection], None]) -> None:
        self._on_free = on_free
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, exchange: Exchange) -> None:
        """Write a request; its answer is the next."""
        assert self._exchange is None
        if self._transport is None:  # it was lost at once
            exchange.end("failed", "connection lost: closed by the server")
            return
        self._exchange = exchange
        self._transport.write(exchange.request.data)

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        if self._exchange is not None and self._exchange.has_all_events:  # an answer that ends with its connection
            self._exchange.complete(self._parser.get_status_code())
        self._fail(f"connection lost: {exc or 'closed by the server'}")

    def on_body(self, data: bytes) -> None:
        """Called by the parser with what is left of a read when the transfer coding is taken off."""
        if self._exchange is not None:
            self._exchange.take(data, self._parser.get_status_code(), self._now)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        exchange, self._exchange = self._exchange, None
        status, stays = self._parser.get_status_code(), self._parser.should_keep_alive()
        if exchange is not None:
            exchange.complete(status)
        self._parser = httptools.HttpResponseParser(self)
        if stays and self.is_open:
            self._on_free(self)
        elif self._transport is not None:
            self._transport.close()

    def _fail(self, text: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end("failed", text)
