# SPDX-License-Identifier: Apache-2.0
"""One run of RDMA tests across two virtual machines joined by a cable: the engine in one, the tests in the other."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from guest import HERE, ROOT, Outcome, library_environment, start_guest_tests
from rdma_processes import TOKEN
from vm import Link, Machine, shell_command

TESTS = ("test_none_of_many_requests", "test_http_requests_side_by_side", "test_the_keys_of_another_frontend")
_TIMEOUT = 3000.0  # seconds, on a machine that does much else; a minute is usual


def run_two_machines() -> Outcome:
    """Return how the tests' machine ended, with the engine's console at the end of its own.

    Raises:
        RigUnavailableError: this machine cannot run the rig.
    """
    environment = {"BLINK_RDMA_TOKEN": TOKEN, **library_environment()}
    script = [sys.executable, str(HERE / "counting_engine.py"), "--region=far", "--rdma-listen=10.9.0.1:7000"]
    with tempfile.TemporaryDirectory() as folder:
        left, right = Path(folder) / "left", Path(folder) / "right"
        server = Machine(shell_command(script, environment, folder=ROOT), number=1, link=Link(left, right), cpus=1)
        try:
            outcome = start_guest_tests(
                ["-k", " or ".join(TESTS), str(HERE)],
                environment={"BLINK_TEST_RDMA_ENGINE": "10.9.0.1:7000"},
                number=2,
                link=Link(right, left),
                cpus=1,
            ).wait(_TIMEOUT)
        finally:
            ended = server.kill()
    return Outcome(outcome.status, outcome.console + ended.console, outcome.report, outcome.packages)
