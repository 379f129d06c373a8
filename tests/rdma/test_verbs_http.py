# SPDX-License-Identifier: Apache-2.0
"""A real frontend process that reaches its engine by RDMA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rdma_processes import HttpFrontend

pytestmark = pytest.mark.rdma


def test_http_requests_side_by_side_get_the_answers_of_each_alone(engine_place: str) -> None:
    frontend = HttpFrontend(f"--rdma={engine_place}", "--region=http")
    frontend.wait()
    prompts = [[100 + i, 200, 300 + i] for i in range(4)]
    alone = [frontend.complete(prompt, 8) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: frontend.complete(prompt, 8), prompts * 2))
    frontend.stop()
    assert together == alone * 2 and len(set(alone)) == len(prompts)
