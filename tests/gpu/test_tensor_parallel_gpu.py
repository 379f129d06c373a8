# SPDX-License-Identifier: Apache-2.0
"""Two GPUs that share a model: the tokens and logprobs of transformers, while the host process runs and while not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blink import SamplingParams
from blink.engine import boot
from blink.link.client import EngineClient
from blink.region.layout import CqeKind
from engine_process import connect, run_engine_process, stopped
from model_families import check, generate, make_prompts, save_model
from triton_interpreter import IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(IS_INTERPRETED or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# What is not refused: no experts, recurrent layers or latents.
DENSE = ["llama-3.1", "llama-biased", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3-short", "olmo2", "granite"]
DENSE += ["opt", "olmo3", "smollm3", "seed_oss", "ernie4_5"]
_UNREFUSED = """
import sys
from blink.cli.main import main
from blink.engine import boot
boot.refuse_ranks = lambda config: None
sys.exit(main(sys.argv[1:]))
"""
PROMPTS = [*make_prompts()[2:5], make_prompts()[7]]


@pytest.mark.parametrize("name", DENSE)
def test_two_gpus_give_the_tokens_and_logprobs_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "refuse_ranks", lambda _: None)
    model = save_model(name, tmp_path)
    check(model, PROMPTS, generate(tmp_path, PROMPTS, "cuda", tensor_parallel_size=2))


def run_requests(client: EngineClient, count: int, tokens: int) -> list[list[int]]:
    """Return the tokens of greedy requests, each of its own prompt."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    prompts = np.random.default_rng(5).integers(10, 30000, (count, 30)).astype(np.int32)
    sequences = [client.submit(prompt, params, seed=1) for prompt in prompts]
    found: dict[Any, list[int]] = {sequence: [] for sequence in sequences}
    num_open, deadline = count, time.monotonic() + 60
    while num_open:
        assert time.monotonic() < deadline, f"{num_open} requests did not end"
        assert client.tick() is None
        completions = client.drain()
        num_open -= int((completions["finish_reason"] != 0).sum())
        for one in completions[completions["kind"] == CqeKind.TOKEN]:
            found[int(one["sequence"])].append(int(one["token"]))
    return [found[sequence] for sequence in sequences]


@pytest.mark.slow
def test_a_stopped_host_process_changes_no_token(tmp_path: Path) -> None:
    flags = "--num-gpu-blocks-override=8192", "--tensor-parallel-size=2", "--max-num-seqs=32"
    with run_engine_process(tmp_path, *flags, program=("-c", _UNREFUSED)) as (process, region):
        client = connect(region, process)
        running = run_requests(client, 24, 400)
        with stopped(process):
            frozen = run_requests(client, 24, 400)
        client.close()
    assert frozen == running
