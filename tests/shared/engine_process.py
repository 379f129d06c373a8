# SPDX-License-Identifier: Apache-2.0
"""A GPU engine in a process of its own, which a test may stop, and a client of it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from blink import SamplingParams
from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.region.layout import CqeKind
from processes import wait_for

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


@contextmanager
def run_engine_process(
    folder: Path, *flags: str, config: Mapping[str, Any] = CONFIG, program: Sequence[str] = ("-m", "blink")
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run an engine with random weights; yield it and its region, and expect that it ends well.

    program: what Python runs as `blink`.
    """
    (folder / "config.json").write_text(json.dumps(config))
    region = f"gpu-{os.getpid()}-{secrets.token_hex(3)}"
    command = [sys.executable, *program, "engine", f"--model={folder}", "--load-format=dummy", "--device=cuda"]
    process = subprocess.Popen([*command, f"--region={region}", *flags])
    yield process, region
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        assert process.wait(20) == 0
    finally:
        process.kill()


def connect(region: str, process: subprocess.Popen[bytes]) -> EngineClient:
    """Return a client when the engine is ready."""
    client = EngineClient(ShmConnector(region), engine_timeout=3.0)
    deadline = time.monotonic() + 120
    while not client.ready:
        assert process.poll() is None, "the engine ended"
        assert time.monotonic() < deadline, client.unavailable_reason
        client.tick()
        time.sleep(0.05)
    return client


def count_tokens(client: EngineClient, length: int) -> list[int]:
    """Return how many tokens four sequences of such a length are given."""
    params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
    prompts = [np.arange(100 + at, 140 + 2 * at, dtype=np.int32) for at in range(4)]
    counts = dict.fromkeys([client.submit(prompt, params, seed=1) for prompt in prompts], 0)
    deadline, num_open = time.monotonic() + 60, len(counts)
    while num_open:
        assert time.monotonic() < deadline
        assert client.tick() is None
        for completion in client.drain():
            counts[int(completion["sequence"])] += completion["kind"] == CqeKind.TOKEN
            num_open -= completion["finish_reason"] != 0
        time.sleep(0.001)
    return [*counts.values()]


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Keep a process stopped."""
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: "State:\tT" in Path(f"/proc/{process.pid}/status").read_text(), 10)
    yield
    process.send_signal(signal.SIGCONT)
