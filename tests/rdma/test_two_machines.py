# SPDX-License-Identifier: Apache-2.0
"""Engine and frontend in two virtual machines, joined by nothing but a cable."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from guest import HERE, ROOT, library_environment, read_report, start_guest_tests
from packages import RigUnavailableError
from rdma_processes import TOKEN
from vm import Link, Machine, shell_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(os.environ.get("BLINK_TEST_RDMA") == "here", reason="boots machines of its own"),
]

_TESTS = ("test_a_thousand_requests", "test_http_requests_side_by_side", "test_the_keys_of_another_frontend")


def test_a_frontend_is_served_by_the_engine_of_another_machine() -> None:
    with tempfile.TemporaryDirectory() as folder:
        left, right = Path(folder) / "left", Path(folder) / "right"
        try:
            environment = {"BLINK_RDMA_TOKEN": TOKEN, **library_environment()}
        except RigUnavailableError as error:
            pytest.skip(f"no virtual machine with RDMA: {error}")
        script = [sys.executable, str(HERE / "counting_engine.py"), "--region=far", "--rdma-listen=10.9.0.1:7000"]
        server = Machine(shell_command(script, environment, folder=ROOT), number=1, link=Link(left, right), cpus=1)
        try:
            outcome = start_guest_tests(
                ["-k", " or ".join(_TESTS), str(HERE)],
                environment={"BLINK_TEST_RDMA_ENGINE": "10.9.0.1:7000"},
                number=2,
                link=Link(right, left),
                cpus=1,
            ).wait(300)
        finally:
            ended = server.kill()
    results = read_report(outcome)
    assert [failure for failure in results.values() if failure] == [], outcome.console + ended.console
    assert len(results) == len(_TESTS) and outcome.status == 0, outcome.console + ended.console
