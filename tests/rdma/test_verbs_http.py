# SPDX-License-Identifier: Apache-2.0
"""A real frontend process that reaches its engine by RDMA; then each of them is killed and started again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from blink.errors import EngineUnavailableError
from blink.verbs import Channel, Device
from rdma_processes import CountingProcess, HttpFrontend, ask, attach, open_connection, wait_for

pytestmark = pytest.mark.rdma


def test_http_requests_side_by_side_get_the_answers_of_each_alone(frontend: HttpFrontend) -> None:
    frontend.wait()
    prompts = [[100 + i, 200, 300 + i] for i in range(4)]
    alone = [frontend.complete(prompt, 8) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: frontend.complete(prompt, 8), prompts * 2))
    assert together == alone * 2 and len(set(alone)) == len(prompts)


def test_a_killed_frontend_starts_again(frontend: HttpFrontend) -> None:
    frontend.wait()
    before = frontend.complete([9, 6, 7])
    frontend.stop()
    frontend.start()
    frontend.wait()
    assert frontend.complete([9, 6, 7]) == before


def test_a_killed_engine_is_found_again(engine: CountingProcess, frontend: HttpFrontend) -> None:
    frontend.wait()
    before = frontend.complete([5, 6, 7])
    engine.kill()
    wait_for(lambda: not frontend.is_healthy(), "503")
    engine.start()
    frontend.wait()
    assert frontend.complete([5, 6, 7]) == before != frontend.complete([5, 6, 8])


def test_a_frontend_too_many_is_told_so_and_the_queue_pair_of_a_lost_one_comes_back(
    single: CountingProcess,
) -> None:
    first = open_connection(single.place)
    attach(first)
    channel = Channel(Device())
    with pytest.raises(EngineUnavailableError, match="--num-queue-pairs"):
        ask(single.place, channel)
    channel.close()
    first.close()
    second = open_connection(single.place)
    attach(second)
    second.close()
