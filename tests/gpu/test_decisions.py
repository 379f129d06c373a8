# SPDX-License-Identifier: Apache-2.0
"""The resident scheduler and the CPU build take the same decisions for the same arrivals and tokens."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.engine.state import HostState
from blink.link.queue_pair import KvOrigin, QueuePair, Submission
from blink.link.shm import ShmLink
from blink.region.layout import (
    BATCH_HEADER,
    CONSTANTS,
    DECISION_LOG_ENTRY,
    DEVICE_PROGRAM,
    GRAPH_COST,
    STEP_OUTPUT,
    StepKind,
    StepResult,
)
from blink.region.memory import Region, create_region
from blink.region.native import lib
from blink.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 256
# Small enough that prompts are chunked, sequences preempted and blocks evicted.
CONFIG = EngineConfig(max_num_seqs=12, max_num_batched_tokens=64, num_queue_pairs=1, max_sequences_per_worker=16)
DRAFTING = replace(CONFIG, speculative_config='{"method": "ngram", "num_speculative_tokens": 4}')
SUFFIX = replace(CONFIG, speculative_config='{"method": "suffix", "suffix_decoding_max_cached_requests": 8}')
NUM_BLOCKS = 40
NUM_TEXTS = 12  # so many sequences, and others that have the prompt of one of these


def next_token(last: Any, length: Any) -> Any:
    return (last * 31 + length * 7 + 1) % VOCAB_SIZE


SEGMENTS = 3
TARGET_NS = 120_000  # between tokens of urgent sequences; a step of the fake model takes some 20 us


def make_region(config: EngineConfig, *, costed: bool) -> Region:
    geometry = build_geometry(
        config, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS, log_entries=1 << 14
    )
    if costed:
        geometry["segment_ns"], geometry["urgent_tpot_target_ns"] = 20_000, TARGET_NS
    return create_region(f"decide-{os.getpid()}-{secrets.token_hex(3)}", geometry, "fake")


def make_costs(region: Region) -> np.ndarray:
    """Return a table that is wrong at first, so that what steps take moves it, and with it the decisions."""
    costs = np.zeros(int(region.geometry["num_graphs"]), GRAPH_COST)
    costs["base_ns"] = 30_000 + 10_000 * np.arange(len(costs))
    costs["num_segments"] = SEGMENTS
    return costs


def submit_all(pair: QueuePair) -> list[int]:
    """Submit as many sequences as one pass takes, so that both builds see the same arrivals."""
    chance = np.random.default_rng(3)
    common = chance.integers(0, VOCAB_SIZE, 32)
    sequences, prompts = list[int](), list[np.ndarray]()
    for i in range(16):
        own = chance.integers(0, VOCAB_SIZE, int(chance.integers(1, 90)))
        prompts.append(np.concatenate([common, own] if i % 2 else [own]).astype(np.int32))
        prompt = prompts[i % NUM_TEXTS]
        hashes = b"".join(bytes([7, j]) * 8 for j in range(2)) if i % 2 else b""
        params = SamplingParams(max_tokens=int(chance.integers(1, 60)), best_effort=i % 3 == 0)
        prediction = predict(prompt) if i % 4 and i < NUM_TEXTS else []
        flow, root = len(sequences) % 3, bytes([1]) * 16
        entry = Submission(prompt, (), 0, hashes, flow, KvOrigin(root), prediction=prediction)
        sequences.append(pair.submit(entry, params))
    return sequences


def predict(prompt: np.ndarray) -> list[int]:
    """Return what follows a prompt, but for each ninth token."""
    answer, last = list[int](), int(prompt[-1])
    for length in range(len(prompt), len(prompt) + 60):
        last = int(next_token(last, length))
        answer.append(last if length % 9 else 0)
    return answer


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


def run_on_host(config: EngineConfig, trace: np.ndarray | None) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Run at a clock that stands, or replay a trace and its table of costs."""
    region = make_region(config, costed=trace is not None)
    state = HostState(region)
    if trace is not None:
        state.array("costs", GRAPH_COST)[:] = make_costs(region)
    tokens = state.array("tokens", "i4").reshape(-1, MAX_MODEL_LEN)
    launches = iter([] if trace is None else trace[["retired_ns", "launched_ns"]].tolist())

    def compute() -> None:
        kind = StepKind(int(state.struct["in_flight_kind"]))
        batch = state.array(kind.array("header"), BATCH_HEADER)[0]
        output = state.array(kind.array("output"), STEP_OUTPUT)
        if kind == StepKind.WHOLE or batch["segment"] == SEGMENTS - 1:
            rows = int(batch["num_rows"])
            names = ("row_slots", "context_lens", "sampled_tokens")
            slots, lens, sampled = (state.array(kind.array(name), "i4")[:rows] for name in names)
            sampled[:] = next_token(tokens[slots, lens - 1].astype(np.int64), lens)
        output[0]["done_step"] = batch["step"]

    def advance() -> None:
        if state.struct["booted"] and trace is not None:
            now, launched = next(launches, (int(trace[-1]["launched_ns"]) + 10**6,) * 2)
            result = lib.blink_step_replayed(state.address, now, launched)
        else:
            result = lib.blink_step(state.address, 10**9)
        if result == StepResult.LAUNCHED:
            compute()

    found = run(region, advance, lambda: None)
    return state.array("log", DECISION_LOG_ENTRY).copy(), found


def run_on_device(config: EngineConfig, *, costed: bool) -> tuple[np.ndarray, dict[int, list[int]], np.ndarray]:
    from blink.engine.device_scheduler import DeviceScheduler, DeviceState

    region = make_region(config, costed=costed)
    state = DeviceState(region, torch.device("cuda", 0))
    scheduler = DeviceScheduler(state)
    if costed:
        state.array("costs", torch.uint8).copy_(torch.from_numpy(make_costs(region).view("u1")))
    tokens = state.array("tokens", torch.int32).view(-1, MAX_MODEL_LEN)

    def compute(kind: StepKind = StepKind.WHOLE) -> None:
        names = ("row_slots", "context_lens", "sampled_tokens")
        slots, lens, sampled = (state.array(kind.array(name), torch.int32) for name in names)
        last = tokens[slots.long(), (lens - 1).clamp(min=0).long()]
        sampled.copy_(next_token(last.long(), lens))

    scratch = torch.zeros(8, device=state.memory.device)

    def idle() -> None:
        scratch.add_(1)

    compute()
    idle()
    torch.cuda.synchronize()
    for index in range(int(region.geometry["num_graphs"])):
        scheduler.capture(index, compute)
        if costed:
            scheduler.capture_segments(index, [*[idle] * (SEGMENTS - 1), lambda: compute(StepKind.SEGMENTED)])
    started = False

    def advance() -> None:
        if not started:
            scheduler.run_passes(2)

    def start() -> None:
        nonlocal started
        started = True
        scheduler.prepare()
        scheduler.start()

    found = run(region, advance, start)
    torch.cuda.synchronize()
    windows = scheduler._program.cpu().numpy().view(DEVICE_PROGRAM)["windows"]
    trace = np.sort(region.trace(), order="step")
    trace = trace[trace["step"] > 0].copy()
    assert windows == len(trace) // CONSTANTS["launches_per_window"], "the scheduler restarts after each window"
    state.close(region)
    log = state.array("log", torch.uint8).cpu().numpy().view(DECISION_LOG_ENTRY)
    return log, found, trace


@pytest.mark.parametrize("costed", [False, True])
@pytest.mark.parametrize("config", [CONFIG, DRAFTING, SUFFIX], ids=["plain", "ngram", "suffix"])
def test_device_and_host_decide_alike(config: EngineConfig, costed: bool) -> None:
    """With a table of costs the device's times enter the decisions: the host is given those of its trace."""
    device_log, device_tokens, trace = run_on_device(config, costed=costed)
    host_log, host_tokens = run_on_host(config, trace if costed else None)
    assert sorted(host_tokens.values()) == sorted(device_tokens.values())
    assert host_log["step"].max() > (50 if config is CONFIG else 20)
    assert bool((trace["num_segments"] == SEGMENTS).any()) is costed
    np.testing.assert_array_equal(host_log, device_log)
