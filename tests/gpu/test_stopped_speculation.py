# SPDX-License-Identifier: Apache-2.0
"""Speculation needs no host: an engine whose process is stopped under load gives the tokens of a running one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_speculation_engine import SIZES, SPECULATIVE, ask, make_request, same

from engine_process import CONFIG, connect, run_engine_process, stopped

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]
SECONDS = 30


def test_drafts_are_verified_for_half_a_minute_while_the_process_is_stopped(tmp_path: Path) -> None:
    """In float32, where steps with drafts and without sample the same tokens; predictions are true and false ones."""
    flags = [f"--speculative-config={SPECULATIVE}", "--dtype=float32", "--num-gpu-blocks-override=1024"]
    flags += ["--max-num-seqs=8", "--max-num-batched-tokens=64"]
    with run_engine_process(tmp_path, *flags, config=CONFIG | SIZES) as (process, region):
        client = connect(region, process)
        plain = [make_request(number, 0.8) for number in range(8)]
        expected = ask(client, plain)
        predicted = [
            make_request(number, 0.8, prediction=answer.tokens if number % 2 else answer.tokens[::-1])
            for number, answer in enumerate(expected)
        ]
        with stopped(process):
            before, end, rounds = client.stats(), time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                same(ask(client, predicted), expected, logprobs=1e-3)
                rounds += 1
            after = client.stats()
        drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
        assert rounds > 10 and drafted > accepted > 100
        client.close()
