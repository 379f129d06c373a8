# SPDX-License-Identifier: Apache-2.0
"""The GPU engine whole: device and host take the same decisions, and a stopped host process stops no token."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An engine process with random weights; yields it and its region."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    region = f"gpu-{os.getpid()}-{secrets.token_hex(3)}"
    flags = [f"--model={tmp_path}", "--load-format=dummy", "--device=cuda", f"--region={region}"]
    process = subprocess.Popen([sys.executable, "-m", "blink", "engine", *flags, "--num-gpu-blocks-override=32768"])
    yield process, region
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        assert process.wait(20) == 0
    finally:
        process.kill()


def connect(region: str, process: subprocess.Popen[bytes]) -> EngineClient:
    client = EngineClient(ShmConnector(region), engine_timeout=3.0)
    deadline = time.monotonic() + 120
    while not client.ready:
        assert process.poll() is None, "the engine ended"
        assert time.monotonic() < deadline, client.unavailable_reason
        client.tick()
        time.sleep(0.05)
    return client


def arrivals(client: EngineClient, seconds: float) -> tuple[dict[int, list[int]], np.ndarray]:
    """Drain for a while; return each sequence's token ordinals and all times (ns of the GPU) between its tokens."""
    ordinals: dict[int, list[int]] = {}
    times: dict[int, list[int]] = {}
    end = time.monotonic() + seconds
    next_tick = 0.0
    while time.monotonic() < end:
        if time.monotonic() >= next_tick:
            next_tick = time.monotonic() + 0.25
            assert client.tick() is None
        for completion in client.drain():
            if completion["kind"] == 2:
                ordinals.setdefault(int(completion["sequence"]), []).append(int(completion["index"]))
                times.setdefault(int(completion["sequence"]), []).append(int(completion["time_ns"]))
        time.sleep(0.0005)
    return ordinals, np.concatenate([np.diff(stamps) for stamps in times.values() if len(stamps) > 1])


def test_tokens_flow_on_while_the_host_process_is_stopped(engine: tuple[subprocess.Popen[bytes], str]) -> None:
    process, region = engine
    client = connect(region, process)
    endless = SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0.0)
    prompt = np.arange(100, 140, dtype=np.int32)
    sequences = [client.submit(prompt, endless, seed=1) for _ in range(64)]
    arrivals(client, 1.0)

    running, before = arrivals(client, 1.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    frozen_ordinals, frozen = arrivals(client, 1.5)
    assert "State:\tT" in Path(f"/proc/{process.pid}/status").read_text()
    process.send_signal(signal.SIGCONT)

    assert set(running) == set(frozen_ordinals) == set(sequences)
    for ordinals in frozen_ordinals.values():
        assert ordinals == list(range(ordinals[0], ordinals[0] + len(ordinals)))
    rate = [np.sum([len(o) for o in found.values()]) for found in (running, frozen_ordinals)]
    assert rate[1] > 0.95 * rate[0]
    assert np.percentile(frozen, 99) < 1.05 * np.percentile(before, 99)
    for sequence in sequences:
        client.cancel(sequence)
    client.close()


def test_the_engine_process_sleeps_while_it_serves(engine: tuple[subprocess.Popen[bytes], str]) -> None:
    process, region = engine
    client = connect(region, process)
    endless = SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0.0)
    for _ in range(8):
        client.submit(np.arange(100, 140, dtype=np.int32), endless, seed=1)
    before = cpu_seconds(process.pid)
    arrivals(client, 4.0)
    assert cpu_seconds(process.pid) - before <= 0.02  # half a percent of one core
    client.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
