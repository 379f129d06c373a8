# SPDX-License-Identifier: Apache-2.0
"""Cores as text, how they are dealt, and what the kernel then says about every thread of a real process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink.cli.serve import resolve_serve, worker_config
from blink.config import EngineConfig, FrontendConfig, ServeConfig
from blink.errors import ConfigError
from blink.host.isolation import deal_cpus, format_cpus, parse_cpus, pin

# One thread starts before and one after, as those of numpy and of the event loop do.
_ISOLATED = """
import os, sys, threading
from pathlib import Path
from blink.host.isolation import isolate, parse_cpus
stop = threading.Event()
threading.Thread(target=stop.wait).start()
isolate(parse_cpus(sys.argv[1]), sys.argv[2], 7, sys.argv[3] == "lock")
threading.Thread(target=stop.wait).start()
for task in Path("/proc/self/task").iterdir():
    thread = int(task.name)
    print(sorted(os.sched_getaffinity(thread)), os.sched_getscheduler(thread), os.sched_getparam(thread).sched_priority)
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")))
stop.set()
"""


def _run_isolated(cpus: str, sched: str, lock: str) -> list[str]:
    command = [sys.executable, "-c", _ISOLATED, cpus, sched, lock]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "is not permitted" in run.stderr or "RLIMIT_MEMLOCK" in run.stderr:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize(
    ("text", "cpus"), [("", ()), ("3", (3,)), ("2,3", (2, 3)), ("2-5", (2, 3, 4, 5)), ("7, 0-1", (7, 0, 1))]
)
def test_cores_are_read_in_their_order(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["x", "1,", "-1", "1-", "3-2", "1,1", "0-2,2", "1.5", "9999", "\u0663", "1--2"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="core"):
        parse_cpus(text)


@given(st.sets(st.integers(0, 200)))
def test_cores_survive_being_written(cpus: set[int]) -> None:
    assert set(parse_cpus(format_cpus(cpus))) == cpus


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40, unique=True), st.integers(1, 12))
def test_every_core_is_dealt_and_shared_only_when_there_are_too_few(cpus: list[int], workers: int) -> None:
    dealt = [deal_cpus(cpus, worker, workers) for worker in range(workers)]
    assert all(dealt)
    assert {cpu for hand in dealt for cpu in hand} == set(cpus)
    sizes = {len(hand) for hand in dealt}
    assert max(sizes) - min(sizes) <= 1
    if len(cpus) >= workers:
        assert sum(len(hand) for hand in dealt) == len(cpus)


def test_serve_pins_each_worker_to_its_core() -> None:
    config = ServeConfig(frontend=FrontendConfig(frontend_cpus="4-6"), frontend_workers=2)
    assert [worker_config(config, index).frontend_cpus for index in range(2)] == ["4,6", "5"]
    assert worker_config(ServeConfig(frontend_workers=2), 1) == FrontendConfig()


def test_serve_refuses_wrong_cores_before_it_starts_anything() -> None:
    with pytest.raises(ConfigError, match="list of cores"):
        resolve_serve(ServeConfig(engine=EngineConfig(), frontend=FrontendConfig(frontend_cpus="a")))


def test_all_threads_are_pinned_early_and_late() -> None:
    cpu = min(os.sched_getaffinity(0))
    *threads, locked = _run_isolated(str(cpu), "other", "")
    assert len(threads) >= 3
    assert set(threads) == {f"[{cpu}] {os.SCHED_OTHER} 0"}
    assert locked.split()[1] == "0"


@pytest.mark.parametrize(("sched", "policy"), [("fifo", os.SCHED_FIFO), ("rr", os.SCHED_RR)])
def test_all_threads_are_in_the_realtime_class_early_and_late(sched: str, policy: int) -> None:
    *threads, _ = _run_isolated("", sched, "")
    assert len(threads) >= 3
    assert {thread.rpartition("]")[2] for thread in threads} == {f" {policy} 7"}


def test_memory_is_locked() -> None:
    locked = _run_isolated("", "other", "lock")[-1]
    assert int(locked.split()[1]) > 1024


def test_core_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cores 8000 cannot be used"):
        pin((8000,))


def test_worker_that_cannot_have_its_core_leaves_with_one_line_and_status_2() -> None:
    command = [sys.executable, "-m", "blink", "frontend", "--frontend-cpus=8000"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 2
    assert re.fullmatch("blink: error: cores 8000 cannot be used: .*\n", run.stderr)


def test_core_outside_of_the_cpuset_is_not_dropped_in_silence() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        with pytest.raises(ConfigError, match="8000"):
            pin((min(allowed), 8000))
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give up root to be refused")
@pytest.mark.parametrize(
    ("call", "advice"),
    [("set_realtime('fifo', 50)", "CAP_SYS_NICE.*ulimit -r 50"), ("lock_memory()", "CAP_IPC_LOCK.*ulimit -l")],
)
def test_without_permission_the_error_says_what_to_do(call: str, advice: str) -> None:
    limits = "for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_RTPRIO): resource.setrlimit(limit, (0, 0))"
    code = f"import os, resource\nfrom blink.host.isolation import *\n{limits}\nos.setuid(65534)\n{call}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode != 0
    assert re.search(advice, run.stderr), run.stderr
