# SPDX-License-Identifier: Apache-2.0
"""Keeps a process away from its neighbours: cores of its own, a real-time class, memory that is never paged out.

Called before a process starts threads that matter, because threads inherit all three; those already there are changed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from blink.errors import ConfigError

_MAX_CPU: Final = 8191  # the largest number of cores that Linux can be built for
_MCL_CURRENT, _MCL_FUTURE = 1, 2  # asm-generic/mman.h
_CLASSES: Final = {"fifo": os.SCHED_FIFO, "rr": os.SCHED_RR}


def isolate(cpus: Sequence[int], sched: str, priority: int, lock: bool) -> None:
    """Pin this process to `cpus` (none: leave it), put it in a scheduling class and lock its memory, as asked.

    Raises:
        ConfigError: the machine has no such cores or does not permit it; the message says what would.
    """
    if cpus:
        pin(cpus)
    if lock:
        lock_memory()
    if sched != "other":
        set_realtime(sched, priority)


def pin(cpus: Sequence[int]) -> None:
    """Let all threads of this process run on these cores only.

    Raises:
        ConfigError: one of the cores is not there or not this process's to use.
    """
    allowed = os.sched_getaffinity(0)
    try:
        for thread in _threads():
            os.sched_setaffinity(thread, cpus)
    except OSError as error:
        raise _unusable(cpus, allowed) from error
    if os.sched_getaffinity(0) != set(cpus):  # Linux drops the cores outside of the cpuset in silence
        raise _unusable(cpus, allowed)


def set_realtime(sched: str, priority: int) -> None:
    """Put all threads of this process in the class fifo or rr: they run before every ordinary process.

    Raises:
        ConfigError: not permitted.
    """
    try:
        for thread in _threads():
            os.sched_setscheduler(thread, _CLASSES[sched], os.sched_param(priority))
    except PermissionError as error:
        raise ConfigError(
            f"the real-time class {sched} with priority {priority} is not permitted: run with CAP_SYS_NICE "
            f"(containers: --cap-add SYS_NICE), or raise the limit (`ulimit -r {priority}`, systemd "
            f"LimitRTPRIO={priority}); if it is permitted, the cgroup's cpu.rt_runtime_us may be 0"
        ) from error
    except OSError as error:
        raise ConfigError(f"the real-time class {sched} with priority {priority}: {error.strerror}") from error


def lock_memory() -> None:
    """Keep all memory of this process, present and future, from being paged out.

    Raises:
        ConfigError: not permitted, or more than the limit.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EPERM, errno.ENOMEM, errno.EAGAIN):
        raise ConfigError(
            "memory cannot be locked: it is more than RLIMIT_MEMLOCK permits; run with CAP_IPC_LOCK (containers: "
            "--cap-add IPC_LOCK), or raise the limit (`ulimit -l unlimited`, systemd LimitMEMLOCK=infinity)"
        )
    raise ConfigError(f"memory cannot be locked: {os.strerror(code)}")


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of cores such as 2,3 or 2-5 or 0,4-7 in its order; empty text gives none.

    Raises:
        ConfigError: it is no such list, or names a core twice.
    """
    cpus: list[int] = []
    for part in text.split(",") if text.strip() else ():
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        numbers = (first, last) if dash else (first,)
        if not all(number.isascii() and number.isdigit() and int(number) <= _MAX_CPU for number in numbers):
            raise ConfigError(f"{text!r} is not a list of cores: write 2,3 or 2-5")
        if int(numbers[-1]) < int(first):
            raise ConfigError(f"{text!r} is not a list of cores: {part.strip()} counts down")
        cpus += range(int(first), int(numbers[-1]) + 1)
    if len(set(cpus)) < len(cpus):
        raise ConfigError(f"{text!r} names a core twice")
    return tuple(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Write cores as a list that `parse_cpus` reads, ascending, runs as ranges."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def deal_cpus(cpus: Sequence[int], worker: int, num_workers: int) -> tuple[int, ...]:
    """Give a worker its cores, dealt like cards; workers share in turn when there are more of them than cores."""
    if len(cpus) <= num_workers:
        return tuple(cpus[worker % len(cpus) :][:1]) if cpus else ()
    return tuple(cpus[worker::num_workers])


def _threads() -> list[int]:
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


def _unusable(cpus: Sequence[int], allowed: Iterable[int]) -> ConfigError:
    return ConfigError(f"cores {format_cpus(cpus)} cannot be used: this process may run on {format_cpus(allowed)}")
