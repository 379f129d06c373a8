# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need RDMA in one virtual machine with soft-RoCE, and reports each of them here under its name.

BLINK_TEST_RDMA=here runs them on this machine instead, which must have an RDMA device; the virtual machine does so.
BLINK_TEST_RDMA_ENGINE=HOST:PORT takes a counting engine that runs elsewhere.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guest import GuestRun
from rdma_processes import CountingProcess, HttpFrontend, ModelEngine, ModelServers, free_port

_HERE = os.environ.get("BLINK_TEST_RDMA") == "here"
_ELSEWHERE = os.environ.get("BLINK_TEST_RDMA_ENGINE")


class GuestTest(pytest.Item):
    """A test that runs in the virtual machine."""

    run: GuestRun

    def runtest(self) -> None:
        failure = self.run.failure_of(self.name)
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _HERE:
        return
    run = GuestRun([item.name for item in items if item.get_closest_marker("rdma")])
    for i, item in enumerate(items):
        if item.get_closest_marker("rdma") and isinstance(item.parent, pytest.Collector):
            items[i] = GuestTest.from_parent(item.parent, name=item.name)
            items[i].run = run  # type: ignore[attr-defined]
            items[i].add_marker(pytest.mark.timeout(GuestRun.TIMEOUT + 60))


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
    frontend = HttpFrontend(f"--rdma={engine_place}", "--region=counting")
    yield frontend
    frontend.stop()


@pytest.fixture(scope="session")
def model_servers() -> Iterator[ModelServers]:
    """The default model's servers; they start while other tests run."""
    template = Path(tempfile.mkdtemp()) / "template"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    place, region = f"127.0.0.1:{free_port()}", "model"
    engine = ModelEngine(region, place)
    chat = f"--chat-template={template}"  # the model's own would double the prompts, and the rig is slow
    servers = ModelServers(
        engine,
        HttpFrontend(f"--rdma={place}", "--region=model-rdma", chat),
        HttpFrontend(f"--region={region}", chat),
    )
    yield servers
    for frontend in (servers.rdma, servers.shm):
        frontend.stop()
    engine.kill()


@pytest.fixture(scope="session", autouse=True)
def start_early(request: pytest.FixtureRequest) -> Any:
    """Start what takes long before the first test."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in ("model_servers", "frontend"):
        if name in wanted:
            request.getfixturevalue(name)
