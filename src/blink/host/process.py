# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: how a child ends with its parent, and how much memory there is."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Let the kernel send this process `signum` when its parent ends, whose process id it was told."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def read_available_memory() -> int:
    """Read what the kernel would give without swapping, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kibibytes) * 1024
