# SPDX-License-Identifier: Apache-2.0
"""A GPU engine that waits before its steps to save energy: its tokens and pace while its host process is stopped."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from blink import SamplingParams
from blink.link.client import EngineClient
from blink.region.layout import CqeKind
from engine_process import connect, run_engine_process, stopped

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS, RATE, TARGET_MS = 32.0, 40.0, 6.0


@dataclass
class Request:
    """A request of the load, and what came of it."""

    at: float  # seconds from the start of the load
    prompt: np.ndarray
    num_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)

    def tpot_ms(self) -> float:
        return (self.times_ns[-1] - self.times_ns[0]) / 1e6 / (len(self.times_ns) - 1)


def draw_requests() -> list[Request]:
    """Return Poisson arrivals, the same at each call."""
    chance, at, requests = random.Random(5), 0.0, list[Request]()
    while (at := at + chance.expovariate(RATE)) < SECONDS:
        length = chance.randrange(20, 200)
        prompt = np.array(chance.choices(range(10, 30000), k=length), dtype=np.int32)
        requests.append(Request(at, prompt, chance.randrange(40, 160), seed=len(requests)))
    return requests


def send(client: EngineClient, requests: list[Request]) -> None:
    """Submit requests at their times and take their tokens."""
    start, due, running, next_tick = time.monotonic(), list(requests), dict[int, Request](), 0.0
    while due or running:
        now = time.monotonic()
        assert now < start + SECONDS + 30, f"{len(running)} sequences did not end"
        if now >= next_tick:
            next_tick = now + 0.25
            assert client.tick() is None
        while due and start + due[0].at <= now:
            request = due.pop(0)
            params = SamplingParams(max_tokens=request.num_tokens, ignore_eos=True, temperature=0.8)
            running[client.submit(request.prompt, params, seed=request.seed)] = request
        for completion in client.drain():
            request = running[int(completion["sequence"])]
            if completion["kind"] == CqeKind.TOKEN:
                request.tokens.append(int(completion["token"]))
                request.times_ns.append(int(completion["time_ns"]))
            if completion["finish_reason"]:
                del running[int(completion["sequence"])]
        time.sleep(0.0005)


def test_a_paced_engine_gives_the_same_tokens_at_the_same_pace_while_its_process_is_stopped(tmp_path: Path) -> None:
    flags = ("--dtype=float32", "--num-gpu-blocks-override=16384", f"--tpot-target-ms={TARGET_MS}")
    with run_engine_process(tmp_path, *flags) as (process, region):
        client = connect(region, process)
        warm, running, frozen = (draw_requests() for _ in range(3))
        send(client, warm[:100])
        send(client, running)
        with stopped(process):
            send(client, frozen)
        client.close()
    assert all(len(request.tokens) == request.num_tokens for request in running)
    assert [request.tokens for request in frozen] == [request.tokens for request in running]
    usual, stopped_ms = (float(np.median([request.tpot_ms() for request in load])) for load in (running, frozen))
    print(f"TPOT p50 {usual:.3f} ms running, {stopped_ms:.3f} ms stopped")
    assert stopped_ms == pytest.approx(usual, rel=0.02)
    assert usual > TARGET_MS / 2  # it does wait: a step takes less than a millisecond
