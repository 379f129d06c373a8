# SPDX-License-Identifier: Apache-2.0
"""Engine and frontend over RDMA, each killed and started again, and real HTTP requests before and after."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from blink.errors import EngineUnavailableError
from blink.verbs import Channel, Device
from rdma_processes import CountingProcess, HttpFrontend, ask, wait_for

pytestmark = pytest.mark.rdma


@pytest.fixture(scope="module")
def frontend(engine: CountingProcess) -> Iterator[HttpFrontend]:
    frontend = HttpFrontend(f"--rdma={engine.place}", "--region=recovery")
    frontend.wait()
    yield frontend
    frontend.stop()


def test_a_killed_engine_is_found_again(engine: CountingProcess, frontend: HttpFrontend) -> None:
    before = frontend.complete([5, 6, 7])
    engine.kill()
    wait_for(lambda: not frontend.is_healthy(), "503")
    engine.start()
    frontend.wait()
    assert frontend.complete([5, 6, 7]) == before != frontend.complete([5, 6, 8])


def test_a_killed_frontend_starts_again(engine: CountingProcess, frontend: HttpFrontend) -> None:
    before = frontend.complete([9, 6, 7])
    frontend.stop()
    frontend.start()
    frontend.wait()
    assert frontend.complete([9, 6, 7]) == before


def test_a_frontend_too_many_is_told_so_and_the_queue_pair_of_a_lost_one_comes_back() -> None:
    single = CountingProcess("single", num_queue_pairs=1, lease_timeout=0.5)
    first = HttpFrontend(f"--rdma={single.place}", "--region=single")
    first.wait()
    channel = Channel(Device())
    with pytest.raises(EngineUnavailableError, match="--num-queue-pairs"):
        ask(single.place, channel)
    channel.close()
    first.stop()
    gone = time.monotonic()
    first.start()
    first.wait()
    assert time.monotonic() - gone < 60
    first.stop()
    single.kill()
