# SPDX-License-Identifier: Apache-2.0
"""The log line of throughput and load: when it comes, and what it says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blink.api.observe.metric_store import MetricStore
from blink.api.observe.stats_line import StatsLine
from blink.region.layout import STATISTICS

ZERO = dict.fromkeys(STATISTICS.names or (), 0) | {"num_blocks": 100}
BUSY = ZERO | {
    "num_steps": 40,
    "prompt_tokens": 500,
    "generation_tokens": 2000,
    "num_running": 3,
    "num_waiting": 4,
    "num_blocks_used": 25,
    "prefix_queries": 500,
    "prefix_hits": 100,
}


class Engine:
    """What the engine counts now."""

    def __init__(self) -> None:
        self.stats: dict[str, int] = ZERO

    def __call__(self) -> dict[str, int]:
        return self.stats


def look(line: StatsLine, engine: Engine, stats: dict[str, int], now: float) -> None:
    engine.stats = stats
    line.look(now)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_every_ten_seconds_it_says_what_happened_since(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = StatsLine(MetricStore("stats", 3, tmp_path), [engine := Engine()])
    for now in (100.0, 100.25, 109.9):
        look(line, engine, ZERO, now)
    assert lines_of(caplog) == []
    look(line, engine, BUSY, 110.0)
    assert lines_of(caplog) == [
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 200.0 tokens/s, Running: 3 reqs, "
        "Waiting: 4 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 20.0%"
    ]
    look(line, engine, BUSY | {"num_steps": 50}, 119.0)
    assert len(lines_of(caplog)) == 1
    look(line, engine, BUSY | {"num_steps": 50, "prefix_queries": 900, "prefix_hits": 500}, 120.0)
    assert "generation throughput: 0.0" in lines_of(caplog)[1] and "hit rate: 100.0%" in lines_of(caplog)[1]


def test_an_idle_server_an_engine_that_is_away_and_a_new_one_are_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    line = StatsLine(MetricStore("stats", 3, tmp_path), [engine := Engine()])
    idle = BUSY | {"num_running": 0, "num_waiting": 0}
    for now, stats in ((0.0, idle), (10.0, idle), (20.0, {}), (30.0, idle), (40.0, ZERO | {"num_running": 1})):
        look(line, engine, stats, now)
    assert lines_of(caplog) == []


_SIBLING = """
import os, sys
from pathlib import Path
from blink.api.observe.metric_store import MetricStore
os.getpid = lambda: 1  # certainly the lowest
store = MetricStore("stats", 3, Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_one_worker_of_a_server_speaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = StatsLine(MetricStore("stats", 3, tmp_path), [engine := Engine()])
    command = [sys.executable, "-c", _SIBLING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sibling:
        assert sibling.stdout is not None and sibling.stdout.readline() == "ready\n" and os.getpid() > 1
        look(line, engine, ZERO, 0.0)
        look(line, engine, BUSY, 10.0)
        assert lines_of(caplog) == []  # the one with the lower process id does
        sibling.communicate()
    look(line, engine, BUSY | {"num_steps": 41}, 20.0)
    assert len(lines_of(caplog)) == 1
