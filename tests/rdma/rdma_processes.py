# SPDX-License-Identifier: Apache-2.0
"""Engines and frontends as processes of the rig. Loads as little as it can: the rig is slow."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from blink.link.base import Link
from blink.link.queue_pair import QueuePair
from blink.link.rdma.connector import RdmaConnector
from blink.link.rdma.handshake import Descriptor, confirm, negotiate, parse_place
from blink.link.rdma.link import RdmaLink
from blink.link.rdma.message import Lines
from blink.rdma_config import RdmaConfig
from ports import free_port

TOKEN = "a token of the rig"
PATIENCE = 1500.0  # seconds; only a failure takes so long, on a machine that does much else
_ENVIRONMENT = {**os.environ, "BLINK_RDMA_TOKEN": TOKEN, "PYTHONFAULTHANDLER": "1"}


def wait_for(condition: Callable[[], object], what: str, pause: float = 0.05) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause)


@contextmanager
def renewed(pair: QueuePair) -> Iterator[None]:
    """Renew a queue pair's lease meanwhile, from a thread."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.1):
            pair.renew_lease()

    pair.renew_lease()
    with ThreadPoolExecutor(1) as pool:
        renewing = pool.submit(renew)
        try:
            yield
        finally:
            over.set()
    renewing.result()


class RigProcess:
    """A program of Python's that may be killed and started again, and what it prints."""

    def __init__(self, *arguments: str) -> None:
        self._command = [sys.executable, *arguments]
        self._output = os.memfd_create("output")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=_ENVIRONMENT, stdout=self._output, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def check_lives(self) -> None:
        """Fail with the process's status and last words if it has ended."""
        status = self.process.poll()
        if status is not None:
            printed = os.pread(self._output, 1 << 20, 0).decode(errors="replace")
            raise AssertionError(f"{self._command[1:5]} ended with status {status}:\n{printed[-3000:]}")


class CountingProcess(RigProcess):
    """A counting engine in a process of its own."""

    def __init__(self, region: str, host: str = "127.0.0.1", port: int = 0, **options: float | str) -> None:
        self.place = f"{host}:{port or free_port()}"
        script = str(Path(__file__).with_name("counting_engine.py"))
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        super().__init__(script, f"--region={region}", f"--rdma-listen={self.place}", *flags)


class ModelEngine(RigProcess):
    """A small `blink engine` with a real model: the default one, unless the flags name another."""

    def __init__(self, region: str, place: str, *more: str) -> None:
        flags = [*more, f"--region={region}", f"--rdma-listen={place}", "--device=cpu", "--max-model-len=128"]
        flags += ["--kv-cache-memory-bytes=64M", "--max-num-seqs=8", "--max-num-batched-tokens=64", "--cpu-threads=1"]
        super().__init__("-m", "blink", "engine", *flags)


class HttpFrontend(RigProcess):
    """A `blink frontend` process and its HTTP API."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        super().__init__("-m", "blink", "frontend", f"--port={self.port}", *flags)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        return response.status, json.loads(data) if data else None

    def is_healthy(self) -> bool:
        self.check_lives()
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def wait(self) -> None:
        wait_for(self.is_healthy, "the frontend's health", pause=0.5)

    def complete(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]


def open_link(place: str, config: RdmaConfig | None = None) -> RdmaLink:
    """Connect as a frontend does, and wait until that is done."""
    os.environ["BLINK_RDMA_TOKEN"] = TOKEN
    connector = RdmaConnector(place, config or RdmaConfig())
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            link = connector.open()
        except Exception:
            if time.monotonic() > deadline:
                raise
            link = None
        if link is not None:
            return link
        time.sleep(0.05)


def attach(link: Link) -> QueuePair:
    """Return the link's queue pair, attached."""
    pair = QueuePair(link)
    pair.request_attach()
    wait_for(pair.is_attached, "the attachment")
    pair.start()
    return pair


def ask(place: str, link: RdmaLink, token: str = TOKEN) -> Descriptor:
    """Negotiate alone, and claim to have connected, as an attacker could."""
    with socket.create_connection(parse_place(place, "--rdma")) as control:
        lines = Lines(control)
        descriptor = negotiate(lines, token, link.backend, link.info())
        confirm(lines)
        return descriptor
