# SPDX-License-Identifier: Apache-2.0
"""Real chat requests to the default model, over RDMA and over shared memory: greedy answers are the same."""

from __future__ import annotations

import threading

import pytest

from rdma_processes import ModelServers

pytestmark = pytest.mark.rdma

_QUESTIONS = ("Hello", "What is the capital of France?")


def test_greedy_answers_over_rdma_equal_those_over_shared_memory(model_servers: ModelServers) -> None:
    answers: dict[tuple[str, str], object] = {}

    def ask(way: str, question: str) -> None:
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": True,
        }
        frontend = getattr(model_servers, way)
        status, answer = frontend.request("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        choice = answer["choices"][0]
        answers[way, question] = [choice["message"]["content"], [t["token"] for t in choice["logprobs"]["content"]]]

    model_servers.wait()
    threads = [threading.Thread(target=ask, args=(way, q)) for way in ("rdma", "shm") for q in _QUESTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(answers)
    for question in _QUESTIONS:
        assert answers["rdma", question] == answers["shm", question]
