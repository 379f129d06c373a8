# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need RDMA in one virtual machine with soft-RoCE, and reports each of them here under its name.

BLINK_TEST_RDMA=here runs them on this machine instead, which must have an RDMA device; the virtual machine does so.
BLINK_TEST_RDMA_ENGINE=HOST:PORT takes a counting engine that runs elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from early import begin_early
from groups import MACHINE
from guest import GuestRun, Outcome
from model_servers import ModelServers, default_model, tiny_model
from rdma_processes import CountingProcess, HttpFrontend
from two_machines import run_two_machines
from vm import end_all_machines

_HERE = os.environ.get("BLINK_TEST_RDMA") == "here"
_RIG = ThreadPoolExecutor(1, "rig")
_GUEST_RUN = pytest.StashKey[GuestRun]()
_TWO_MACHINES = pytest.StashKey[Future[Outcome]]()
_ELSEWHERE = os.environ.get("BLINK_TEST_RDMA_ENGINE")


class GuestTest(pytest.Item):
    """A test that runs in the virtual machine."""

    run: GuestRun

    def runtest(self) -> None:
        failure = self.run.failure_of(self.name)
        self.user_properties.append((MACHINE, self.run.packages()))
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _HERE:
        return
    run = GuestRun([item for item in items if item.get_closest_marker("rdma")])
    config.stash[_GUEST_RUN] = run
    for i, item in enumerate(items):
        if item.get_closest_marker("rdma") and isinstance(item.parent, pytest.Collector):
            items[i] = GuestTest.from_parent(item.parent, name=item.name)
            items[i].run = run  # type: ignore[attr-defined]
            items[i].add_marker(pytest.mark.timeout(2 * GuestRun.TIMEOUT))
    # Last, as their machines work while the other tests run here.
    items.sort(key=lambda item: Path(__file__).parent in item.path.parents)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Boot the machines early, one after the other: they work at a lower priority while other tests run here."""
    if _HERE or session.config.option.collectonly:
        return
    selected = [item for item in session.items if Path(__file__).parent in item.path.parents]
    if any(isinstance(item, GuestTest) for item in selected):
        begin_early(session.config, lambda: session.config.stash[_GUEST_RUN].begin(_RIG))
    if any("await_two_machines" in getattr(item, "fixturenames", ()) for item in selected):
        begin_early(session.config, lambda: _begin_two_machines(session.config))


def _begin_two_machines(config: pytest.Config) -> None:
    config.stash[_TWO_MACHINES] = _RIG.submit(run_two_machines)


def pytest_sessionfinish() -> None:
    _RIG.shutdown(wait=False, cancel_futures=True)
    end_all_machines()


@pytest.fixture
def await_two_machines(request: pytest.FixtureRequest) -> Callable[[], Outcome]:
    """Waits for the run across two machines."""
    return request.config.stash[_TWO_MACHINES].result


@pytest.fixture(scope="session")
def engine() -> Iterator[CountingProcess]:
    """A counting engine of this machine, which tests may kill and start."""
    engine = CountingProcess("rig")
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def engine_place(request: pytest.FixtureRequest) -> str:
    """Where a counting engine lets frontends in."""
    return _ELSEWHERE or request.getfixturevalue("engine").place


@pytest.fixture(scope="session")
def frontend(engine_place: str) -> Iterator[HttpFrontend]:
    """A frontend of the counting engine, which tests may kill and start."""
    frontend = HttpFrontend(f"--rdma={engine_place}", "--region=counting", "--skip-tokenizer-init")
    yield frontend
    frontend.kill()


@pytest.fixture(scope="session")
def single() -> Iterator[CountingProcess]:
    """An engine with one queue pair and a short lease."""
    engine = CountingProcess("single", num_queue_pairs=1, lease_timeout=3)
    yield engine
    engine.kill()


@pytest.fixture(scope="session")
def tiny_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServers]:
    """The servers of a tiny model."""
    servers = ModelServers(tiny_model(tmp_path_factory.mktemp("tiny")))
    yield servers
    servers.kill()


@pytest.fixture(scope="session")
def default_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServers]:
    """The servers of the default model."""
    servers = ModelServers(default_model(tmp_path_factory.mktemp("default")))
    yield servers
    servers.kill()


@pytest.fixture(scope="session", autouse=True)
def start_early(request: pytest.FixtureRequest) -> Any:
    """Start what takes long before the first test."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in ("tiny_servers", "default_servers", "frontend", "single"):
        if name in wanted:
            request.getfixturevalue(name)
