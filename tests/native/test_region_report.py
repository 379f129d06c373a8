# SPDX-License-Identifier: Apache-2.0
"""Regions as those see them who only look: found, read, never held."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from blink.errors import ConfigError, EngineUnavailableError
from blink.link.queue_pair import QueuePair
from blink.region import report
from blink.region.report import RegionReport, only_region, served_regions
from blink.sampling_params import SamplingParams
from harness import Harness, Inbox, run_until_finished, running, small_config, submission


@pytest.fixture
def machine() -> Iterator[tuple[Harness, QueuePair, str]]:
    with running(small_config(), trace_entries=8) as h:
        yield h, h.frontend(), h.region.path.name.removeprefix("blink-")


def generate(h: Harness, pair: QueuePair, count: int) -> None:
    sequence = pair.submit(submission([1, 2, 3]), SamplingParams(max_tokens=count))
    run_until_finished(h, Inbox(), [pair], [sequence])


def test_the_statistics_are_the_engines_and_the_heartbeat_and_scale_too(
    machine: tuple[Harness, QueuePair, str],
) -> None:
    h, pair, name = machine
    seen = RegionReport(name)
    generate(h, pair, 5)
    stats = seen.stats()
    assert (stats["generation_tokens"], stats["num_steps"], stats["block_size"]) == (5, 5, 8)
    assert stats["heartbeat"] == h.region.heartbeat() and seen.model == "test"
    seen.close()


def test_the_trace_is_the_end_of_the_ring_in_order_without_what_may_be_overwritten(
    machine: tuple[Harness, QueuePair, str],
) -> None:
    h, pair, name = machine
    seen = RegionReport(name)
    assert len(seen.trace()) == 0
    generate(h, pair, 5)
    assert seen.trace()["step"].tolist() == [1, 2, 3, 4, 5]
    generate(h, pair, 8)  # 13 steps in a ring of 8
    steps = seen.trace()["step"].tolist()
    assert steps == [*range(steps[0], 14)] and 5 < steps[0] <= 8
    seen.close()


def test_only_regions_of_living_engines_are_found(
    machine: tuple[Harness, QueuePair, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    h, _, name = machine
    assert name in served_regions()
    monkeypatch.setattr(report, "served_regions", lambda: [name])
    assert only_region() == name
    monkeypatch.setattr(report, "served_regions", lambda: [name, "other"])
    with pytest.raises(ConfigError, match=f"choose one with --region: {name}, other"):
        only_region()
    monkeypatch.setattr(report, "served_regions", list[str])
    with pytest.raises(ConfigError, match="start one with `blink serve`, or give --url"):
        only_region(", or give --url")
    monkeypatch.undo()
    h.region.close()  # the engine dies, its file stays
    assert name not in served_regions()


def test_a_truncated_region_is_an_error_and_not_the_end_of_the_process(machine: tuple[Harness, QueuePair, str]) -> None:
    h, _, name = machine
    seen = RegionReport(name)
    size = os.fstat(h.region.fd).st_size
    os.truncate(h.region.path, 0)
    with pytest.raises(EngineUnavailableError, match="truncated"):
        seen.stats()
    with pytest.raises(EngineUnavailableError, match="truncated"):
        RegionReport(name)
    os.truncate(h.region.path, size)
    seen.close()
