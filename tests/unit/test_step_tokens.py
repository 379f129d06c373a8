# SPDX-License-Identifier: Apache-2.0
"""The histogram of steps' tokens: from a trace ring that the test writes, through a real region, to /metrics."""

from __future__ import annotations

import os
import random
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import NUM_VALUES, Metrics
from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.region.layout import CONTROL, EngineState
from blink.region.memory import Region, create_region, publish_region
from blink.region.report import RegionReport
from blink.region.step_tokens import BOUNDS, STATS, StepTokens


@pytest.fixture
def region() -> Iterator[Region]:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, num_queue_pairs=1)
    name = f"steps-{os.getpid()}-{secrets.token_hex(3)}"
    region = create_region(name, build_geometry(config, max_model_len=64, vocab_size=97, num_blocks=8), "m")
    publish_region(region, name)
    region.control["state"] = EngineState.READY
    yield region
    region.remove()
    region.close()


class Launches:
    """Writes the trace ring as the scheduler does."""

    def __init__(self, region: Region) -> None:
        self.ring = region.trace()
        self.step = 0

    def launch(self, tokens: int, segment: int = 0) -> None:
        self.end()
        self.step += 1
        entry = self.ring[self.step % len(self.ring)]
        entry["step"], entry["num_tokens"], entry["segment"], entry["ended_ns"] = self.step, tokens, segment, 0

    def end(self) -> None:
        if self.step:
            self.ring[self.step % len(self.ring)]["ended_ns"] = 1


def counted(region: Region) -> int:
    return int(region.control["step_tokens"][:-1].sum())


def test_the_region_has_room_for_the_buckets() -> None:
    assert CONTROL["step_tokens"].shape == (len(STATS),) == (len(BOUNDS) + 2,)


def test_steps_are_counted_once_as_prometheus_would(region: Region, tmp_path: Path) -> None:
    rng, launches, counter, now = random.Random(1), Launches(region), StepTokens(region), 0.0
    registry = CollectorRegistry()
    expected = Histogram("vllm:iteration_tokens_total", "x", buckets=BOUNDS, registry=registry)
    for _ in range(9):
        for _ in range(rng.randrange(1500)):
            tokens = rng.choice([1, 2, 8, 9, 33, 512, 513, 16384, 20000])
            launches.launch(tokens)
            expected.observe(tokens)
        launches.end()
        now += 0.6
        counter.look(now)
    store = MetricStore("steps", NUM_VALUES, tmp_path)
    report = RegionReport(region.path.name.removeprefix("blink-"))
    shown = samples(Metrics(store, [report.stats]).render())
    store.close()
    report.close()
    assert shown == samples(generate_latest(registry))
    assert shown["iteration_tokens_total_count", ""] == launches.step


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Return the histogram's values by name and bound."""
    found: dict[tuple[str, str], float] = {}
    for line in text.decode().splitlines():
        if line.startswith("vllm:iteration_tokens_total_") and "_created" not in line:
            name, value = line.removeprefix("vllm:").split(" ")
            bound = re.search(r'le="([^"]+)"', name)
            found[name.partition("{")[0], bound[1] if bound else ""] = float(value)
    return found


def test_what_runs_is_counted_when_it_has_ended_and_a_step_of_segments_once(region: Region) -> None:
    launches, counter = Launches(region), StepTokens(region)
    launches.launch(5)
    launches.launch(7)
    counter.look(1.0)
    assert (counted(region), region.control["step_tokens"][-1]) == (1, 5)
    launches.launch(9, segment=0)
    launches.launch(9, segment=1)
    launches.launch(9, segment=2)
    launches.end()
    counter.look(1.1)  # too soon
    assert counted(region) == 1
    counter.look(1.6)
    assert (counted(region), region.control["step_tokens"][-1]) == (3, 21)


def test_what_has_left_the_ring_is_not_counted_and_nothing_is_counted_twice(region: Region) -> None:
    launches, counter = Launches(region), StepTokens(region)
    for _ in range(3 * len(launches.ring) + 17):
        launches.launch(1)
    launches.end()
    counter.look(1.0)
    first = counted(region)
    assert len(launches.ring) - 2 <= first <= len(launches.ring)
    counter.look(2.0)
    assert counted(region) == first
