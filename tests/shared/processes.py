# SPDX-License-Identifier: Apache-2.0
"""Engines and frontends as processes, and the ways to talk to them."""

from __future__ import annotations

import os
import secrets
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from blink.errors import EngineUnavailableError
from blink.region.layout import EngineState
from blink.region.memory import open_region
from forking import start_blink
from ports import free_port

if TYPE_CHECKING:
    from openai import OpenAI

_BOOT_SECONDS = 300.0  # on a machine that does much else
MAX_MODEL_LEN = 1024
MAX_BODY_BYTES = 1 << 20
MAX_SEQUENCES = 100


@dataclass
class Frontend:
    """A running frontend process and the ways to talk to it."""

    process: subprocess.Popen[bytes]
    port: int
    url: str
    http: httpx.Client
    model: str = field(default="")

    @cached_property
    def client(self) -> OpenAI:
        """OpenAI's own client; loaded only here, as tests on a GPU's machine do without it."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: object, **body: object) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, sample: str) -> float:
        """The value of the first metric line that starts so."""
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))

    def wait_until_idle(self) -> None:
        wait_for(lambda: self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0, 300)


@dataclass
class Engine:
    """A running engine process."""

    process: subprocess.Popen[bytes]
    region: str


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def start_frontend(
    region: str, *flags: str, verify: ssl.SSLContext | bool = True, wait: bool = True, port: int = 0
) -> Frontend:
    port = port or free_port()
    url = f"{'https' if '--ssl-certfile' in ' '.join(flags) else 'http'}://127.0.0.1:{port}"
    # A test's requests all come from one client, which keeps connections for five seconds: it is the one to close them.
    usual = ("--max-client-share=1", "--keep-alive-timeout=60")
    process = start_blink("frontend", f"--region={region}", f"--port={port}", *usual, *flags)
    http = httpx.Client(base_url=url, timeout=300, trust_env=False, verify=verify)
    frontend = Frontend(process, port, url, http)
    if wait:
        wait_for(lambda: answers(frontend) == 200, 300)
        frontend.model = http.get("/v1/models").json().get("data", [{"id": ""}])[0]["id"]
    return frontend


@contextmanager
def run_engine(*flags: str, device: str = "cpu") -> Iterator[Engine]:
    """An engine in a region of its own, until the end."""
    name = f"e2e-{os.getpid()}-{secrets.token_hex(3)}"
    process = start_blink("engine", f"--region={name}", f"--device={device}", "--cpu-threads=1", *flags)
    try:
        wait_for(lambda: is_ready(process, name), _BOOT_SECONDS)
        yield Engine(process, name)
    finally:
        stop(process)


def is_ready(process: subprocess.Popen[bytes], region: str) -> bool:
    """Say whether an engine takes requests; it must not have ended."""
    status = process.poll()
    assert status is None, f"the engine ended with status {status}"
    try:
        opened = open_region(region)
    except EngineUnavailableError:
        return False
    try:
        return opened.control_word("state") == EngineState.READY
    finally:
        opened.close()


def wait_until_healthy(client: httpx.Client, server: subprocess.Popen[bytes], patience: float) -> None:
    """Wait until a server, which must not end, answers that it serves."""

    def is_healthy() -> bool:
        assert server.poll() is None
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_healthy, patience)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


@contextmanager
def under_load(url: str, key: str = "", **body: object) -> Iterator[None]:
    """Keep a server at work with one stream of requests for completions in each class."""
    is_over = threading.Event()
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(tier: str | None) -> None:
        with httpx.Client(base_url=url, timeout=300, trust_env=False, headers=headers) as http:
            while not is_over.is_set():
                http.post("/v1/completions", json={**body, "service_tier": tier}).raise_for_status()

    threads = [threading.Thread(target=ask, args=(tier,)) for tier in (None, "flex")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def children_of(pid: int, word: str) -> list[int]:
    """Return the children of a process that have a word in their command, such as a module's name."""
    lines = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for line in lines for child in line.split() if word in _words_of(int(child))]


def _words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has just ended


def open_files(pid: int) -> int:
    """Count the file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_mib(pid: int) -> float:
    """The memory of a process that is in RAM, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measure(processes: Sequence[subprocess.Popen[bytes]], what: Callable[[int], float]) -> list[float]:
    """Take one figure of each process."""
    return [what(process.pid) for process in processes]


def answers(frontend: Frontend) -> int:
    status = frontend.process.poll()
    assert status is None, f"the frontend ended with status {status}"
    try:
        return frontend.http.get("/health").status_code
    except httpx.TransportError:
        return 0
