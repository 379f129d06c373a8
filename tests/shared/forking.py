# SPDX-License-Identifier: Apache-2.0
"""Commands of Blink as processes that are forked off one that has imported what they need: each starts seconds earlier.

The process that forks is this file as a program. Its standard input is a socket, where each message is a JSON object
with a command, and the files that are to be its standard output and error. It writes the ids and the ends of processes
to its own standard output, a JSON object a line.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# What frontends and engines of models import when they start.
_MODULES = (
    "blink.cli.main", "blink.cli.frontend", "blink.cli.engine", "blink.api.server", "blink.engine.boot",
    "blink.engine.cpu", "transformers.models.llama.configuration_llama", "uvloop",
)  # fmt: skip


class Forked(subprocess.Popen[bytes]):
    """A process that another one has forked: its id, signals to it, and how it ends."""

    def __init__(self, forker: _Forker, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `blink` with some arguments."""
        self.args, self.returncode = ["blink", *arguments], None
        self._forker = forker
        self.pid = forker.fork(arguments, environment)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None: it runs."""
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises:
            TimeoutExpired: it still runs.
        """
        status = self._end(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._forker.wait_for_end(self.pid, timeout)
        return self.returncode

    def __del__(self) -> None:
        """Do nothing: the process that forked it waits for it."""


def start_blink(*arguments: str) -> subprocess.Popen[bytes]:
    """Start `blink` with some arguments."""
    return Forked(_find_forker(os.getpid()), arguments, os.environ)


@functools.cache
def _find_forker(pid: int) -> _Forker:  # noqa: ARG001 - of each process of tests its own
    return _Forker()


class _Forker:
    """The process that forks, seen from the tests'."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__))]
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.PIPE)
        atexit.register(self._process.terminate)
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._asking = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start a process and return its id."""
        order = {"arguments": arguments, "environment": dict(environment), "folder": str(Path.cwd())}
        with self._asking:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [1, 2])
            with self._changed:
                assert self._changed.wait_for(lambda: self._started, 300), "the process that forks has ended"
                return self._started.pop()

    def wait_for_end(self, pid: int, timeout: float | None) -> int | None:
        """Return a process' exit status; None: it runs after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._ended, timeout)
            return self._ended.get(pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: dict[str, int] = json.loads(line)
            with self._changed:
                if "status" in event:
                    self._ended[event["pid"]] = event["status"]
                else:
                    self._started.append(event["pid"])
                self._changed.notify_all()


def _serve() -> list[str] | None:
    """Fork for each message of the standard input, and tell how what was forked ends.

    Returns the arguments in a process that was forked, None at the end of the input.
    """
    for module in _MODULES:
        with suppress(ImportError):  # a command that needs it says so
            importlib.import_module(module)
    gc.freeze()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    orders = socket.socket(fileno=0)
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends()
        if orders not in ready:
            continue
        message, outputs, _, _ = socket.recv_fds(orders, 1 << 20, 2)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            orders.detach()
            return _become(json.loads(message), outputs, (woken, waker))
        for file in outputs:
            os.close(file)
        _tell(pid=pid)


def _become(order: dict[str, Any], outputs: Sequence[int], own: Sequence[int]) -> list[str]:
    """Take over what a new process would have; return its arguments. own: files that it would not."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, file in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(file, target)
        os.close(file)
    for file in own:
        os.close(file)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    return order["arguments"]


def _tell_ends() -> None:
    """Tell all processes that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(pid=pid, status=os.waitstatus_to_exitcode(status))


def _tell(**event: int) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    forked_arguments = _serve()
    if forked_arguments is not None:
        from blink.cli.main import main

        sys.exit(main(forked_arguments))
