# SPDX-License-Identifier: Apache-2.0
"""While tokens flow, the engine's host does nothing for the transfer: no verbs call and no system call."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rdma_processes import CountingProcess, attach, open_link, wait_for
from ring import Inspector

pytestmark = pytest.mark.rdma

# The scheduler's thread and the model's thread wait for each other and read the clock.
_OF_THE_MODEL = {"futex", "clock_gettime", "clock_nanosleep", "nanosleep", "sched_yield", "restart_syscall"}
_OF_MEMORY = {"mmap", "munmap", "madvise", "brk", "mprotect"}


def test_the_engine_makes_no_call_for_a_transfer(engine: CountingProcess, tmp_path: Path) -> None:
    link = open_link(engine.place)
    pair = attach(link)
    listener = listening_thread(engine.process.pid)
    trace = tmp_path / "trace"
    strace = subprocess.Popen(["strace", "-f", "-q", "-p", str(engine.process.pid), "-o", str(trace)])

    def is_traced() -> bool:
        pair.renew_lease()
        tasks = Path(f"/proc/{engine.process.pid}/task").iterdir()
        return all("TracerPid:\t0\n" not in (task / "status").read_text() for task in tasks)

    wait_for(is_traced, "strace")
    inspector = Inspector(pair, link)
    inspector.run(50)
    strace.terminate()
    strace.wait()
    link.close()
    assert inspector.answered == 50 and not inspector.faults, inspector.faults
    lines = trace.read_text().splitlines()
    calls = [match for line in lines if (match := re.match(r"(\d+)\s+(?:<\.\.\. )?(\w+)(?: resumed|\()", line))]
    assert len(calls) > 50  # the trace did record the model's waits
    assert {match[2] for match in calls if int(match[1]) == listener} <= {"accept4", "restart_syscall"}
    assert {match[2] for match in calls} <= _OF_THE_MODEL | _OF_MEMORY | {"accept4"}


def test_the_engines_end_can_only_answer(engine: CountingProcess) -> None:
    link = open_link(engine.place)
    command = ["rdma", "resource", "show", "qp", "-d"]
    queue_pairs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    number = link.info()["qpn"]
    link.close()
    # The thread that made the engine's end has gone, so it is known by its peer, which is ours.
    (end,) = (line for line in queue_pairs if f" rqpn {number} " in line)
    assert " state RTR " in end, queue_pairs


def listening_thread(process: int) -> int:
    """Return the thread that sleeps in accept(), once it has done with the frontend that connected last."""

    def found() -> list[str]:
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [task.name for task in tasks if "accept" in (task / "wchan").read_text()]

    wait_for(found, "the listener's sleep")
    (thread,) = found()
    return int(thread)
