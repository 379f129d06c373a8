# SPDX-License-Identifier: Apache-2.0
"""The GPU engine whole: a stopped host process stops no token, and a running one sleeps.

That device and host decide alike is in test_decisions.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from blink import LLM, SamplingParams
from blink.link.client import EngineClient
from blink.region.layout import CqeKind
from engine_process import CONFIG, connect, run_engine_process, stopped

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = np.arange(100, 140, dtype=np.int32)
NUM_SEQUENCES, NUM_TOKENS = 64, 1500


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An engine process with random weights; yields it and its region."""
    with run_engine_process(tmp_path, "--num-gpu-blocks-override=32768") as running:
        yield running


def generate(client: EngineClient) -> np.ndarray:
    """Let equal sequences run from their start to their end; return the GPU's times of their tokens, one a row (ns)."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
    sequences = [client.submit(PROMPT, params, seed=1) for _ in range(NUM_SEQUENCES)]
    arrived: list[np.ndarray] = []
    num_open, deadline, next_tick = len(sequences), time.monotonic() + 60, 0.0
    while num_open:
        assert time.monotonic() < deadline, f"{num_open} sequences did not end"
        if time.monotonic() >= next_tick:
            next_tick = time.monotonic() + 0.25
            assert client.tick() is None
        completions = client.drain()
        num_open -= int((completions["finish_reason"] != 0).sum())
        arrived.append(completions[completions["kind"] == CqeKind.TOKEN].copy())
        time.sleep(0.0005)
    tokens = np.concatenate(arrived)
    rows = [tokens[tokens["sequence"] == sequence] for sequence in sequences]
    for row in rows:
        np.testing.assert_array_equal(row["index"], np.arange(NUM_TOKENS))
    return np.stack([row["time_ns"].astype(np.int64) for row in rows])


def test_tokens_flow_on_while_the_host_process_is_stopped(engine: tuple[subprocess.Popen[bytes], str]) -> None:
    """Compare whole lives of the same sequences, whose contexts grow alike, with the process running and stopped."""
    process, region = engine
    client = connect(region, process)
    generate(client)  # clocks rise, the prompt is cached
    running, frozen = list[np.ndarray](), list[np.ndarray]()
    for _ in range(3):
        running.append(generate(client))
        with stopped(process):
            frozen.append(generate(client))
    client.close()
    usual_life, frozen_life = (
        min(np.median(times[:, -1] - times[:, 0]) for times in lives) for lives in (running, frozen)
    )
    assert frozen_life < 1.02 * usual_life
    usual_gap, frozen_gap = (np.percentile(np.diff(np.concatenate(lives)), 99) for lives in (running, frozen))
    assert frozen_gap < 1.05 * usual_gap


def test_the_engine_process_sleeps_while_it_serves(engine: tuple[subprocess.Popen[bytes], str]) -> None:
    process, region = engine
    client = connect(region, process)
    endless = SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0.0)
    for _ in range(8):
        client.submit(PROMPT, endless, seed=1)
    before, end, num_tokens = cpu_seconds(process.pid), time.monotonic() + 4, 0
    while time.monotonic() < end:
        assert client.tick() is None
        num_tokens += int((client.drain()["kind"] == CqeKind.TOKEN).sum())
        time.sleep(0.002)
    assert num_tokens > 1000
    assert cpu_seconds(process.pid) - before <= 0.02  # half a percent of one core
    client.close()


def test_a_closed_engine_in_a_process_gives_back_the_gpus_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    total, free = torch.cuda.get_device_properties().total_memory, list[int]()
    for _ in range(2):
        with LLM(str(tmp_path), load_format="dummy", device="cuda", skip_tokenizer_init=True) as llm:
            found = llm.generate([{"prompt_token_ids": PROMPT.tolist()}], params, use_tqdm=False)
            assert len(found[0].outputs[0].token_ids) == 4
            assert torch.cuda.mem_get_info()[0] < total // 4  # the KV cache takes what the engine may have
        free.append(torch.cuda.mem_get_info()[0])
    assert min(free) > 0.95 * total
    assert free[0] - free[1] < 64 << 20  # cuBLAS keeps a workspace for each stream


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
