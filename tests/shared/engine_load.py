# SPDX-License-Identifier: Apache-2.0
"""Sequences that run on an engine, and calls that pause it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from blink import SamplingParams
from blink.link.client import EngineClient
from blink.link.pause import Pause, Resume
from blink.region.layout import CqeKind, FinishReason

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
