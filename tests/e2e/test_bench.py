# SPDX-License-Identifier: Apache-2.0
"""`blink bench` as a user runs it, against a real server, alone and beside two busy processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from processes import Frontend

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def _bench(server: Frontend, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "blink", "bench", f"--port={server.port}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)


def test_sweep_reports_what_the_server_counts(server: Frontend, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    before = server.metric("vllm:generation_tokens_total")
    run = _bench(
        server,
        *("--request-rate=4,8", "--num-prompts=3", "--input-len=12", "--output-len=6", "--num-warmups=1"),
        *("--interference=2", "--save-detailed", f"--result-filename={path}", f"--server-pids={server.process.pid}"),
    )
    assert run.returncode == 0, run.stderr
    runs = json.loads(path.read_text())["runs"]
    assert [(one["request_rate"], one["condition"]) for one in runs] == [
        (4, "isolated"),
        (4, "interfered"),
        (8, "isolated"),
        (8, "interfered"),
    ]
    for one in runs:
        assert (one["completed"], one["failed"], one["rejected"], one["errors"]) == (3, 0, 0, {})
        assert (one["total_input_tokens"], one["total_output_tokens"]) == (36, 18)
        assert 0 < one["p50_ttft_ms"] <= one["p99_ttft_ms"] <= one["p99_e2el_ms"]
        assert 0 < one["p50_tpot_ms"] <= one["p99_tpot_ms"]
        assert [len(request["times"]) <= 6 for request in one["requests"]] == [True] * 3
        assert one["output_throughput"] == pytest.approx(18 / one["duration"])
        assert one["cpu_s_per_1000_tokens"] == pytest.approx(1000 * one["server_cpu_s"] / 18)
    assert 0 < sum(one["server_cpu_s"] for one in runs) < sum(one["duration"] for one in runs) * 3
    warmup = 6
    assert server.metric("vllm:generation_tokens_total") - before == 4 * 18 + warmup
    assert path.with_suffix(".html").read_text().count("<svg") == 2
    lines = run.stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("condition")


@pytest.mark.long
def test_a_second_load_of_the_flex_tier_is_served_and_reported_apart(server: Frontend, tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    run = _bench(
        server,
        *("--request-rate=2", "--num-prompts=4", "--input-len=12", "--output-len=6", "--num-warmups=1"),
        *("--flex-request-rate=4", "--flex-input-len=20", "--flex-output-len=5", f"--result-filename={path}"),
    )
    assert run.returncode == 0, run.stderr
    runs = {one["class"]: one for one in json.loads(path.read_text())["runs"]}
    assert list(runs) == ["default", "flex", "both"]
    assert runs["default"]["completed"] == 4 and runs["default"]["total_output_tokens"] == 24
    flex = runs["flex"]["completed"]
    assert flex > 0 and runs["flex"]["total_output_tokens"] == 5 * flex
    assert runs["both"]["completed"] == 4 + flex and runs["both"]["errors"] == {}
    assert path.with_suffix(".html").read_text().count("<svg") == 4


def test_server_that_is_not_there_is_one_line_and_status_2() -> None:
    command = [sys.executable, "-m", "blink", "bench", "--port=1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("blink: error: no server at http://127.0.0.1:1")
