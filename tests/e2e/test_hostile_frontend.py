# SPDX-License-Identifier: Apache-2.0
"""A real engine with two frontends, one of which lies: the other's answers stay what they are without it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blink.config import EngineConfig, ModelConfig
from blink.engine.thread import EngineThread
from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.region.layout import CqeKind, RejectCode
from blink.sampling_params import SamplingParams
from blink.text.prompt import hash_blocks, hash_root
from tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e
BLOCK = 16
PROMPT = np.arange(7, 7 + 60, dtype=np.int32)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[list[EngineClient]]:
    """Two frontends of an engine with a tiny model."""
    model = ModelConfig(
        model=str(write_tiny_model(tmp_path, vocab_size=96, max_position_embeddings=128)), load_format="dummy"
    )
    name = f"hostile-{os.getpid()}-{secrets.token_hex(3)}"
    config = EngineConfig(model=model, region=name, device="cpu", max_num_seqs=4, num_gpu_blocks_override=64)
    engine = EngineThread(config)
    clients = [EngineClient(ShmConnector(name), engine_timeout=60.0) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not all(client.ready for client in clients):
        assert time.monotonic() < deadline
        for client in clients:
            client.tick()
        time.sleep(0.01)
    yield clients
    for client in clients:
        client.close()
    engine.stop()


def answer(client: EngineClient, prompt: np.ndarray, hashed: np.ndarray) -> tuple[list[int], int]:
    """Ask for a prompt under the hashes of `hashed`; return the tokens and how many of the prompt were cached."""
    assert client.info is not None
    hashes = hash_blocks(hashed, BLOCK, client.info.hash_key, hash_root(client.info.hash_key))
    client.submit(prompt, GREEDY, seed=0, block_hashes=hashes)
    tokens, cached = [], -1
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        client.tick()
        for completion in client.drain():
            cached = int(completion["token"]) if completion["kind"] == CqeKind.ADMITTED else cached
            if completion["kind"] == CqeKind.TOKEN:
                tokens.append(int(completion["token"]))
            if completion["finish_reason"]:
                return tokens, cached
        time.sleep(0.002)
    raise AssertionError("the sequence did not end")


def test_a_forged_prefix_changes_no_answer(clients: list[EngineClient]) -> None:
    hostile, honest = clients
    unhashed = np.zeros(0, np.int32)
    expected, _ = answer(honest, PROMPT, unhashed)
    for forged in (PROMPT[::-1].copy(), np.concatenate([PROMPT[:16], PROMPT[:16], PROMPT[32:]])):
        own, _ = answer(hostile, forged, unhashed)
        assert answer(hostile, forged, PROMPT)[0] == own != expected
        assert answer(honest, PROMPT, PROMPT)[0] == expected
        assert answer(honest, PROMPT, PROMPT) == (expected, 48)


def test_a_bias_that_is_no_number_is_refused_and_the_engine_goes_on(clients: list[EngineClient]) -> None:
    hostile, honest = clients
    expected, _ = answer(honest, PROMPT, PROMPT)
    params = SamplingParams(max_tokens=4, temperature=1.0, min_p=0.1, logit_bias={1: 1.0})
    object.__setattr__(params, "logit_bias", {1: float("nan")})  # past the check that an honest frontend makes
    hostile.submit(PROMPT, params, seed=0)
    refusal = None
    deadline = time.monotonic() + 60
    while refusal is None and time.monotonic() < deadline:
        hostile.tick()
        for completion in hostile.drain():
            refusal = (CqeKind(int(completion["kind"])), RejectCode(int(completion["token"])))
        time.sleep(0.002)
    assert refusal == (CqeKind.REJECTED, RejectCode.BIAS_VALUE)
    assert answer(honest, PROMPT, PROMPT)[0] == expected
