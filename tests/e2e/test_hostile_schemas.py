# SPDX-License-Identifier: Apache-2.0
"""Schemas of much work cost their own client time, and nobody else: neither answers nor memory."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import pytest

from blink.bench.burners import Burners
from blink.models.weights.files import default_model_path
from hostile_schemas import SCHEMAS, hostile_body
from processes import Engine, Frontend, children_of, resident_mib, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
_HONEST_SECONDS = 2.0  # that others may wait; usual are some hundredths
_SPARE_MIB = 64.0
_ANSWER_SECONDS = 5.0  # until one is refused or begins, where nothing else waits
_ALIKE = 6
_JSON = {"Content-Type": "application/json"}
_PATIENCE = 120.0
_LEAVE_SECONDS = 30.0  # less than what has been left would take
_SHORT = ["a pattern that backtracks, on a name", "references that double", "long lists without a common value"]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def frontend(tiny_engine: Engine) -> Iterator[Frontend]:
    frontend = start_frontend(tiny_engine.region, f"--tokenizer={default_model_path()}")
    frontend.complete("warm", max_tokens=1, structured_outputs={"choice": ["yes", "no"]})
    yield frontend
    stop(frontend.process)


def compilers(frontend: Frontend) -> list[int]:
    """The processes of a frontend that compile."""
    return children_of(frontend.process.pid, "blink.request.compile_child")


def memory_mib(frontend: Frontend) -> float:
    return sum(resident_mib(pid) for pid in [frontend.process.pid, *compilers(frontend)])


class Attack:
    """Clients that ask for hostile schemas all at once, and what they were answered."""

    def __init__(self, frontend: Frontend, bodies: Sequence[bytes], patience: float) -> None:
        self._frontend, self._patience = frontend, patience
        self.statuses: list[int | None] = []
        self._threads = [threading.Thread(target=self._send, args=(body,)) for body in bodies]

    def __enter__(self) -> Attack:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _send(self, body: bytes) -> None:
        url = f"{self._frontend.url}/v1/completions"
        try:
            status = httpx.post(url, content=body, headers=_JSON, timeout=self._patience, trust_env=False).status_code
        except httpx.ReadTimeout:  # this client leaves
            status = None
        self.statuses.append(status)


def ask_honestly(frontend: Frontend) -> float:
    """Ask for what others ask; return the longest that they wait."""
    number = next(_numbers)
    schema = {"type": "object", "properties": {f"fresh{number}": {"type": "boolean"}}}
    taken: list[float] = []
    for form in ({}, {"structured_outputs": {"json": schema}}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        started = time.monotonic()
        frontend.complete("Hello", max_tokens=1, **form)
        taken.append(time.monotonic() - started)
    started = time.monotonic()
    assert frontend.http.get("/health").status_code == 200
    return max(*taken, time.monotonic() - started)


def bodies_of(name: str, first: int = 0, count: int = _ALIKE) -> list[bytes]:
    return [hostile_body(name, first + number) for number in range(count)]


def test_others_are_answered_while_hostile_schemas_are_compiled_and_all_is_over_when_their_clients_leave(
    frontend: Frontend,
) -> None:
    before = memory_mib(frontend)
    with Attack(frontend, [body for name in _SHORT for body in bodies_of(name)], patience=1.5) as attack:
        waits = [ask_honestly(frontend)]
        while not attack.is_over:
            waits.append(ask_honestly(frontend))
    assert {status for status in attack.statuses if status is not None} <= {200, 400}
    assert max(waits) < _HONEST_SECONDS
    wait_for(lambda: len(compilers(frontend)) == 1, _LEAVE_SECONDS)
    assert ask_honestly(frontend) < _HONEST_SECONDS
    assert memory_mib(frontend) - before < _SPARE_MIB


def test_a_form_is_compiled_once_and_its_process_may_die_between(frontend: Frontend) -> None:
    form = {"structured_outputs": {"regex": "[0-9]{4}-(yes|no)"}}
    assert frontend.complete("a", max_tokens=1, **form)
    (child,) = compilers(frontend)
    os.kill(child, signal.SIGSTOP)
    assert frontend.complete("a", max_tokens=1, **form)  # known: no process is asked
    os.kill(child, signal.SIGKILL)
    assert frontend.complete("a", max_tokens=1, structured_outputs={"regex": "[0-9]{5}-(yes|no)"})
    assert compilers(frontend) != [child]


@contextmanager
def _beside(number: int) -> Iterator[None]:
    with Burners(number, ()):
        yield


@pytest.mark.long
@pytest.mark.parametrize("num_burners", [0, 2])
@pytest.mark.parametrize("name", list(SCHEMAS))
def test_six_of_each_kind_are_answered_and_nobody_else_waits(frontend: Frontend, name: str, num_burners: int) -> None:
    alone, *bodies = bodies_of(name, first=10 * (1 + num_burners), count=7)  # none that another test has asked for
    before, started = memory_mib(frontend), time.monotonic()
    assert frontend.http.post("/v1/completions", content=alone, headers=_JSON).status_code in (200, 400)
    assert time.monotonic() - started < _ANSWER_SECONDS
    started = time.monotonic()
    with _beside(num_burners), Attack(frontend, bodies, patience=5 * _PATIENCE) as attack:
        waits = [ask_honestly(frontend)]
        while not attack.is_over:
            waits.append(ask_honestly(frontend))
    print(f"{name}: answered in {time.monotonic() - started:.1f} s, others in {max(waits):.3f} s at most")
    assert set(attack.statuses) <= {200, 400, 503}  # 503 where this machine has no core for it
    assert max(waits) < _HONEST_SECONDS
    wait_for(lambda: len(compilers(frontend)) == 1, _PATIENCE)
    assert memory_mib(frontend) - before < _SPARE_MIB
