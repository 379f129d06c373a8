# SPDX-License-Identifier: Apache-2.0
"""JSONSchemaBench: its schemas compile in time and memory, and allow what its examples say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import schema_bench

FOLDER = Path(os.environ.get("BLINK_SCHEMA_BENCH", ""))
CLONE = "git clone https://github.com/guidance-ai/jsonschemabench; export BLINK_SCHEMA_BENCH=…/maskbench/data"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Return what each file's process found."""
    if not os.environ.get("BLINK_SCHEMA_BENCH"):
        pytest.skip(f"needs the files of JSONSchemaBench: {CLONE}")
    command = [sys.executable, schema_bench.__file__, str(FOLDER)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def of_group(results: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    return [each for each in results if each["name"].startswith(group)]


def test_the_files_are_those_that_are_listed(results: list[dict[str, Any]]) -> None:
    assert [each["name"] for each in results] == schema_bench.read_names()
    assert [len(of_group(results, group)) for group in ("Glaiveai2K", "Github_hard")] == [400, 200]


@pytest.mark.parametrize(("group", "count"), [("Glaiveai2K", 397), ("Github_hard", 190)])
def test_nearly_all_compile_in_2_seconds_and_256_mib(results: list[dict[str, Any]], group: str, count: int) -> None:
    found = of_group(results, group)
    assert [each for each in found if "failure" in each] == []  # a refusal is no failure
    good = [each for each in found if not each["refusal"] and each["seconds"] < 2 and each["mib"] < 256]
    refusals = [(each["name"], each["refusal"]) for each in found if each["refusal"]]
    print(f"{group}: {len(good)} of {len(found)}, at most {max(each['seconds'] for each in found):.2f} s and "
          f"{max(each['mib'] for each in found):.0f} MiB; refused: {refusals}")  # fmt: skip
    assert len(good) >= count


def test_valid_examples_can_be_written_and_no_invalid_one(results: list[dict[str, Any]]) -> None:
    compiled = [each for each in results if not each["refusal"]]
    assert [(each["name"], each["let_through"]) for each in compiled if each["let_through"]] == []
    assert [(each["name"], each["missed"]) for each in compiled if each["missed"]] == []
    assert sum(len(each["undecided"]) for each in compiled) <= 6  # they have too many orders of members
    num_undeclared = sum(len(each["undeclared"]) for each in compiled)
    print(f"{sum(each['valid'] for each in compiled)} valid ones, {num_undeclared} more but for undeclared members")
    assert sum(each["valid"] for each in compiled) > 20 * num_undeclared
