# SPDX-License-Identifier: Apache-2.0
"""A real worker that is told to isolate itself: what the kernel says about every thread of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blink.cli.doctor import examine_isolation
from processes import start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def _require(subject: str) -> None:
    [finding] = [finding for finding in examine_isolation() if finding.subject == subject]
    if finding.level != "ok":
        pytest.skip(f"{subject} {finding.text}")


def _status(task: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def test_all_threads_of_a_worker_stay_on_its_core(region: str) -> None:
    cpu = max(os.sched_getaffinity(0))
    frontend = start_frontend(region, f"--frontend-cpus={cpu}")
    try:
        frontend.complete("The capital of France is")
        tasks = list(Path(f"/proc/{frontend.process.pid}/task").iterdir())
        assert len(tasks) >= 2  # the event loop and the poller, at least
        assert {_status(task)["Cpus_allowed_list"] for task in tasks} == {str(cpu)}
    finally:
        stop(frontend.process)


def test_all_threads_of_a_worker_are_realtime_and_its_memory_is_locked(region: str) -> None:
    _require("real-time scheduling")
    _require("locked memory")
    frontend = start_frontend(region, "--frontend-sched=fifo", "--frontend-sched-priority=3", "--frontend-mlock")
    try:
        frontend.complete("The capital of France is")
        threads = [int(task.name) for task in Path(f"/proc/{frontend.process.pid}/task").iterdir()]
        assert len(threads) >= 2
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_FIFO}
        assert {os.sched_getparam(thread).sched_priority for thread in threads} == {3}
        status = _status(Path(f"/proc/{frontend.process.pid}"))
        assert int(status["VmLck"].split()[0]) > 10_000  # kB
    finally:
        stop(frontend.process)
