# SPDX-License-Identifier: Apache-2.0
"""Says on standard error how far a run is: one line that is written over in a terminal, a line now and then elsewhere.

Without tqdm: an open loop's progress is time and three counts, and frontends' machines do not have it.
"""

from __future__ import annotations

import sys
import time
from typing import Final

from blink.bench.record import Progress

_QUIET_INTERVAL: Final = 10.0  # seconds between lines where they stay


class ProgressLine:
    """The line of one run."""

    def __init__(self, title: str, num_requests: int) -> None:
        self._title = title
        self._num_requests = num_requests
        self._started = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def show(self, progress: Progress) -> None:
        """Show where the run is now."""
        now = time.monotonic()
        if not self._is_terminal and now - self._shown < _QUIET_INTERVAL:
            return
        self._shown = now
        text = f"{self._title}: {progress.num_sent}/{self._num_requests} sent, {progress.num_ok} ok"
        text += f", {progress.num_bad} bad, {now - self._started:.0f} s"
        start, end = ("\r\033[K", "") if self._is_terminal else ("", "\n")
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Write a line that stays."""
    print(f"blink bench: {text}", file=sys.stderr, flush=True)
