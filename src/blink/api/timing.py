# SPDX-License-Identifier: Apache-2.0
"""Where the time to the first token of a streamed request goes: one log line for each (--enable-log-timings)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from blink.api.reply import Reply
from blink.api.session import Session
from blink.api.stream import EventStream
from blink.text.generation import Generation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request was how far before it was submitted: seconds, time.perf_counter."""

    received: float  # its last byte
    parsed: float  # and checked
    tokenized: float


def start_timed_stream(reply: Reply, session: Session, arrival: Arrival) -> EventStream:
    """Submit a request and return its stream.

    Raises:
        BlinkError: the request is refused.
    """
    stream = _TimedStream(reply, session, arrival)
    session.start(stream)
    stream.submitted = time.perf_counter()
    return stream


class _TimedStream(EventStream):
    """A stream that logs the times of its request when its first token is written.

    Times are nanoseconds of CLOCK_MONOTONIC, which the CPU engine's trace has too; a GPU has a clock of its own.
    """

    def __init__(self, reply: Reply, session: Session, arrival: Arrival) -> None:
        super().__init__(reply, session)
        self._id = reply.id
        self._arrival = arrival
        self.submitted = 0.0
        self._is_logged = False

    def update(self, generations: Sequence[Generation]) -> None:
        """Write what these sequences have gained."""
        collected = time.perf_counter()
        super().update(generations)
        if not self._is_logged:
            self._is_logged = True
            self._log(collected, time.perf_counter())

    def _log(self, collected: float, written: float) -> None:
        arrival = self._arrival
        times = {
            "received": arrival.received,
            "parsed": arrival.parsed,
            "tokenized": arrival.tokenized,
            "submitted": self.submitted,
            "collected": collected,
            "written": written,
        }
        stamps = {name: round(seconds * 1e9) for name, seconds in times.items()}
        logger.info("first token %s", json.dumps({"id": self._id, **stamps}))
