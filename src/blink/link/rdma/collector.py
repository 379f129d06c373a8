# SPDX-License-Identifier: Apache-2.0
"""A thread that collects completions by reading windows of the queue; the rules of csrc/rdma/verbs_link.h."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from blink.region.layout import CQE

_MIN_WINDOW, _MAX_WINDOW = 16, 512  # completions of one read
_FASTEST, _SLOWEST = 200e-6, 1e-3  # seconds between two reads while tokens are awaited


class Collector(threading.Thread):
    """Read while completions are expected; keep those that two reads have shown until they are drained."""

    def __init__(
        self,
        read: Callable[[int, np.ndarray[Any, Any]], bool],
        cq_offset: int,
        entries: int,
        head: int,
        event_fd: int,
        interval: float,
    ) -> None:
        super().__init__(name="nixl-collector", daemon=True)
        self._read = read
        self._cq_offset = cq_offset
        self._entries = entries
        self._next = head
        self._event_fd = event_fd
        self._interval = min(max(interval, _FASTEST), _SLOWEST)
        self._landing = np.zeros(_MAX_WINDOW, CQE)
        self._window = _MIN_WINDOW
        self._seen = 0  # entries at `next` that one read has shown
        self._changed = threading.Condition()
        self._ready: list[np.ndarray[Any, Any]] = []
        self._active = self._signalled = self._stopping = False

    def watch(self, active: bool) -> None:
        """Say whether completions are expected at all: without, nothing is read."""
        with self._changed:
            self._signalled = False
            if self._ready:
                self._signal()
            if active and not self._active:
                self._changed.notify()
            self._active = active

    def drain(self, out: np.ndarray[Any, Any]) -> int:
        """Move completions to `out`; return how many."""
        count = 0
        with self._changed:
            while self._ready and count < len(out):
                first = self._ready[0]
                taken = first[: len(out) - count]
                out[count : count + len(taken)] = taken
                count += len(taken)
                self._ready[:1] = [first[len(taken) :]] if len(taken) < len(first) else []
        return count

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        """Read until stopped, or until a read fails."""
        last = time.monotonic()
        while self._await_work():
            found = self.collect()
            if found is None:
                return
            if len(found):
                last = time.monotonic()
                self._keep(found)
            if self._seen == 0:
                self._pause(time.monotonic() - last)

    def collect(self) -> np.ndarray[Any, Any] | None:
        """Read the next entries and return those that two reads have shown; None after a failure.

        A read may fetch an entry's payload before its tag. One that shows a new tag therefore proves only that the
        payload was written before the read ended: the next read, begun after that, brings the payload.
        """
        at = self._next % self._entries
        entries = self._landing[: min(self._window, self._entries - at)]
        if not self._read(self._cq_offset + at * CQE.itemsize, entries):
            return None
        phase = self._next // self._entries + 1 & 1
        is_old = (entries["tag"] & 1) != phase
        seen = int(is_old.argmax()) if is_old.any() else len(entries)
        proved = min(seen, self._seen)
        self._next = self._next + proved & 0xFFFFFFFF
        self._seen = seen - proved
        self._window = min(max(2 * seen, _MIN_WINDOW), _MAX_WINDOW)
        return entries[:proved].copy()

    def _await_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._active)
            return not self._stopping

    def _keep(self, found: np.ndarray[Any, Any]) -> None:
        with self._changed:
            self._ready.append(found)
            if not self._signalled:
                self._signal()

    def _signal(self) -> None:
        self._signalled = True
        os.eventfd_write(self._event_fd, 1)

    def _pause(self, silence: float) -> None:
        """The longer nothing has come, the longer the pause: a sixteenth of that time, within limits."""
        with self._changed:
            if not self._stopping:
                self._changed.wait(min(max(silence / 16, self._interval), _SLOWEST))
