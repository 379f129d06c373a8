# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a thread of its own, which leaves as the resident kernel of a GPU does."""

from __future__ import annotations

import threading
import time

from blink.region.layout import StepResult
from harness import Harness, Inbox


class Resident:
    """Runs a harness's scheduler until it is to leave, or the test ends it."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.inbox, self.starts = harness, Inbox(), 0
        self._thread = threading.Thread()
        self._ends = False

    def start(self) -> None:
        """Start it."""
        self.starts += 1
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def has_ended(self) -> bool:
        """Whether it has left."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Stop it, so that the test may take the steps."""
        self._ends = True
        self._thread.join()

    def _run(self) -> None:
        while not self._ends and self.harness.step() != StepResult.AWAY:
            time.sleep(0.0005)
