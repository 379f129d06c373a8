# SPDX-License-Identifier: Apache-2.0
"""A server whose engine has two ranks: it answers as one with a single rank does, also after it was stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from served import PATIENCE, Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

_FLAGS = ["--engine-timeout=60", "--cpu-threads=2"]
_BODIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24},
    {"prompt": "Twice", "temperature": 0.8, "seed": 3, "n": 3, "max_tokens": 16},
    {"prompt": "A number:", "temperature": 0, "max_tokens": 12, "structured_outputs": {"regex": "[0-9]{3,8}"}},
    {"prompt": "The end", "temperature": 0, "max_tokens": 8, "logprobs": 2, "echo": True},
]
_LONG = {"prompt": "Go on", "temperature": 0, "max_tokens": 150, "ignore_eos": True}


def ask(server: Served, body: dict[str, Any]) -> list[str]:
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    choices = httpx.post(url, json=body, timeout=PATIENCE, trust_env=False).raise_for_status().json()["choices"]
    return [choice["text"] for choice in choices]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    with served(tmp_path_factory.mktemp("one"), *_FLAGS) as server:
        return [ask(server, body) for body in (*_BODIES, _LONG)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("two"), "--tensor-parallel-size=2", *_FLAGS) as server:
        yield server


def test_two_ranks_answer_as_one(ranks: Served, expected: list[list[str]]) -> None:
    assert [ask(ranks, body) for body in _BODIES] == expected[:-1]


def test_an_engine_that_was_stopped_goes_on(ranks: Served, expected: list[list[str]]) -> None:
    engine, answers = ranks.child("engine"), list[list[str]]()
    asking = threading.Thread(target=lambda: answers.append(ask(ranks, _LONG)))
    asking.start()
    for _ in range(3):
        time.sleep(0.05)
        os.kill(engine, signal.SIGSTOP)
        time.sleep(1)
        os.kill(engine, signal.SIGCONT)
    asking.join(PATIENCE)
    assert answers == expected[-1:]
    assert not ranks.says("did not come")


def test_an_engine_that_dies_comes_back_with_its_ranks(ranks: Served, expected: list[list[str]]) -> None:
    back = ranks.was_back()
    os.kill(ranks.child("engine"), signal.SIGKILL)
    ranks.wait_until_back(back)
    assert ask(ranks, _BODIES[0]) == expected[0]
