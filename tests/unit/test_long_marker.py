# SPDX-License-Identifier: Apache-2.0
"""Tests marked `long` run with --long only, whatever else is selected."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite_rules import run_pytest

_MODULE = """
import pytest

def test_of_seconds():
    pass

@pytest.mark.e2e
def test_of_a_server():
    pass

@pytest.mark.long
@pytest.mark.e2e
def test_of_minutes():
    pass

@pytest.mark.long
@pytest.mark.parametrize("case", [1, pytest.param(2)])
def test_of_hours(case):
    pass

@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.long)])
def test_of_both(case):
    pass
"""
_SHORT = {"test_of_seconds", "test_of_a_server", "test_of_both[1]"}
_LONG = {"test_of_minutes", "test_of_hours[1]", "test_of_hours[2]", "test_of_both[2]"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-m", "e2e"], {"test_of_a_server"}),
        (["--long", "-k", "test_of"], _SHORT | _LONG),
    ],
)
def test_long_tests_wait_for_the_flag(tmp_path: Path, flags: list[str], expected: set[str]) -> None:
    (tmp_path / "test_some.py").write_text(_MODULE)
    run = run_pytest(tmp_path, "--collect-only", "-q", *flags)
    assert {line.partition("::")[2] for line in run.stdout.splitlines() if "::" in line} == expected, run.stderr
