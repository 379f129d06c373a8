# SPDX-License-Identifier: Apache-2.0
"""One client asks for as many automata at once as an engine holds, each for a long answer; another's requests go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from blink.models.weights.files import default_model_path
from blink.region.layout import CONSTANTS
from processes import Frontend, answers, run_engine, start_frontend, stop, wait_for
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

PLACES = CONSTANTS["max_automata"]
REQUESTS = PLACES + 12
LENGTH = 900  # tokens of an answer: no one ends before the other client has its own
_PATIENCE = 300.0  # seconds; reached only by failures


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    if not default_model_path().is_file():
        pytest.skip("the default model, whose vocabulary the engine has, is not downloaded")
    model = [str(write_tiny_model(tmp_path_factory.mktemp("automata"))), "--load-format=dummy"]
    model += [f"--tokenizer={default_model_path()}", "--max-model-len=1024", "--num-gpu-blocks-override=16384"]
    sizes = [f"--max-num-seqs={2 * PLACES}", f"--max-sequences-per-worker={4 * PLACES}"]
    with run_engine(*model, *sizes) as engine:
        keys = ("--api-key=greedy", "--api-key=modest", "--api-key=third")
        frontend = start_frontend(engine.region, *keys, "--max-client-share=0.5", wait=False)
        try:
            wait_for(lambda: answers(frontend) == 200, _PATIENCE)
            yield frontend
        finally:
            stop(frontend.process)


def ask(frontend: Frontend, key: str, form: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{frontend.url}/v1/completions",
        json={"prompt": "Hi", "structured_outputs": form, **fields},
        headers={"Authorization": f"Bearer {key}"},
        timeout=_PATIENCE,
        trust_env=False,
    )
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def flood(frontend: Frontend) -> Iterator[list[int]]:
    """Keep all of a client's requests open; yields the numbers of those that have ended."""
    over, ended = threading.Event(), list[int]()

    def hold(index: int) -> None:
        body: dict[str, Any] = {"prompt": "Hi", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        body["structured_outputs"] = {"regex": f"[a-z{index % 10}]{{{LENGTH},}}{'x' * (index // 10 + 1)}"}
        headers = {"Authorization": "Bearer greedy"}
        with (
            httpx.Client(base_url=frontend.url, headers=headers, timeout=_PATIENCE, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            for _ in response.iter_lines():
                if over.is_set():
                    return
        ended.append(index)

    threads = [threading.Thread(target=hold, args=(index,)) for index in range(REQUESTS)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_another_clients_automaton_finds_a_place_beside_as_many_as_the_engine_holds(frontend: Frontend) -> None:
    with flood(frontend) as ended:
        wait_for(lambda: frontend.metric("blink:num_automata_used") >= PLACES // 2, _PATIENCE)
        wait_for(lambda: frontend.metric("vllm:num_requests_waiting") >= REQUESTS - PLACES // 2, _PATIENCE)
        for key, word in (("modest", "aa"), ("third", "cc")):
            found = ask(frontend, key, {"choice": [word, "bb"]}, max_tokens=8)["choices"][0]["text"]
            assert found in (word, "bb")
        assert frontend.metric("blink:num_automata_used") <= PLACES // 2 + 2
        assert ended == [], "they were answered before any of the first client's answers was complete"
