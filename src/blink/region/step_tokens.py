# SPDX-License-Identifier: Apache-2.0
"""How many tokens steps have: the engine's host process counts them from the trace ring, off the scheduler's path.

A stopped engine process stops no request. Steps that have left the ring when it goes on are not counted.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from blink.region.memory import Region

BOUNDS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens, as vLLM's
# The names of the values among an engine's statistics: steps in each bucket, above the last one, and all tokens.
STATS: Final = tuple(f"step_tokens_{place}" for place in range(len(BOUNDS) + 2))
_INTERVAL: Final = 0.5  # seconds; the ring holds 4,096 launches


class StepTokens:
    """Write the histogram of a region's steps into its control block."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._last = 0  # the newest launch that is counted
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Count the steps since the last look, twice a second; call it now and then, with the time in seconds."""
        if now < self._next_look:
            return
        self._next_look = now + _INTERVAL
        ring = self._region.trace()
        newest = int(ring["step"].max())
        steps = np.arange(self._last + 1, newest + 1)[-len(ring) :]
        entries = ring[steps % len(ring)]
        # What is being written, or was while it was read, is left out.
        whole = (entries["step"] == steps) & (steps > int(ring["step"].max()) + 2 - len(ring))
        whole &= (steps < newest) | (entries["ended_ns"] != 0)
        if whole.any():
            self._last = int(steps[whole].max())
            self._count(entries["num_tokens"][whole & (entries["segment"] == 0)])

    def _count(self, tokens: Any) -> None:
        counts = self._region.control["step_tokens"]
        counts[:-1] += np.bincount(np.searchsorted(BOUNDS, tokens), minlength=len(BOUNDS) + 1).astype(counts.dtype)
        counts[-1] += int(tokens.sum())
