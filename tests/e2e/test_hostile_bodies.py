# SPDX-License-Identifier: Apache-2.0
"""No body, however made, keeps a worker from its other requests, its lease or within its memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import httpx
import pytest

from blink.models.weights.files import default_model_path
from hostile_bodies import AUDITED, Hostile, audited_body, random_bodies
from processes import Engine, Frontend, resident_mib, start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
_MIB = 1 << 20
_OBJECT_FACTOR = 24
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


@pytest.fixture(scope="module")
def control(tiny_engine: Engine) -> Iterator[Frontend]:
    """A frontend of the same engine that nobody attacks."""
    frontend = start_frontend(tiny_engine.region, f"--tokenizer={default_model_path()}")
    yield frontend
    stop(frontend.process)


def memory_mib(frontend: Frontend) -> float:
    return resident_mib(frontend.process.pid)


def children_mib(frontend: Frontend) -> float:
    """Return the memory of the processes that read and compile for a frontend."""
    total = 0.0
    for task in Path(f"/proc/{frontend.process.pid}/task").iterdir():
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            total += sum(resident_mib(int(child)) for child in (task / "children").read_text().split())
    return total


class Client:
    """An honest client of one frontend: asks for its version all the time, and reads a stream."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self.over = threading.Event()
        self.longest_answer = self.longest_gap = 0.0  # seconds
        self.threads = [threading.Thread(target=self._probe), threading.Thread(target=self._read)]

    def _probe(self) -> None:
        with httpx.Client(base_url=self._frontend.url, trust_env=False, timeout=60) as client:
            while not self.over.wait(_PROBE_SECONDS):
                started = time.monotonic()
                assert client.get("/version").status_code == 200
                self.longest_answer = max(self.longest_answer, time.monotonic() - started)

    def _read(self) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._frontend.url, trust_env=False, timeout=60) as client:
            while not self.over.is_set():
                with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200
                    self._follow(response)

    def _follow(self, response: httpx.Response) -> None:
        last = 0.0
        for _ in response.iter_raw():
            now = time.monotonic()
            if last:
                self.longest_gap = max(self.longest_gap, now - last)
            last = now
            if self.over.is_set():
                return


class Watch:
    """Two honest clients, of the frontend under attack and of another one of its engine, and a look at the memory.

    What the machine, the engine and this process cost, both clients bear: the difference is the attacked frontend's.
    """

    def __init__(self, frontend: Frontend, control: Frontend) -> None:
        self._frontend = frontend
        self.attacked, self.control = Client(frontend), Client(control)
        self._over = threading.Event()
        self.most_mib = self.base_mib = memory_mib(frontend)
        self.most_of_children = self.base_of_children = children_mib(frontend)
        self._threads = [threading.Thread(target=self._weigh), *self.attacked.threads, *self.control.threads]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for event in (self._over, self.attacked.over, self.control.over):
            event.set()
        for thread in self._threads:
            thread.join()

    @property
    def longer(self) -> float:
        """How many seconds longer the attacked frontend's client waited than the other's."""
        pairs = [
            (self.attacked.longest_answer, self.control.longest_answer),
            (self.attacked.longest_gap, self.control.longest_gap),
        ]
        return max(ours - theirs for ours, theirs in pairs)

    def _weigh(self) -> None:
        while not self._over.wait(0.01):
            self.most_mib = max(self.most_mib, memory_mib(self._frontend))
            self.most_of_children = max(self.most_of_children, children_mib(self._frontend))


def attack(frontend: Frontend, hostile: Hostile) -> int:
    headers = {"Content-Type": "application/json"}
    return frontend.http.post(hostile.path, content=hostile.body, headers=headers).status_code


def check(frontend: Frontend, control: Frontend, hostile: Hostile) -> tuple[int, Watch]:
    """Attack once; return the status and what others saw."""
    with Watch(frontend, control) as watch:
        status = attack(frontend, hostile)
    allowed = 4 * len(hostile.body) / _MIB + _SPARE_MIB
    assert watch.most_mib - watch.base_mib <= allowed, (hostile.path, hostile.body[:80])
    # The reader makes an object of each item, which may be four bytes in the body.
    allowed = _OBJECT_FACTOR * len(hostile.body) / _MIB + _SPARE_MIB
    assert watch.most_of_children - watch.base_of_children <= allowed, (hostile.path, hostile.body[:80])
    return status, watch


def expired_leases(frontend: Frontend) -> float:
    return frontend.metric("blink:expired_leases_total")


@pytest.mark.parametrize("num_mib", [4, pytest.param(16, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", list(AUDITED))
def test_an_audited_body_costs_neither_lease_nor_memory(
    frontend: Frontend, control: Frontend, name: str, num_mib: int
) -> None:
    before = expired_leases(frontend)
    status, _ = check(frontend, control, audited_body(name, num_mib * _MIB))
    assert 400 <= status < 500
    assert expired_leases(frontend) == before
    assert frontend.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] > 0


def test_a_few_random_bodies_cost_neither_lease_nor_memory(frontend: Frontend, control: Frontend) -> None:
    before = expired_leases(frontend)
    for hostile in islice(random_bodies(7, 2 * _MIB), 6):
        status, _ = check(frontend, control, hostile)
        assert status == 200 or 400 <= status < 500, (status, hostile.path, hostile.body[:80])
    assert expired_leases(frontend) == before


@pytest.mark.long
def test_random_bodies_for_a_minute_keep_others_waiting_for_a_moment_only(
    frontend: Frontend, control: Frontend
) -> None:
    before = expired_leases(frontend)
    shapes = [audited_body(name, 16 * _MIB) for name in AUDITED]
    deadline, waits = time.monotonic() + _LONG_SECONDS, list[tuple[float, float, float, bytes]]()
    for hostile in chain(shapes, random_bodies(int(time.time()), 16 * _MIB)):
        if time.monotonic() > deadline:
            break
        tries: list[Watch] = []
        for _ in range(_TRIES):  # what the machine caused, not the body, does not come again
            status, watch = check(frontend, control, hostile)
            assert status == 200 or 400 <= status < 500, (status, hostile.path, hostile.body[:80])
            tries.append(watch)
            if watch.longer <= _WAIT_SECONDS:
                break
        best = min(tries, key=lambda watch: watch.longer)
        waits.append((best.longer, best.attacked.longest_answer, best.attacked.longest_gap, hostile.body[:80]))
    worst = max(waits)
    print(
        f"{len(waits)} bodies: others waited at most {worst[0] * 1000:.0f} ms longer; longest answer "
        f"{max(wait[1] for wait in waits) * 1000:.0f} ms, longest gap between tokens "
        f"{max(wait[2] for wait in waits) * 1000:.0f} ms"
    )
    assert worst[0] <= _WAIT_SECONDS, sorted(waits)[-3:]
    assert expired_leases(frontend) == before
