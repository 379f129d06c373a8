# SPDX-License-Identifier: Apache-2.0
"""The short form of `make flat` with cases of 2 s, on the default model, which it serves itself on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flat.kinds import KINDS
from flat.neighbours import program

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]
_RUN = Path(__file__).parents[2] / "benchmarks" / "flat" / "run.py"


def test_the_short_form_measures_every_kind_on_a_server_of_its_own(tmp_path: Path) -> None:
    flags = ["--duration=2", "--rates=2", "--doses=0,0.5", "--mean-output-len=8", "--mean-input-len=16"]
    command = [sys.executable, str(_RUN), f"--out={tmp_path}", *flags, "--", "--device=cpu", "--max-model-len=1024"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False, env=program("run")[1])
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "results.json").read_text())
    cases = {(case["kind"], case["dose"]): case for case in result["cases"]}
    assert set(cases) == {(kind, dose) for kind in KINDS for dose in (0, 0.5)}
    refused = {kind for (kind, _), case in cases.items() if "not_measured" in case}
    assert refused <= {"throttle", "compile"}
    measured = [case for case in cases.values() if case["kind"] not in refused]
    for case in measured:
        assert case["requests"]["ok"] > 0
        assert case["trace"]["steps"] > 0 and case["trace"]["gap_ms"]["p50"] > 0
        assert case["neighbours"]["alive"] == case["processes"]
    assert result["server"]["version"]
    assert (tmp_path / "flat-gaps.svg").read_text().count(">engine, ") == 2
