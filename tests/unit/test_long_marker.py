# SPDX-License-Identifier: Apache-2.0
"""Tests marked `long` run with --long only, whatever else is selected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_LONG = "test_64_streams_of_the_default_model_for_a_minute"
_LONGER = "test_64_streams_for_ten_minutes_with_everything_on"
_SHORT = "test_64_streams_with_hang_ups_leak_nothing_and_err_nowhere"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-m", "e2e"], {_SHORT}),
        (["--long", "-k", "minute"], {_LONG, _LONGER}),
    ],
)
def test_long_tests_wait_for_the_flag(flags: list[str], expected: set[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/e2e/test_soak.py", *flags],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert {line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line} == expected, run.stderr
