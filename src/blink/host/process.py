# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: how a child ends with its parent, what a process may open, how much memory there is."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
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


def release_memory() -> None:
    """Give the memory of objects that nobody uses any more back to the machine."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True, slots=True)
class Hindrance:
    """What has kept a process from its work so far without a fault of its own."""

    core_wait: float = 0.0  # seconds that its threads were ready to run without a core, in sum
    major_faults: int = 0  # pages that were not in memory and came from a disk
    is_blocked: bool = False  # a thread sleeps uninterruptibly now, on a disk or on memory that must first be freed
    is_runnable: bool = False  # a thread has a core now, or waits for one
    core_time: float = 0.0  # seconds that its threads had cores, in sum
    memory_stall: float = 0.0  # seconds in which processes of this machine waited for memory


def read_hindrance(process: int) -> Hindrance:
    """Read what hinders a process, over all of its threads; nothing where that is unknown.

    All of them: while one that holds the interpreter's lock waits for a core or a page, the others wait for the lock.
    """
    try:
        threads = [_read_thread(thread) for thread in Path(f"/proc/{process}/task").iterdir()]
    except OSError:
        return Hindrance()
    return Hindrance(
        sum(thread.core_wait for thread in threads),
        sum(thread.major_faults for thread in threads),
        any(thread.is_blocked for thread in threads),
        any(thread.is_runnable for thread in threads),
        sum(thread.core_time for thread in threads),
        _read_memory_stall(),
    )


def describe_threads(process: int) -> str:
    """Say what a process's threads do: the state's letter (proc(5)), what they wait for, and what they had of cores."""
    found: list[str] = []
    with suppress(OSError):
        for thread in sorted(Path(f"/proc/{process}/task").iterdir()):
            with suppress(OSError):
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
                place = (thread / "wchan").read_text()
                known = _read_thread(thread)
                what = state if place in ("", "0") else f"{state} {place}"
                found.append(f"{what}, ran {known.core_time:.1f} s, waited {known.core_wait:.1f} s for a core")
    return "; ".join(found)


def _read_thread(thread: Path) -> Hindrance:
    try:
        fields = (thread / "stat").read_text().rpartition(")")[2].split()  # from the third on; proc(5)
        ran, waited, _ = (thread / "schedstat").read_text().split()  # nanoseconds
        return Hindrance(int(waited) * 1e-9, int(fields[9]), fields[0] == "D", fields[0] == "R", int(ran) * 1e-9)
    except (OSError, ValueError):
        return Hindrance()


def _read_memory_stall() -> float:
    try:
        some = Path("/proc/pressure/memory").read_text().partition("\n")[0]
        return int(some.rpartition("total=")[2]) * 1e-6
    except (OSError, ValueError):  # a kernel without pressure stall information
        return 0.0
