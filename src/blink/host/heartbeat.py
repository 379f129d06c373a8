# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of a child process: its event loop counts an eventfd up, which its supervisor reads."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from blink.host.process import Hindrance

if TYPE_CHECKING:
    import asyncio

VARIABLE = "BLINK_HEARTBEAT_FD"  # tells a child the descriptor that it inherits
_BEAT_SECONDS = 0.25
_LONGEST_LOOK = 1.0  # seconds between two looks that count
_NOTHING = Hindrance()


def start_beating(loop: asyncio.AbstractEventLoop) -> None:
    """Give signs of life for as long as the event loop turns, if a supervisor asked for them."""
    fd = os.environ.pop(VARIABLE, "")
    if fd:
        os.set_inheritable(int(fd), False)  # this process's children do not beat for it
        _beat(loop, int(fd))


def _beat(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # the counter is full
        os.eventfd_write(fd, 1)
    loop.call_later(_BEAT_SECONDS, _beat, loop, fd)


class Pulse:
    """The supervisor's end: whether a child has beaten since the last look."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def take(self) -> bool:
        """Say whether there were beats since the last call."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False


class HeartbeatAge:
    """Seconds since a process's last heartbeat, for a heartbeat timeout; a pause of all processes does not count.

    Nor does the time in which the process waited for a core or for pages: a busy host makes it slow, not dead. But
    each second in which it had a core counts, once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last_look: float | None = None
        self._last = Hindrance()

    def look(self, now: float, heard: bool, hindrance: Hindrance = _NOTHING) -> float:
        """Note at `now` (monotonic seconds) whether there was a sign of life; return the seconds without one.

        hindrance: of the other's whole life; less than before where a thread of it has ended.
        """
        elapsed = 0.0 if self._last_look is None else min(now - self._last_look, _LONGEST_LOOK)
        passed = ran = min(max(hindrance.core_time - self._last.core_time, 0.0), elapsed)
        is_waiting = (
            hindrance.is_runnable or hindrance.is_blocked
        )  # for a core, or for pages: for how long, nobody knows
        if not is_waiting and hindrance.major_faults <= self._last.major_faults:
            waited = max(hindrance.core_wait - self._last.core_wait, 0.0)
            stalled = max(hindrance.memory_stall - self._last.memory_stall, 0.0)
            # Of the time in which it had a core, nothing is taken off: the waits may be other threads', or others'.
            passed = max(ran, elapsed - waited - stalled)
        self._last_look, self._last = now, hindrance
        self.seconds = 0.0 if heard else self.seconds + passed
        return self.seconds
