# SPDX-License-Identifier: Apache-2.0
"""benchmarks/step_energy.py: the parts of a step's joules, and the result that it writes."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

import step_energy
from result_files import read_result


@pytest.fixture
def measured() -> dict[str, Any]:
    """Return what was measured, and a step of eight rows."""
    return {
        "idle": step_energy.Idle(nothing=70.0, context=110.0, scheduler=130.0),
        "reading": step_energy.Reading(num_bytes=15e9, seconds=0.005, watts=510.0),
        "step": step_energy.Step(8, 0.0052, 590.0, 1980.0, weight_bytes=12e9, kv_bytes=0.3e9),
    }


def test_the_parts_of_a_step_are_watts_for_its_time_and_bytes_that_it_reads(measured: dict[str, Any]) -> None:
    split = step_energy.split_joules(**measured)
    # Beyond a context, 15 GB take (510 W - 110 W) * 5 ms = 2 J.
    expected = {
        "board without a process": 70 * 0.0052,
        "context": 40 * 0.0052,
        "resident scheduler": 20 * 0.0052,
        "reading weights": 2.0 * 12 / 15,
        "reading the KV cache": 2.0 * 0.3 / 15,
    }
    rest = split.pop("rest")
    assert split == pytest.approx(expected)
    assert rest == pytest.approx(590 * 0.0052 - sum(expected.values())) and 0.7 < rest < 0.8


def test_the_result_is_a_file_of_benchmarks_results(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, reading = measured["step"], measured["reading"]
    found = {"nothing": {"watts": 70.04, "sm_mhz": 345.0, "pass_seconds": 1.0}}
    tables = step_energy.make_tables(found, [step], reading, [step_energy.split_joules(**measured)])
    options = argparse.Namespace(
        model=Path("llama-3-8b"), quantization="auto", prompt_tokens=185, new_tokens=800, repeats=3
    )
    path = tmp_path / "step_energy.json"
    path.write_text(json.dumps(step_energy.make_result(tables, "a GPU", options)))
    result = read_result(path)
    steps, parts, idle, read = result.tables
    assert [str(cell) for cell in steps.rows[0]] == ["8", "5.2", "590", "1980", "3.068", "0.3835"]
    assert str(parts.find(part="reading weights")["8 rows"]) == "1.6"
    assert sum(float(str(row[1])) for row in parts.rows) == pytest.approx(3.068, abs=0.003)
    assert str(idle.find(what_is_resident="nothing")["W"]) == "70.0"
    assert [str(cell) for cell in read.rows[0]] == ["15.0", "5.0", "510", "3.0", "2.55"]
    assert result.settings[0] == "the shape of llama-3-8b, bf16" and result.runs.startswith("medians of 3")
    for table in tables:
        step_energy.print_table(table)
    assert "reading weights 1.6\n" in re.sub(" +", " ", capsys.readouterr().out)
