# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/flat/run.py` as a user runs it, on a server whose gaps are fixed, beside one busy process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flat.cases import FAKE_GAP_MS, start_fake_server
from flat.neighbours import program
from flat.options import read_options

_RUN = Path(__file__).parents[2] / "benchmarks" / "flat" / "run.py"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """A process and its port."""
    process, port = start_fake_server(os.getpid())
    yield process.pid, port
    process.kill()
    process.wait()


def _run(port: int, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_RUN), f"--url=http://127.0.0.1:{port}", f"--out={out}", *flags]
    _, environment = program("run")
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)


def test_two_cases_give_figures_files_and_the_clients_own_error(server: tuple[int, int], tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    flags = ["--kinds=compute", "--doses=0,1", f"--neighbour-cpus={cpu}", "--duration=0.5", "--rates=16"]
    run = _run(server[1], tmp_path, *flags)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "results.json").read_text())
    assert [(case["kind"], case["dose"], case["processes"]) for case in result["cases"]] == [
        ("compute", 0, 0),
        ("compute", 1, 1),
    ]
    for case in result["cases"]:
        assert case["requests"]["ok"] == case["requests"]["planned"] > 0
        assert case["tpot_ms"]["p50"] > FAKE_GAP_MS / 2
        assert case["ttft_ms"]["max"] > 0
        assert case["client"]["fake_gap_error_ms"]["p50"] >= 0
    assert result["cases"][1]["neighbours"]["alive"] == 1
    assert result["cases"][1]["neighbours"]["work"] > 0
    assert result["server"]["model"] == "fake"
    assert result["machine"]["cpus"] == os.cpu_count()
    assert f"--neighbour-cpus={cpu}" in result["command"]
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 3
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["flat-dose.svg", "flat-gaps.svg"]
    assert run.stdout.count("| compute |") == 2


@pytest.mark.long
def test_a_server_that_is_stopped_sends_no_token_meanwhile(server: tuple[int, int], tmp_path: Path) -> None:
    flags = ["--kinds=compute", "--doses=0", "--duration=4", f"--stop-frontend={server[0]}"]
    run = _run(server[1], tmp_path, *flags)
    assert run.returncode == 0, run.stderr
    control = json.loads((tmp_path / "results.json").read_text())["cases"][-1]
    assert (control["kind"], control["stopped_seconds"], control["tokens_while_stopped"]) == ("stop-frontend", 2.0, 0)
    assert control["gap_ms"]["max"] > 1000 or control["ttft_ms"]["max"] > 1000


def test_a_server_that_is_not_there_is_one_line_and_status_2(tmp_path: Path) -> None:
    run = _run(1, tmp_path)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("flat: error: no server at http://127.0.0.1:1")


def test_another_server_is_measured_without_the_native_library_and_torch() -> None:
    code = (
        "import sys, flat.protocol; print([name for name in sys.modules if name in ('torch', 'blink.region.native')])"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True, env=program("run")[1])
    assert run.stdout == "[]\n"


def test_the_short_and_the_whole_protocol_and_what_overrides_them() -> None:
    short, full = read_options([]), read_options(["--full", "--", "model", "--device", "cuda"])
    assert (short.doses, short.rates, short.duration, short.runs) == ([0, 8], [8], 20, 1)
    assert (full.doses, full.rates, full.duration, full.runs) == (
        [0, 0.25, 0.5, 1, 2, 4, 8],
        [0.5, 8, 32],
        120,
        5,
    )
    assert full.serve == ["model", "--device", "cuda"]
    assert (read_options(["--full", "--runs", "2"]).runs, len(short.kinds)) == (2, 8)


@pytest.mark.parametrize(
    "arguments",
    [["--kinds=moon"], ["--doses=-1"], ["--rates=0"], ["--runs=0"], ["--duration=0"], ["--url=http://a", "--", "m"]],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        read_options(arguments)
    assert error.value.code == 2
