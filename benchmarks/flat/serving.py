# SPDX-License-Identifier: Apache-2.0
"""Serves a model with `blink serve` for as long as the measurements take."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from blink.errors import EngineUnavailableError
from blink.host.process import die_with_parent
from flat.machine import process_tree

_BOOT_SECONDS: Final = 900.0
_LOOK_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server of ours."""

    url: str
    pid: int
    region: str
    command: str

    def find(self, word: str) -> int:
        """Return the child process that runs a command of `blink`, such as engine; 0 if there is none."""
        for pid in process_tree(self.pid)[1:]:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if word.encode() in words[:5]:
                return pid
        return 0


@contextmanager
def serve(arguments: Sequence[str], cpus: Sequence[int]) -> Iterator[Served]:
    """Run `blink serve` on some cores until the end of the block; it ends with this process too.

    Raises:
        EngineUnavailableError: it ended, or does not answer.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    region = f"flat-{os.getpid()}"
    command = [sys.executable, "-m", "blink", "serve", *arguments, "--host=127.0.0.1", f"--port={port}"]
    command += [f"--region={region}"]
    before, parent = os.sched_getaffinity(0), os.getpid()
    os.sched_setaffinity(0, cpus)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM)
        )
    finally:
        os.sched_setaffinity(0, before)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_answer(process, url)
        yield Served(url, process.pid, region, " ".join(["blink", "serve", *arguments]))
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_answer(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _BOOT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineUnavailableError(f"blink serve ended with status {process.returncode}; its message is above")
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(_LOOK_SECONDS)
    raise EngineUnavailableError(f"blink serve was not ready within {_BOOT_SECONDS:g} s")
