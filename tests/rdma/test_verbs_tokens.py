# SPDX-License-Identifier: Apache-2.0
"""Real chat requests to the default model, over RDMA and over shared memory: greedy answers are the same."""

from __future__ import annotations

import pytest

from model_servers import QUESTIONS, ModelServers

pytestmark = pytest.mark.rdma


def test_greedy_answers_over_rdma_equal_those_over_shared_memory(model_servers: ModelServers) -> None:
    answers = model_servers.answers()
    print(answers)
    for question in QUESTIONS:
        assert len(answers["shm", question]) > 1
        assert answers["rdma", question] == answers["shm", question]
