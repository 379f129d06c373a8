# SPDX-License-Identifier: Apache-2.0
"""Child processes of `blink serve`: how one is started, signalled and, after its death, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blink.host.heartbeat import VARIABLE, HeartbeatAge, Pulse
from blink.host.process import Hindrance, describe_threads, die_with_parent, read_hindrance

# Exit status of a process that refuses its configuration: starting it again cannot help.
CONFIG_EXIT_STATUS = 2


@dataclass(slots=True)
class RestartPolicy:
    """Decide when a dead process starts again: at once, but after 1, 2, 4, ... seconds in a loop of short lives."""

    max_deaths: int = 5
    window: float = 300.0  # seconds in which max_deaths are too many
    max_delay: float = 30.0
    settled: float = 5.0  # seconds of life after which a death is no part of a loop
    _deaths: deque[float] = field(default_factory=deque[float])
    _short_lives: int = 0

    def record_death(self, now: float, lived: float) -> None:
        """Remember a death at `now` (seconds) after a life of `lived` seconds, and forget those before the window."""
        self._short_lives = 0 if lived >= self.settled else self._short_lives + 1
        self._deaths.append(now)
        while self._deaths[0] < now - self.window:
            self._deaths.popleft()

    @property
    def is_exhausted(self) -> bool:
        """Whether the process died too often to go on."""
        return len(self._deaths) >= self.max_deaths

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        return 0.0 if self._short_lives <= 1 else min(2.0 ** (self._short_lives - 2), self.max_delay)


class Child:
    """A process that can be started again and again."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Prepare a process that gets this one's environment, and `environment` besides."""
        self.name = name
        self.policy = RestartPolicy()
        self.restart_at: float | None = None  # monotonic seconds; None: running, or not to be started
        self.started_at = 0.0  # monotonic seconds
        self.is_condemned = False  # to be killed for doing nothing, until it starts again
        self._command = command
        self.environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pulse: Pulse | None = None
        self._heartbeat_age: HeartbeatAge | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not been reaped."""
        return self._process is not None

    def start(self) -> None:
        """Start the process: output goes to the supervisor's, signals of the terminal do not reach it."""
        self.restart_at = None
        self.started_at = time.monotonic()
        self.is_condemned = False
        self._heartbeat_age = None
        supervisor = os.getpid()

        def tie_to_supervisor() -> None:
            die_with_parent(supervisor, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        if self._pulse is None:
            self._pulse = Pulse()
        self._pulse.take()  # of the process before
        # Safe although it runs Python after a fork: the supervisor has one thread.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            preexec_fn=tie_to_supervisor,
            start_new_session=True,
            pass_fds=[self._pulse.fd],
            env={**os.environ, **self.environment, VARIABLE: str(self._pulse.fd)},
        )

    def heartbeat_age(self, now: float) -> float:
        """Return the seconds without a beat of a process that has begun to beat; look about once a second."""
        if not self.is_running or self._pulse is None:
            return 0.0
        heard = self._pulse.take()
        if self._heartbeat_age is None and heard:
            self._heartbeat_age = HeartbeatAge()
        return self._heartbeat_age.look(now, heard, self.hindrance()) if self._heartbeat_age is not None else 0.0

    def hindrance(self) -> Hindrance:
        """Return what has kept the process from working since it started."""
        return read_hindrance(self._process.pid) if self._process is not None else Hindrance()

    def describe_threads(self) -> str:
        """Say what the process's threads do now."""
        return describe_threads(self._process.pid) if self._process is not None else ""

    def reap(self) -> int | None:
        """Return the exit status once if the process has ended (negative: the signal that killed it)."""
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            self._process = None
        return status

    def send(self, signum: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self._process is not None:
            self._process.send_signal(signum)


def describe_exit(status: int) -> str:
    """Say in words how a process ended."""
    if status == -signal.SIGBUS:
        return "was killed by SIGBUS: its shared memory or its model's file was truncated, or /dev/shm is full"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
