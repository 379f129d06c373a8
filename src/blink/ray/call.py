# SPDX-License-Identifier: Apache-2.0
"""What ingress and replicas say to each other: a request of HTTP, and the head of its answer, before its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from blink.api.http.errors import error_json
from blink.errors import EngineUnavailableError

Headers = list[tuple[bytes, bytes]]

EVENT_STREAM = b"text/event-stream"
# They concern one connection (RFC 9110, 7.6.1), or are made anew for the next one.
_OF_A_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
_OF_A_CONNECTION |= {b"upgrade", b"host", b"content-length", b"expect", b"date", b"server"}


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a replica's frontend."""

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes = b""
    points: tuple[bytes, ...] = ()  # of its prompt: blink.ray.prefix
    avoided: frozenset[str] = frozenset()  # replicas that others are preferred to


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a replica's answer."""

    replica: str
    status: int
    headers: Headers

    @property
    def is_stream(self) -> bool:
        """Whether server-sent events follow."""
        return any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in self.headers)


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that go on to the next connection, names in lower case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _OF_A_CONNECTION]


def unavailable_json(message: str) -> bytes:
    """Return the error of a request that no engine can answer now."""
    return error_json(message, EngineUnavailableError.type, HTTPStatus.SERVICE_UNAVAILABLE)


def broken_end(call: Call, message: str) -> bytes:
    """Return the last events of a stream whose replica was lost."""
    event = b"data: %b\n\n" % unavailable_json(message)
    if call.target.startswith("/v1/responses"):
        return b"event: error\n" + event
    return event + b"data: [DONE]\n\n"
