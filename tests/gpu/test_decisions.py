# SPDX-License-Identifier: Apache-2.0
"""The resident scheduler and the CPU build take the same decisions for the same arrivals and tokens."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.link.queue_pair import QueuePair, Submission
from blink.link.shm import ShmLink
from blink.region.layout import BATCH_HEADER, CONSTANTS, DECISION_LOG_ENTRY, DEVICE_PROGRAM, STEP_OUTPUT
from blink.region.memory import Region, create_region
from blink.region.native import lib
from blink.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 256
# Small enough that prompts are chunked, sequences preempted and blocks evicted.
CONFIG = EngineConfig(max_num_seqs=12, max_num_batched_tokens=64, num_queue_pairs=1, max_sequences_per_worker=16)
NUM_BLOCKS = 40


def next_token(last: Any, length: Any) -> Any:
    return (last * 31 + length * 7 + 1) % VOCAB_SIZE


def make_region() -> Region:
    geometry = build_geometry(
        CONFIG, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS, log_entries=1 << 14
    )
    return create_region(f"decide-{os.getpid()}-{secrets.token_hex(3)}", geometry, "fake")


def submit_all(pair: QueuePair) -> list[int]:
    """Submit as many sequences as one pass takes, so that both builds see the same arrivals."""
    chance = np.random.default_rng(3)
    common = chance.integers(0, VOCAB_SIZE, 32)
    sequences: list[int] = []
    for i in range(16):
        own = chance.integers(0, VOCAB_SIZE, int(chance.integers(1, 90)))
        prompt = np.concatenate([common, own] if i % 2 else [own]).astype(np.int32)
        hashes = b"".join(bytes([7, j]) * 8 for j in range(2)) if i % 2 else b""
        params = SamplingParams(max_tokens=int(chance.integers(1, 60)), best_effort=i % 3 == 0)
        sequences.append(pair.submit(Submission(prompt, (), 0, hashes, len(sequences) % 3), params))
    return sequences


def drain_all(pair: QueuePair, advance: Callable[[], None]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    deadline = time.monotonic() + 60
    while pair.num_live:
        assert time.monotonic() < deadline
        advance()
        for completion in pair.drain():
            if completion["kind"] == 2:
                tokens.setdefault(int(completion["sequence"]), []).append(int(completion["token"]))
    return tokens


def run(region: Region, advance: Callable[[], None], start: Callable[[], None]) -> dict[int, list[int]]:
    try:
        pair = QueuePair(ShmLink(region, 0))
        pair.request_attach()
        advance()
        assert pair.is_attached()
        pair.start()
        submit_all(pair)
        start()
        return drain_all(pair, advance)
    finally:
        region.store_control("stop", 1)
        region.path.unlink()


def run_on_host() -> tuple[np.ndarray, dict[int, list[int]]]:
    region = make_region()
    state = HostState(region)
    batch, output = state.array("batch", BATCH_HEADER), state.array("output", STEP_OUTPUT)
    tokens = state.array("tokens", "i4").reshape(-1, MAX_MODEL_LEN)
    slots, lens, sampled = (state.array(name, "i4") for name in ("row_slots", "context_lens", "sampled_tokens"))

    def advance() -> None:
        if lib.blink_step(state.address, 10**9) == 2:
            rows = int(batch[0]["num_rows"])
            last = tokens[slots[:rows], lens[:rows] - 1]
            sampled[:rows] = next_token(last.astype(np.int64), lens[:rows])
            output[0]["done_step"] = batch[0]["step"]

    found = run(region, advance, lambda: None)
    return state.array("log", DECISION_LOG_ENTRY).copy(), found


def run_on_device() -> tuple[np.ndarray, dict[int, list[int]]]:
    from blink.engine.device_scheduler import DeviceScheduler, DeviceState

    region = make_region()
    state = DeviceState(region, torch.device("cuda", 0))
    scheduler = DeviceScheduler(state)
    tokens = state.array("tokens", torch.int32).view(-1, MAX_MODEL_LEN)
    slots, lens, sampled = (state.array(n, torch.int32) for n in ("row_slots", "context_lens", "sampled_tokens"))

    def compute() -> None:
        last = tokens[slots.long(), (lens - 1).clamp(min=0).long()]
        sampled.copy_(next_token(last.long(), lens))

    compute()
    torch.cuda.synchronize()
    for index in range(int(region.geometry["num_graphs"])):
        scheduler.capture(index, compute)
    started = False

    def advance() -> None:
        if not started:
            scheduler.run_passes(2)

    def start() -> None:
        nonlocal started
        started = True
        scheduler.start()

    found = run(region, advance, start)
    torch.cuda.synchronize()
    windows = scheduler._program.cpu().numpy().view(DEVICE_PROGRAM)["windows"]
    launches = int(region.control["statistics"]["num_steps"])
    assert windows == launches // CONSTANTS["launches_per_window"], "the scheduler restarts after each window"
    state.close(region)
    log = state.array("log", torch.uint8).cpu().numpy().view(DECISION_LOG_ENTRY)
    return log, found


def test_device_and_host_decide_alike() -> None:
    host_log, host_tokens = run_on_host()
    device_log, device_tokens = run_on_device()
    assert sorted(host_tokens.values()) == sorted(device_tokens.values())
    assert host_log["step"].max() > 50
    np.testing.assert_array_equal(host_log, device_log)
