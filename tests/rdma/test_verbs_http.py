# SPDX-License-Identifier: Apache-2.0
"""A real frontend process that reaches its engine by RDMA; then each of them is killed and started again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from blink.errors import EngineUnavailableError
from blink.link.rdma.verbs import Device
from blink.link.rdma.verbs_link import VerbsLink
from counting_engine import answer
from rdma_processes import CountingProcess, HttpFrontend, ask, attach, open_link, renewed, wait_for

pytestmark = pytest.mark.rdma


@pytest.mark.long
def test_http_requests_side_by_side_get_their_tokens(frontend: HttpFrontend) -> None:
    frontend.wait()
    prompts = [[100 + i, *range(i), 300 + i] for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: frontend.complete(prompt, 8), prompts))
    assert answers == [answer(prompt, 8) for prompt in prompts]


@pytest.mark.long
def test_a_killed_frontend_starts_again(frontend: HttpFrontend) -> None:
    frontend.wait()
    frontend.kill()
    frontend.start()
    frontend.wait()
    assert frontend.complete([9, 6, 7]) == answer([9, 6, 7], 4)


@pytest.mark.long
def test_a_killed_engine_is_found_again(engine: CountingProcess, frontend: HttpFrontend) -> None:
    frontend.wait()
    engine.kill()
    wait_for(lambda: not frontend.is_healthy(), "503")
    engine.start()
    frontend.wait()
    assert frontend.complete([5, 6, 7]) == answer([5, 6, 7], 4)


@pytest.mark.long  # an engine of its own starts for half of the others' time; shorter: unit/test_rdma_listener.py
def test_a_frontend_too_many_is_told_so_and_the_queue_pair_of_a_lost_one_comes_back(
    single: CountingProcess,
) -> None:
    first = open_link(single.place)
    pair = attach(first)
    late = VerbsLink(Device())
    with renewed(pair), pytest.raises(EngineUnavailableError, match="--num-queue-pairs"):
        ask(single.place, late)
    late.close()
    first.close()
    second = open_link(single.place)
    attach(second)
    second.close()
