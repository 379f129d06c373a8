# SPDX-License-Identifier: Apache-2.0
"""Engine and frontend in two virtual machines, joined by nothing but a cable."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from groups import MACHINE
from guest import Outcome, read_report
from packages import RigUnavailableError
from two_machines import TESTS

pytestmark = [
    pytest.mark.long,  # a minute of both cores
    pytest.mark.slow,
    pytest.mark.timeout(6100),
    pytest.mark.skipif(os.environ.get("BLINK_TEST_RDMA") == "here", reason="boots machines of its own"),
]


def test_a_frontend_is_served_by_the_engine_of_another_machine(
    await_two_machines: Callable[[], Outcome], record_property: Callable[[str, object], None]
) -> None:
    try:
        outcome = await_two_machines()
    except RigUnavailableError as error:
        pytest.skip(f"no virtual machine with RDMA: {error}")
    record_property(MACHINE, outcome.packages)
    results = read_report(outcome)
    assert [failure for failure in results.values() if failure] == [], f"{outcome.packages}\n{outcome.console}"
    assert len(results) == len(TESTS) and outcome.status == 0, outcome.console
