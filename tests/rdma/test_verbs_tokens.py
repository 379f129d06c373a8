# SPDX-License-Identifier: Apache-2.0
"""Real models over RDMA and over shared memory: greedy answers are the same."""

from __future__ import annotations

import pytest

from model_servers import ModelServers

pytestmark = pytest.mark.rdma


@pytest.mark.long
def test_tokens_of_a_tiny_model_over_rdma_equal_those_over_shared_memory(tiny_servers: ModelServers) -> None:
    answers = tiny_servers.answers()
    assert answers["rdma"] == answers["shm"]
    short, long = answers["shm"]
    assert len(short) == len(long) == 24 and short != long and len(set(short)) > 1


@pytest.mark.long
def test_greedy_answers_over_rdma_equal_those_over_shared_memory(default_servers: ModelServers) -> None:
    answers = default_servers.answers()
    assert answers["rdma"] == answers["shm"]
    assert all(len(answer) > 1 for answer in answers["shm"])
