# SPDX-License-Identifier: Apache-2.0
"""Tests marked `long` run with --long only, whatever else is selected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_LONG = "test_greedy_answers_over_rdma_equal_those_over_shared_memory"
_SHORT = "test_tokens_of_a_tiny_model_over_rdma_equal_those_over_shared_memory"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], {_SHORT}), (["-m", "rdma"], {_SHORT}), (["--long"], {_SHORT, _LONG}), (["--long", "-k", "answers"], {_LONG})],
)
def test_long_tests_wait_for_the_flag(flags: list[str], expected: set[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/rdma/test_verbs_tokens.py", *flags],
        cwd=_ROOT,
        env={**os.environ, "BLINK_TEST_RDMA": "here"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert {line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line} == expected, run.stderr
