# SPDX-License-Identifier: Apache-2.0
"""Kinds of busy neighbours: what one of their processes does without pause. Nothing here starts or ends a process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from blink.host.process import read_available_memory

_ROOT: Final = Path(__file__).resolve().parents[2]
_CSRC: Final = _ROOT / "src" / "blink" / "csrc"
_HEADER: Final = _CSRC / "scheduler" / "scheduler.h"
_L3: Final = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_COPY_BYTES: Final = 64 << 20
_LEAST_COPY_BYTES: Final = 8 << 20
_COMPILER_BYTES: Final = 160 << 20  # what g++ takes for the header
_FILE_BYTES: Final = 16 << 20
_DATAGRAM: Final = bytes(1400)

Work = Callable[[], int]  # does a piece of work; returns how many units it was
Maker = Callable[[int], Work]  # called in each process with its index


class NotMeasuredError(Exception):
    """This machine cannot run such neighbours; the message says why."""


@dataclass(frozen=True)
class Kind:
    """One kind: its name in tables, the unit of its work, and what prepares it once before the processes start."""

    title: str
    unit: str
    prepare: Callable[[int, Path], Maker]  # number of processes, folder for files


def _compute(_number: int, _folder: Path) -> Maker:
    def spin() -> int:
        value = 1
        for _ in range(100_000):
            value = (value * 1103515245 + 12345) & 0x7FFFFFFF
        return 100_000

    return lambda _index: spin


def _copy(number: int, _folder: Path) -> Maker:
    size = min(_COPY_BYTES, read_available_memory() // 2 // (2 * number))
    if size < _LEAST_COPY_BYTES:
        raise NotMeasuredError(f"{number} pairs of {_LEAST_COPY_BYTES >> 20} MiB need half of the available memory")

    def make(_index: int) -> Work:
        source, target = bytearray(b"\1") * size, bytearray(size)

        def copy() -> int:
            target[:] = source
            return size

        return copy

    return make


def l3_bytes() -> int:
    """Return the size of the last-level cache; 32 MiB where the kernel does not say."""
    try:
        return int(_L3.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


def _walk(_number: int, _folder: Path) -> Maker:
    length = 1 << (l3_bytes() // 8 - 1).bit_length()  # a power of two, so that the walk below visits every place
    steps = np.arange(length, dtype=np.int64)  # shared by all processes: together they fill the cache once
    steps *= 6364136223846793005 % length | 1
    steps += 1442695040888963407 % length | 1
    steps &= length - 1

    def make(index: int) -> Work:
        places = np.random.default_rng(index).integers(0, length, 4096)
        following = np.empty_like(places)

        def walk() -> int:
            nonlocal places, following
            np.take(steps, places, out=following, mode="clip")
            places, following = following, places
            return len(places)

        return walk

    return make


def _fork(_number: int, _folder: Path) -> Maker:
    program = shutil.which("true")
    if program is None:
        raise NotMeasuredError("there is no program `true` to execute")

    def fork() -> int:
        if (child := os.fork()) == 0:
            os.execv(program, [program])
        os.waitpid(child, 0)
        return 1

    return lambda _index: fork


def _write(number: int, folder: Path) -> Maker:
    needed, free = 2 * number * _FILE_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise NotMeasuredError(f"{number} files need {needed >> 20} MiB in {folder}, {free >> 20} MiB are free")
    part = os.urandom(1 << 20)

    def make(index: int) -> Work:
        file = os.open(folder / f"pages-{index}", os.O_CREAT | os.O_RDWR, 0o600)

        def write() -> int:
            for _ in range(_FILE_BYTES // len(part)):
                os.write(file, part)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            return _FILE_BYTES

        return write

    return make


def _flood(_number: int, _folder: Path) -> Maker:
    def make(_index: int) -> Work:
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.connect(receiver.getsockname())

        def flood() -> int:
            for _ in range(32):
                sender.send(_DATAGRAM)
            with suppress(BlockingIOError):  # what did not fit into the buffer was dropped
                for _ in range(32):
                    receiver.recv(2048)
            return 32

        return flood

    return make


def _compile(number: int, folder: Path) -> Maker:
    compiler = shutil.which("g++")
    if compiler is None:
        raise NotMeasuredError("there is no g++")
    available = read_available_memory()
    if number * _COMPILER_BYTES > available // 2:
        raise NotMeasuredError(f"{number} compilers need more than half of {available >> 20} MiB of available memory")
    flags = [compiler, "-std=c++20", "-w", f"-I{_CSRC}", "-x", "c++", str(_HEADER)]
    tried = subprocess.run([*flags, "-fsyntax-only"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise NotMeasuredError(f"g++ does not compile {_HEADER.name}: {tried.stderr.strip().splitlines()[:1]}")

    def make(index: int) -> Work:
        command = [*flags, "-O2", "-c", "-o", str(folder / f"job-{index}.o")]

        def compile_once() -> int:
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            return 1

        return compile_once

    return make


KINDS: Final = {
    "compute": Kind("compute", "steps", _compute),
    "memory": Kind("memory bandwidth", "bytes", _copy),
    "cache": Kind("cache thrash", "loads", _walk),
    "fork": Kind("fork storm", "processes", _fork),
    "pages": Kind("page cache", "bytes", _write),
    "network": Kind("network softirq", "datagrams", _flood),
    "compile": Kind("compile job", "compilations", _compile),
    "throttle": Kind("cgroup throttling", "steps", _compute),  # in the server's cgroup, which cgroups.py limits
}
