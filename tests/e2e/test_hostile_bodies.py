# SPDX-License-Identifier: Apache-2.0
"""No body, however made, keeps a worker from its other requests, its lease or within its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
import pytest

from blink.models.weights.files import default_model_path
from hostile_bodies import AUDITED, Hostile, audited_body, random_bodies
from processes import Engine, Frontend, resident_mib, start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
_MIB = 1 << 20
_SPARE_MIB = 64.0  # of a body's memory, beside four times its size
_PROBE_SECONDS = 0.02
_WAIT_SECONDS = 0.1  # that others may wait longer
_TRIES = 3
_LONG_SECONDS = 60.0


@pytest.fixture(scope="module")
def frontend(tiny_engine: Engine) -> Iterator[Frontend]:
    frontend = start_frontend(tiny_engine.region, f"--tokenizer={default_model_path()}")
    # So that the process that reads large bodies has started before memory is measured.
    assert frontend.post("/tokenize", prompt="some words " * 20_000).json()["count"] > 20_000
    yield frontend
    stop(frontend.process)


def memory_mib(frontend: Frontend) -> float:
    pid = frontend.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = resident_mib(pid)
    for child in children:
        try:
            total += resident_mib(int(child))
        except (OSError, IndexError):  # it has just died
            continue
    return total


class Watch:
    """Asks the frontend for its version all the time, and looks at its memory."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._over = threading.Event()
        self.longest = 0.0
        self.most_mib = self.base_mib = memory_mib(frontend)
        self._threads = [threading.Thread(target=self._probe), threading.Thread(target=self._weigh)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _probe(self) -> None:
        with httpx.Client(base_url=self._frontend.url, trust_env=False, timeout=60) as client:
            while not self._over.wait(_PROBE_SECONDS):
                started = time.monotonic()
                assert client.get("/version").status_code == 200
                self.longest = max(self.longest, time.monotonic() - started)

    def _weigh(self) -> None:
        while not self._over.wait(0.01):
            self.most_mib = max(self.most_mib, memory_mib(self._frontend))


def attack(frontend: Frontend, hostile: Hostile) -> int:
    headers = {"Content-Type": "application/json"}
    return frontend.http.post(hostile.path, content=hostile.body, headers=headers).status_code


def check(frontend: Frontend, hostile: Hostile) -> tuple[int, float]:
    """Attack once; return the status and the longest wait of others."""
    with Watch(frontend) as watch:
        status = attack(frontend, hostile)
    allowed = 4 * len(hostile.body) / _MIB + _SPARE_MIB
    assert watch.most_mib - watch.base_mib <= allowed, (hostile.path, hostile.body[:80])
    return status, watch.longest


def expired_leases(frontend: Frontend) -> float:
    return frontend.metric("blink:expired_leases_total")


@pytest.mark.parametrize("num_mib", [4, pytest.param(16, marks=pytest.mark.long)])
def test_the_audited_bodies_cost_neither_lease_nor_memory(frontend: Frontend, num_mib: int) -> None:
    before = expired_leases(frontend)
    for name in AUDITED:
        status, _ = check(frontend, audited_body(name, num_mib * _MIB))
        assert 400 <= status < 500, name
    assert expired_leases(frontend) == before
    assert frontend.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] > 0


def test_a_few_random_bodies_cost_neither_lease_nor_memory(frontend: Frontend) -> None:
    before = expired_leases(frontend)
    for hostile in islice(random_bodies(7, 2 * _MIB), 12):
        status, _ = check(frontend, hostile)
        assert status == 200 or 400 <= status < 500, (status, hostile.path, hostile.body[:80])
    assert expired_leases(frontend) == before


@pytest.mark.long
def test_random_bodies_for_a_minute_keep_others_waiting_for_a_moment_only(frontend: Frontend) -> None:
    before = expired_leases(frontend)
    deadline, waits = time.monotonic() + _LONG_SECONDS, list[tuple[float, bytes]]()
    with Watch(frontend) as idle:
        time.sleep(2.0)
    for hostile in random_bodies(int(time.time()), 16 * _MIB):
        status, wait = check(frontend, hostile)
        assert status == 200 or 400 <= status < 500, (status, hostile.path, hostile.body[:80])
        for _ in range(_TRIES):  # what the machine caused, not the body, does not come again
            if wait > idle.longest + _WAIT_SECONDS:
                wait = min(wait, check(frontend, hostile)[1])
        waits.append((wait, hostile.body[:80]))
        if time.monotonic() > deadline:
            break
    assert max(waits)[0] <= idle.longest + _WAIT_SECONDS, sorted(waits)[-3:]
    assert expired_leases(frontend) == before
