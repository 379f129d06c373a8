# SPDX-License-Identifier: Apache-2.0
"""The power and the clock of one GPU while something runs, by NVML."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from blink.host.nvml import Gpu

SAMPLES_PER_SECOND = 10


class Gauge:
    """Watts, by the energy counter, and the median clock of the SMs.

    Raises:
        BlinkError: NVML or the GPU is not there.
    """

    def __init__(self, index: int = 0) -> None:
        self._gpu = Gpu(index)
        self.name = self._gpu.name

    def measure(self, seconds: float) -> dict[str, float]:
        """Return `watts` and `sm_mhz` of so many seconds."""
        with self.watch() as found:
            time.sleep(seconds)
        return found

    @contextmanager
    def watch(self) -> Iterator[dict[str, float]]:
        """Sample until the end of the block; `watts` and `sm_mhz` are in the dictionary then."""
        found: dict[str, float] = {}
        clocks: list[int] = []
        ended = threading.Event()

        def sample() -> None:
            while True:
                clocks.append(self._gpu.read_sm_mhz())
                if ended.wait(1 / SAMPLES_PER_SECOND):
                    return

        energy, start = self._gpu.read_joules(), time.monotonic()
        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()
            found["watts"] = (self._gpu.read_joules() - energy) / (time.monotonic() - start)
            found["sm_mhz"] = statistics.median(clocks)
