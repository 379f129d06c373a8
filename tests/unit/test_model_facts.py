# SPDX-License-Identifier: Apache-2.0
"""What is read of each family's descriptions, and the memory that it asks for, is what was recorded of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blink.models.families import FAMILIES
from model_facts import CONFIGS, describe, read_case

BENCHMARKED = Path(__file__).parents[2] / "benchmarks" / "configs"
CASES = json.loads(Path(__file__).with_name("model_facts.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_what_was_recorded_of_it(name: str, tmp_path: Path) -> None:
    assert describe(read_case(CASES[name], tmp_path)) == CASES[name]["facts"]


def test_each_family_and_configuration_has_a_case() -> None:
    named = {case["facts"]["model"]["architecture"] for case in CASES.values()}
    assert named == set(FAMILIES)
    for path in [*CONFIGS.iterdir(), *BENCHMARKED.iterdir()]:
        assert CASES[path.name]["config"] == json.loads((path / "config.json").read_text())
