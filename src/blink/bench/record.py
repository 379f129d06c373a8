# SPDX-License-Identifier: Apache-2.0
"""What is planned and what is recorded of one request. Plain data, sent between processes."""

from __future__ import annotations

import ssl
from array import array
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["ok", "rejected", "failed"]
RequestClass = Literal["default", "flex"]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when it is sent, and all its bytes."""

    index: int
    at: float  # seconds after the start
    data: bytes  # head and body
    input_len: int
    output_len: int
    request_class: RequestClass = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    timeout: float  # seconds for a whole answer

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return what a connection needs for TLS."""
        return ssl.create_default_context() if self.tls else None


@dataclass(slots=True)
class Record:
    """What happened to one request. Times are seconds after the start of the run."""

    index: int
    at: float
    input_len: int
    output_len: int  # as asked
    request_class: RequestClass = "default"
    sent: float = 0.0
    ended: float = 0.0
    outcome: Outcome = "failed"
    error: str = "not sent"
    input_tokens: int | None = None  # as the server counts
    output_tokens: int | None = None
    times: array[float] = field(default_factory=lambda: array("d"))  # of each event with output


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a client is."""

    num_sent: int
    num_ok: int
    num_bad: int


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What one client process saw."""

    records: list[Record]
    loop_lags: array[float]  # seconds by which its event loop was late, sampled all the time
