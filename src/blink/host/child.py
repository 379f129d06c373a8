# SPDX-License-Identifier: Apache-2.0
"""A child process that works for an event loop, for what may take any time or memory: it can be killed.

Messages go both ways over a socket, each after its length. The child ends with its parent, however that ends, and gives
way to it on a busy core. As a program, this module is the child: it runs a module's run() with its end of the socket.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from blink.host.process import die_with_parent

_LENGTH = struct.Struct("<Q")
_DATA_PAGES = 5  # of /proc/self/statm: what RLIMIT_DATA counts
_REAP_SECONDS = 0.1


class Child:
    """The parent's side. Use from an event loop only, and kill() it once a message was not sent or received whole.

    It ends with the thread that starts it, which should be the event loop's.
    """

    def __init__(self, module: str, *arguments: str, niceness: int) -> None:
        """Start a process; its first message, which says that it is ready, is for the caller to receive."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(niceness), module, *arguments]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        """Say whether the process runs, and was not told to end."""
        return not self._is_killed and self._process.poll() is None

    async def send(self, message: bytes | bytearray) -> None:
        """Send a message.

        Raises:
            OSError: the process has ended.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, _LENGTH.pack(len(message)))
        await loop.sock_sendall(self._socket, message)

    async def receive(self) -> bytearray:
        """Return the next message.

        Raises:
            EOFError: the process has ended.
            OSError: likewise.
        """
        (length,) = _LENGTH.unpack(await self._receive_bytes(_LENGTH.size))
        return await self._receive_bytes(length)

    def read_cpu_seconds(self) -> float:
        """Return how long the process has run on cores; 0 when it has ended."""
        with suppress(OSError):
            return time.clock_gettime((~self._process.pid << 3) | 2)  # its clock: CPUCLOCK_SCHED in the kernel
        return 0.0

    def interrupt(self) -> None:
        """Ask the process by SIGUSR1 to give up what it does, if it listens to that."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the process at once; what is being sent or received fails."""
        self._is_killed = True
        self._process.kill()
        try:
            asyncio.get_running_loop().call_later(_REAP_SECONDS, self._reap)
        except RuntimeError:  # no loop runs
            self._process.wait()
            self._socket.close()

    def _reap(self) -> None:
        """Let the kernel forget the process, once it has given its memory back."""
        if self._process.poll() is None:
            asyncio.get_running_loop().call_later(_REAP_SECONDS, self._reap)
        else:
            self._socket.close()

    async def _receive_bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        view, have = memoryview(data), 0
        loop = asyncio.get_running_loop()
        while have < count:
            part = await loop.sock_recv_into(self._socket, view[have:])
            if not part:
                raise EOFError("it died")
            have += part
        return data


class Parent:
    """The child's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def take(self) -> bytearray | None:
        """Return the next message; None when the parent has gone."""
        head = self._take_bytes(_LENGTH.size)
        return None if head is None else self._take_bytes(_LENGTH.unpack(head)[0])

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._socket.sendall(_LENGTH.pack(len(message)))
        self._socket.sendall(message)

    def _take_bytes(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view, have = memoryview(data), 0
        while have < count:
            part = self._socket.recv_into(view[have:])
            if not part:
                return None
            have += part
        return data


def read_data_bytes() -> int:
    """Return how much memory this process has of the kind that limit_data() limits."""
    return int(Path("/proc/self/statm").read_bytes().split()[_DATA_PAGES]) * resource.getpagesize()


def limit_data(growth: int) -> None:
    """Let this process take `growth` bytes more than it has; beyond it allocations fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = read_data_bytes() + growth
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _run_child(parent: int, niceness: int, module: str, arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent finishes open requests first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent, signal.SIGKILL)
    # The event loop runs before this process, also where both have one core and it has a real-time class.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(niceness)
    importlib.import_module(module).run(Parent(socket.socket(fileno=0)), *arguments)


if __name__ == "__main__":
    _run_child(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
