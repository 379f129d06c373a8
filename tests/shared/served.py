# SPDX-License-Identifier: Apache-2.0
"""A `blink serve` of a tiny model as a process, for tests that break parts of it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx

from blink.models.weights.files import default_model_path
from ports import free_port
from processes import children_of, wait_for
from tiny_model import write_tiny_model

PATIENCE = 300.0  # seconds; reached only by failures
# Seconds that the service may be away, beyond those that its boot took on the same machine: with the tiny model and no
# other load, five in all.
_AWAY_SECONDS = 3.5


class Served:
    """A `blink serve` of a tiny model, its log, and what can be asked of it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.port = folder, free_port()
        self.region = f"faults-{os.getpid()}-{secrets.token_hex(3)}"
        self.log = folder / f"log-{self.region}"
        command = [*serve_command(folder), f"--port={self.port}", f"--region={self.region}", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def answer(self) -> str:
        body = {"prompt": "Once", "temperature": 0, "max_tokens": 8}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=body, timeout=PATIENCE, trust_env=False).raise_for_status().json()["choices"]

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def was_back(self) -> int:
        """How often the supervisor has found it ready after a loss."""
        return self.log.read_text().count("blink: ready again")

    def wait_until_back(self, before: int) -> None:
        wait_for(lambda: self.process.poll() is not None or self.was_back() > before, PATIENCE)
        assert self.is_ready()

    @property
    def boot_seconds(self) -> float:
        """What the first start took, by the supervisor's own watch."""
        return float(re.findall(r"blink: ready after ([0-9.]+) s", self.log.read_text())[0])

    @property
    def most_away(self) -> float:
        """Seconds that the service may be away; a machine may do more now than when the server started."""
        return 3 * self.boot_seconds + _AWAY_SECONDS

    @contextmanager
    def recovering(self, what: str) -> Iterator[None]:
        """Do what takes the service away; then wait until it is back, in time."""
        back, started = self.was_back(), time.monotonic()
        yield
        self.wait_until_back(back)
        away = time.monotonic() - started
        print(f"{what}: back after {away:.1f} s (boot {self.boot_seconds:.1f} s)")
        assert away <= self.most_away

    def child(self, command: str) -> int:
        [found] = children_of(self.process.pid, command)
        return found

    def has_child(self, command: str) -> bool:
        return len(children_of(self.process.pid, command)) == 1


def serve_command(folder: Path) -> list[str]:
    model = [str(write_tiny_model(folder)), "--load-format=dummy", f"--tokenizer={default_model_path()}"]
    sizes = ["--max-model-len=200", "--num-gpu-blocks-override=64", "--max-num-seqs=8", "--cpu-threads=1"]
    return [sys.executable, "-m", "blink", "serve", *model, *sizes, "--device=cpu"]


Kind = TypeVar("Kind", bound=Served)


@contextmanager
def served(folder: Path, *flags: str, kind: type[Kind] = Served) -> Iterator[Kind]:
    server = kind(folder, *flags)
    try:
        wait_for(server.is_ready, PATIENCE)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(PATIENCE)
        left = [path.name for path in Path("/dev/shm").glob(f"blink-{server.region}*")]
    assert left == []
