# SPDX-License-Identifier: Apache-2.0
"""Child processes of `blink serve`: how one is started, signalled and, after its death, started again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from blink.host.process import die_with_parent

# Exit status of a process that refuses its configuration: starting it again cannot help.
CONFIG_EXIT_STATUS = 2


@dataclass(slots=True)
class RestartPolicy:
    """Decide when a dead process starts again: at once, then after 1, 2, 4, ... seconds, and at last not at all."""

    max_deaths: int = 5
    window: float = 300.0  # seconds in which max_deaths are too many
    max_delay: float = 30.0
    _deaths: deque[float] = field(default_factory=deque[float])

    def record_death(self, now: float) -> None:
        """Remember a death at `now` (seconds) and forget those before the window."""
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
        recent = len(self._deaths)
        return 0.0 if recent <= 1 else min(2.0 ** (recent - 2), self.max_delay)


class Child:
    """A process that can be started again and again."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.policy = RestartPolicy()
        self.restart_at: float | None = None  # monotonic seconds; None: running, or not to be started
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not been reaped."""
        return self._process is not None

    def start(self) -> None:
        """Start the process: output goes to the supervisor's, signals of the terminal do not reach it."""
        self.restart_at = None
        supervisor = os.getpid()

        def tie_to_supervisor() -> None:
            die_with_parent(supervisor, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        # Safe although it runs Python after a fork: the supervisor has one thread.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            preexec_fn=tie_to_supervisor,
            start_new_session=True,
        )

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
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
