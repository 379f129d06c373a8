# SPDX-License-Identifier: Apache-2.0
"""The gaps between an engine's steps by its own clock, from the trace ring: no host program is in them."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np

from blink.region.report import RegionReport, only_region

_LOOK_SECONDS: Final = 0.1  # the ring holds thousands of steps


def step_gaps(steps: np.ndarray) -> np.ndarray:
    """Return ms from the end of each step with decoding rows to the next such end (dtype layout.TRACE_ENTRY).

    steps: ascending. A pair counts if its steps follow each other, both have decoding rows, and the engine was not
    idle between them.
    """
    ended = steps["ended_ns"].astype(np.int64)
    follows = (np.diff(steps["step"].astype(np.int64)) == 1) & (steps["idle_before"][1:] == 0)
    decodes = (steps["num_decode_rows"] > 0) & (ended > 0)
    return (np.diff(ended) / 1e6)[follows & decodes[1:] & decodes[:-1]]


class StepWatch(threading.Thread):
    """Collects the steps of an engine of this machine from its creation to `finish`."""

    def __init__(self, region: str) -> None:
        super().__init__(daemon=True)
        self._report = RegionReport(region or only_region())
        self._is_over = threading.Event()
        begin = self._report.trace()
        self._first = int(begin["step"][-1]) if len(begin) else 0
        self._steps: dict[int, Any] = {}
        self._dtype = begin.dtype
        self.start()

    def run(self) -> None:
        """Look at the ring often enough that none is missed."""
        while not self._is_over.wait(_LOOK_SECONDS):
            self._look()

    def finish(self) -> tuple[np.ndarray, int]:
        """Return the steps, ascending, and how many were missed."""
        self._is_over.set()
        self.join()
        self._look()
        self._report.close()
        steps = np.array([self._steps[number] for number in sorted(self._steps)], self._dtype)
        return steps, int(steps["step"][-1]) - self._first - len(steps) if len(steps) else 0

    def _look(self) -> None:
        entries = self._report.trace()
        known = max(self._first, max(self._steps, default=0) - 1)  # the last one may have ended since
        self._steps |= {int(entry["step"]): entry for entry in entries[entries["step"] > known]}
