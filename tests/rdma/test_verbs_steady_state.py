# SPDX-License-Identifier: Apache-2.0
"""While tokens flow, the engine's host does nothing for the transfer: no verbs call and no system call."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from rdma_processes import CountingProcess, attach, open_connection
from ring import Inspector

pytestmark = pytest.mark.rdma

# The scheduler's thread and the model's thread wait for each other and read the clock.
_OF_THE_MODEL = {"futex", "clock_gettime", "clock_nanosleep", "nanosleep", "sched_yield", "restart_syscall"}
_OF_MEMORY = {"mmap", "munmap", "madvise", "brk", "mprotect"}


def test_the_engine_makes_no_call_for_a_transfer(engine: CountingProcess, tmp_path: Path) -> None:
    connection = open_connection(engine.place)
    pair = attach(connection)
    listener = listening_thread(engine.process.pid)
    trace = tmp_path / "trace"
    strace = subprocess.Popen(["strace", "-f", "-q", "-p", str(engine.process.pid), "-o", str(trace)])
    time.sleep(3)
    inspector = Inspector(pair, connection)
    inspector.run(50)
    strace.terminate()
    strace.wait()
    connection.close()
    assert inspector.answered == 50 and not inspector.faults
    lines = trace.read_text().splitlines()
    calls = [match for line in lines if (match := re.match(r"(\d+)\s+(?:<\.\.\. )?(\w+)(?: resumed|\()", line))]
    assert len(calls) > 50  # the trace did record the model's waits
    assert {match[2] for match in calls if int(match[1]) == listener} <= {"accept4", "restart_syscall"}
    assert {match[2] for match in calls} <= _OF_THE_MODEL | _OF_MEMORY | {"accept4"}


def test_the_engines_ends_can_only_answer(engine: CountingProcess) -> None:
    connection = open_connection(engine.place)
    command = ["rdma", "resource", "show", "qp", "-d"]
    queue_pairs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    connection.close()
    threads = {task.name for task in Path(f"/proc/{engine.process.pid}/task").iterdir()}
    own = [line for line in queue_pairs if (maker := re.search(r" pid (\d+) ", line)) and maker[1] in threads]
    assert own and all(" state RTR " in line for line in own), queue_pairs


def listening_thread(process: int) -> int:
    """Return the thread that sleeps in accept()."""
    tasks = Path(f"/proc/{process}/task")
    found = [task.name for task in tasks.iterdir() if "accept" in (task / "wchan").read_text()]
    assert len(found) == 1, [(task.name, (task / "wchan").read_text()) for task in tasks.iterdir()]
    return int(found[0])
