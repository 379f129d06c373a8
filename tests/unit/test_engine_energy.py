# SPDX-License-Identifier: Apache-2.0
"""The energy that an engine tells of: from a GPU of the test's, through a real region, to the text of /metrics."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import NUM_VALUES, Metrics
from blink.config import EngineConfig
from blink.engine.energy import EnergyReport, report_energy
from blink.engine.geometry import build_geometry
from blink.errors import BlinkError
from blink.host import nvml
from blink.host.nvml import Gpu
from blink.region.layout import EngineState
from blink.region.memory import Region, create_region, publish_region
from blink.region.report import RegionReport


class CountingGpu(Gpu):
    """A GPU whose counter the test moves."""

    def __init__(self) -> None:
        self.joules: float | None = 7000.0

    def read_joules(self) -> float:
        if self.joules is None:
            raise BlinkError("NVML: GPU is lost")
        return self.joules


@pytest.fixture
def region() -> Iterator[Region]:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, num_queue_pairs=1)
    name = f"energy-{os.getpid()}-{secrets.token_hex(3)}"
    region = create_region(name, build_geometry(config, max_model_len=64, vocab_size=97, num_blocks=8), "m")
    publish_region(region, name)
    region.control["state"] = EngineState.READY
    yield region
    region.remove()
    region.close()


def scrape(region: Region, folder: Path) -> dict[str, float]:
    """Return the metrics of energy that a frontend shows, which reads the region's file."""
    report = RegionReport(region.path.name.removeprefix("blink-"))
    store = MetricStore("energy", NUM_VALUES, folder)
    text = Metrics(store, [report.stats]).render().decode()
    store.close()
    report.close()
    return {name: float(value) for name, value in re.findall(r"^blink:(\w*joules\w*)\{.*\} (\S+)$", text, re.MULTILINE)}


def test_joules_since_the_start_and_those_per_token_of_the_last_minute(region: Region, tmp_path: Path) -> None:
    gpu = CountingGpu()
    report = EnergyReport(region, gpu)
    assert scrape(region, tmp_path) == {}
    joules, tokens = 7000.0, 0
    for second in range(0, 200, 5):
        gpu.joules = joules
        region.control["statistics"]["generation_tokens"] = tokens
        report.look(100.0 + second)
        report.look(104.9 + second)  # too soon
        joules += 5 * (300 if second < 120 else 500)
        tokens += 5000
        if second == 0:
            assert scrape(region, tmp_path) == pytest.approx(
                {"energy_joules_total": 0.001}
            )  # counted, though nothing was used
        if second == 115:
            assert scrape(region, tmp_path) == pytest.approx(
                {"energy_joules_total": 115 * 300, "joules_per_token": 0.3}
            )
    assert scrape(region, tmp_path) == pytest.approx(
        {"energy_joules_total": 120 * 300 + 75 * 500, "joules_per_token": 0.5}
    )


def test_without_tokens_in_the_last_minute_there_is_no_energy_of_a_token(region: Region, tmp_path: Path) -> None:
    gpu = CountingGpu()
    report = EnergyReport(region, gpu)
    report.look(0.0)
    region.control["statistics"]["generation_tokens"] = 500
    for second, joules in ((5, 7100.0), (30, 7900.0)):
        gpu.joules = joules
        report.look(second)
    assert scrape(region, tmp_path) == pytest.approx({"energy_joules_total": 900, "joules_per_token": 1.8})
    gpu.joules = 9000.0
    report.look(31 + 60)  # the process was stopped for a minute
    report.look(36 + 60)
    assert scrape(region, tmp_path) == pytest.approx({"energy_joules_total": 2000})


def test_a_gpu_that_is_lost_is_told_once_and_leaves_no_figures(
    region: Region, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = CountingGpu()
    report = EnergyReport(region, gpu)
    report.look(0.0)
    gpu.joules = None
    for second in (5.0, 10.0):
        report.look(second)
    assert scrape(region, tmp_path) == {}
    assert [record.getMessage() for record in caplog.records] == ["energy is no longer counted: NVML: GPU is lost"]


def test_a_machine_without_a_driver_has_no_report(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libnvidia-ml-of-nobody.so.1")
    with caplog.at_level(logging.INFO, "blink.engine"):
        assert report_energy(region, "0000:41:00.0") is None
    assert "no energy is counted: there is no NVIDIA driver" in caplog.text
