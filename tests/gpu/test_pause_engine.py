# SPDX-License-Identifier: Apache-2.0
"""A GPU engine is paused and goes on, by queue pair entries alone: its host process is stopped all the while."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blink import SamplingParams
from blink.link.client import EngineClient
from blink.link.pause import Pause, Resume
from blink.region.layout import CqeKind, FinishReason
from engine_process import connect, run_engine_process, stopped

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_SEQUENCES, NUM_TOKENS, PATIENCE = 4, 400, 60.0


class Load:
    """Sequences of one client, and what has come of them."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
        for number in range(NUM_SEQUENCES):
            prompt = np.arange(100 + number, 160 + number, dtype=np.int32)
            self.tokens[client.submit(prompt, params, seed=0)] = []

    def drain(self) -> None:
        for entry in self.client.drain():
            sequence = int(entry["sequence"])
            if entry["kind"] == CqeKind.TOKEN:
                self.tokens[sequence].append(int(entry["token"]))
            if entry["finish_reason"]:
                self.reasons[sequence] = FinishReason(int(entry["finish_reason"]))

    def wait(self, condition: Callable[[], bool]) -> float:
        """Take completions until something is so; return the seconds."""
        start, next_tick = time.monotonic(), 0.0
        while not condition():
            now = time.monotonic()
            assert now < start + PATIENCE
            if now >= next_tick:
                next_tick = now + 0.25
                assert self.client.tick() is None
            self.drain()
        return time.monotonic() - start

    def has_begun(self) -> bool:
        return all(len(tokens) > 20 for tokens in self.tokens.values())

    def has_ended(self) -> bool:
        return len(self.reasons) == NUM_SEQUENCES

    def pause(self, mode: str) -> float:
        pause = Pause(self.client, mode, clears_cache=False)
        return self.wait(lambda: pause.has_begun)

    def resume(self) -> None:
        resume = Resume(self.client)
        self.wait(lambda: resume.is_done)


def test_a_paused_engine_launches_nothing_and_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    with run_engine_process(tmp_path, "--dtype=float32", "--num-gpu-blocks-override=4096") as (process, region):
        client = connect(region, process)
        whole = Load(client)
        whole.wait(whole.has_ended)
        with stopped(process):
            for mode in ("keep", "retract"):
                load = Load(client)
                load.wait(load.has_begun)
                seconds = load.pause(mode)
                load.drain()
                assert client.is_paused and not load.has_ended(), f"it ended before the pause came: {seconds} s"
                steps = client.stats()["num_steps"]
                start = time.monotonic()
                load.wait(lambda start=start: time.monotonic() > start + 0.5)
                assert client.stats()["num_steps"] == steps
                load.resume()
                load.wait(load.has_ended)
                assert [*load.tokens.values()] == [*whole.tokens.values()]
                print(f"{mode}: acknowledged after {seconds * 1e3:.2f} ms")
            load = Load(client)
            load.wait(load.has_begun)
            load.pause("abort")
            load.wait(load.has_ended)
            assert {*load.reasons.values()} == {FinishReason.ABORT}
            load.resume()
        client.close()
