# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: how a child ends with its parent, what a process may open, how much memory there is."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

from blink.errors import ConfigError

_FEWEST_DESCRIPTORS = 256  # an engine opens some 50 while it boots, and a frontend needs one for each connection
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Let the kernel send this process `signum` when its parent ends, whose process id it was told."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files and connections as the machine permits them.

    Raises:
        ConfigError: that is too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # a limit without end that the kernel does not take
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 0 <= hard < _FEWEST_DESCRIPTORS:
        raise ConfigError(
            f"only {hard} files and connections may be open at once, and {_FEWEST_DESCRIPTORS} are needed: raise the "
            "limit (`ulimit -Hn 65536`, systemd LimitNOFILE=65536, containers --ulimit nofile=65536)"
        )


def read_available_memory() -> int:
    """Read what the kernel would give without swapping, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kibibytes) * 1024


def read_core_wait(process: int) -> float:
    """Return the seconds that a process's threads have been ready to run without a core, in sum; 0 where unknown.

    All of them: while one that holds the interpreter's lock waits for a core, the others wait for the lock.
    """
    try:
        return sum(_read_waited_ns(thread) for thread in Path(f"/proc/{process}/task").iterdir()) * 1e-9
    except OSError:
        return 0.0


def _read_waited_ns(thread: Path) -> int:
    try:
        _, waited, _ = (thread / "schedstat").read_text().split()  # nanoseconds; proc(5)
    except (OSError, ValueError):
        return 0
    return int(waited)
