# SPDX-License-Identifier: Apache-2.0
"""Restart rules, and the ties between the supervisor and its children, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blink.cli.supervision import Child, RestartPolicy, describe_exit

_SUPERVISOR = """
import sys, time
from blink.cli.supervision import Child
child = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
child.start()
print(child._process.pid, flush=True)
time.sleep(600)
"""


def test_delays_double_and_the_fifth_death_exhausts() -> None:
    policy = RestartPolicy()
    delays: list[float] = []
    for now in range(4):
        policy.record_death(float(now), lived=1.0)
        assert not policy.is_exhausted
        delays.append(policy.delay)
    policy.record_death(4.0, lived=1.0)
    assert delays == [0, 1, 2, 4]
    assert policy.is_exhausted


def test_deaths_before_the_window_are_forgotten() -> None:
    policy = RestartPolicy(max_deaths=5, window=300)
    for now in range(0, 3000, 76):  # never five within 300 s
        policy.record_death(float(now), lived=60.0)
        assert not policy.is_exhausted


def test_only_short_lives_in_a_row_delay_the_next_start() -> None:
    policy = RestartPolicy(max_deaths=100)
    delays: list[float] = []
    for lived in (100.0, 6.0, 1.0, 1.0, 1.0, 6.0, 100.0, 1.0, 1.0):
        policy.record_death(0.0, lived)
        delays.append(policy.delay)
    assert delays == [0, 0, 0, 1, 2, 0, 0, 0, 1]


def test_delay_has_a_ceiling() -> None:
    policy = RestartPolicy(max_delay=30)
    for _ in range(50):
        policy.record_death(1.0, lived=1.0)
    assert policy.delay == 30


def test_child_reports_its_end_once() -> None:
    child = Child("wrong", [sys.executable, "-c", "raise SystemExit(2)"])
    child.start()
    deadline = time.monotonic() + 60
    while (status := child.reap()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert status == 2
    assert not child.is_running
    assert child.reap() is None


def test_child_starts_with_no_signal_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        child = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
        child.start()
        child.send(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while (status := child.reap()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert status == -signal.SIGTERM


def test_child_dies_with_a_killed_supervisor() -> None:
    with subprocess.Popen([sys.executable, "-c", _SUPERVISOR], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        os.kill(child, 0)
        supervisor.kill()
    deadline = time.monotonic() + 60
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(child)


def _is_alive(process: int) -> bool:
    """Whether the process runs; one that waits to be reaped by its new parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3, "ended with exit status 3"),
        (-9, "was killed by SIGKILL"),
        (-7, "was killed by SIGBUS: its shared memory or its model's file was truncated, or /dev/shm is full"),
    ],
)
def test_exit_is_described_in_words(status: int, text: str) -> None:
    assert describe_exit(status) == text


_A_THREAD_GETS_IT = """
import signal, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
[other] = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
from blink.cli import serve
serve._take_signals()
signal.pthread_kill(other.ident, signal.SIGTERM)
found = {serve._await_signal(0.1) for _ in range(20)}
print(signal.SIGTERM in found)
"""


def test_a_signal_that_another_thread_gets_stops_the_supervisor_in_order() -> None:
    """As a progress bar's thread does that a download has left."""
    done = subprocess.run([sys.executable, "-c", _A_THREAD_GETS_IT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
