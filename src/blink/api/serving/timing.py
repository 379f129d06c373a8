# SPDX-License-Identifier: Apache-2.0
"""Where the time to the first token of a streamed request goes: one log line for each (--enable-log-timings)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

from blink.api.serving.session import Session
from blink.api.serving.stream import Encoder, EventStream
from blink.text.generation import Generation

logger = logging.getLogger(__name__)


class TimedStream(EventStream):
    """A stream that logs the times of its request when its first token is written.

    Times are nanoseconds of CLOCK_MONOTONIC, which the CPU engine's trace has too; a GPU has a clock of its own.
    """

    def __init__(
        self, stamps: dict[str, float], reply_id: str, encoder: Encoder, session: Session, media_type: str
    ) -> None:
        """Go on from the stamps (seconds, time.perf_counter) that the request has until now."""
        super().__init__(encoder, session, media_type)
        self._stamps: dict[str, float] | None = stamps
        self._id = reply_id

    def update(self, generations: Sequence[Generation]) -> None:
        """Write what these sequences have gained."""
        collected = time.perf_counter()
        super().update(generations)
        stamps, self._stamps = self._stamps, None
        if stamps is not None:
            stamps |= {"collected": collected, "written": time.perf_counter()}
            times = {name: round(seconds * 1e9) for name, seconds in stamps.items()}
            logger.info("first token %s", json.dumps({"id": self._id, **times}))
