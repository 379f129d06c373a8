# SPDX-License-Identifier: Apache-2.0
"""What benchmarks do with an engine through a queue pair of their own."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from blink.link.client import EngineClient
from blink.link.shm import ShmConnector
from blink.region.layout import CqeKind
from blink.sampling_params import SamplingParams


def connect(region: str, is_alive: Callable[[], bool] = lambda: True) -> EngineClient:
    """Take a queue pair as soon as the engine is there; the lease then keeps itself for an hour.

    is_alive: whether the engine still starts.

    Raises:
        SystemExit: it does not.
    """
    client = EngineClient(ShmConnector(region), engine_timeout=5.0, lease_grace=3600)
    while not client.ready:
        if not is_alive():
            raise SystemExit("the engine ended before it was ready")
        client.tick()
        time.sleep(0.02)
    return client


def time_first_token(client: EngineClient, submit: Callable[[], int]) -> float:
    """Return the milliseconds from submission to a sequence's first token, once it has ended; submit returns its id."""
    start, found = time.perf_counter(), 0.0
    sequence = submit()
    while True:
        client.tick()
        for one in client.drain():
            if one["sequence"] == sequence and one["kind"] == CqeKind.TOKEN:
                found = found or (time.perf_counter() - start) * 1e3
            if one["sequence"] == sequence and one["finish_reason"] != 0:
                return found


def ping(client: EngineClient) -> tuple[int, int, int]:
    """Submit what the scheduler refuses in the pass that takes it: a sequence without a prompt.

    Returns host time before, the pass's time by the engine's clock, and host time after; in ns.
    """
    before = time.monotonic_ns()
    client.submit(np.zeros(0, np.int32), SamplingParams(max_tokens=1), seed=0)
    while not len(answers := client.drain()):
        pass
    after = time.monotonic_ns()
    assert answers[0]["kind"] == CqeKind.REJECTED
    return before, int(answers[0]["time_ns"]), after
