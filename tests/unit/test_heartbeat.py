# SPDX-License-Identifier: Apache-2.0
"""Signs of life: a child that beats, one that stops, one that never began; and an engine judged by its region."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blink.cli.health import EngineHealth
from blink.cli.supervision import Child
from blink.host.heartbeat import HeartbeatAge
from blink.host.process import Hindrance, describe_threads, read_hindrance
from blink.region.files import region_path
from blink.region.layout import CONSTANTS, CONTROL, field_offset

_PATIENCE = 300.0
_BEATING = """
import asyncio
from blink.host.heartbeat import start_beating
async def run():
    start_beating(asyncio.get_running_loop())
    await asyncio.sleep(600)
asyncio.run(run())
"""


def test_a_heartbeats_age_is_counted_from_look_to_look_and_ends_with_a_sign_of_life() -> None:
    age = HeartbeatAge()
    assert [age.look(now, heard=False) for now in (10.0, 10.5, 11.5)] == [0.0, 0.5, 1.5]
    assert age.look(12.0, heard=True) == 0.0
    assert age.look(12.25, heard=False) == 0.25


def test_a_pause_of_the_whole_machine_does_not_age_a_heartbeat() -> None:
    age = HeartbeatAge()
    age.look(10.0, heard=True)
    assert age.look(5000.0, heard=False) == 1.0


def test_waiting_for_a_core_does_not_age_a_heartbeat() -> None:
    age = HeartbeatAge()
    age.look(10.0, heard=True, hindrance=Hindrance(core_wait=100.0))
    assert age.look(11.0, heard=False, hindrance=Hindrance(core_wait=100.75)) == 0.25
    assert age.look(12.0, heard=False, hindrance=Hindrance(core_wait=100.75)) == 1.25
    assert age.look(13.0, heard=False, hindrance=Hindrance(core_wait=102.75)) == 1.25  # it had waited before, too
    assert age.look(13.5, heard=False, hindrance=Hindrance(core_wait=50.0)) == 1.75  # a thread has ended


def test_who_is_ready_to_run_is_silent_only_while_it_has_a_core() -> None:
    age = HeartbeatAge()
    age.look(10.0, heard=True, hindrance=Hindrance(core_time=5.0))
    assert age.look(11.0, heard=False, hindrance=Hindrance(core_time=5.25, is_runnable=True)) == 0.25
    assert age.look(12.0, heard=False, hindrance=Hindrance(core_time=5.25, is_runnable=True)) == 0.25
    assert age.look(13.0, heard=False, hindrance=Hindrance(core_time=6.5, is_runnable=True)) == 1.25
    assert age.look(14.0, heard=False, hindrance=Hindrance(core_time=6.5)) == 2.25


@pytest.mark.parametrize("share", [0.125, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_others", [0, 1, 4])  # other threads, that wait for a core all the time
@pytest.mark.parametrize("is_runnable", [True, False])
def test_each_second_with_a_core_counts_once_whatever_waits_beside_it(
    share: float, num_others: int, is_runnable: bool
) -> None:
    age, silent = HeartbeatAge(), 0.0
    for look in range(65):
        waited = (1 - share + num_others) * look
        stalled = 0.5 * look  # other processes wait for memory
        seen = Hindrance(core_time=share * look, core_wait=waited, memory_stall=stalled, is_runnable=is_runnable)
        silent = age.look(float(look), heard=False, hindrance=seen)
    assert silent == 64 * share


def test_who_gets_no_core_is_never_silent_however_many_of_its_threads_wait() -> None:
    age = HeartbeatAge()
    for look in range(100):
        seen = Hindrance(core_wait=3.0 * look, is_runnable=look % 2 == 0)
        assert age.look(float(look), heard=False, hindrance=seen) == 0.0


def test_a_core_is_a_core_while_other_threads_wait_for_pages() -> None:
    age, silent = HeartbeatAge(), 0.0
    for look in range(9):
        seen = Hindrance(core_time=0.5 * look, major_faults=look, is_blocked=look % 2 == 0)
        silent = age.look(float(look), heard=False, hindrance=seen)
    assert silent == 4.0


def test_waiting_for_pages_does_not_age_a_heartbeat() -> None:
    age = HeartbeatAge()
    age.look(10.0, heard=True, hindrance=Hindrance(major_faults=7))
    assert age.look(11.0, heard=False, hindrance=Hindrance(major_faults=8)) == 0.0
    assert age.look(12.0, heard=False, hindrance=Hindrance(major_faults=8, is_blocked=True)) == 0.0
    assert age.look(13.0, heard=False, hindrance=Hindrance(major_faults=8)) == 1.0
    assert age.look(14.0, heard=False, hindrance=Hindrance(major_faults=8, memory_stall=0.75)) == 1.25


@pytest.mark.parametrize("thread", ["spin()", "thread = threading.Thread(target=spin); thread.start(); thread.join()"])
def test_the_wait_of_a_process_that_shares_a_core_is_read(thread: str) -> None:
    core = min(os.sched_getaffinity(0))
    loop = f"import os, threading\nos.sched_setaffinity(0, {{{core}}})\ndef spin():\n    while True: pass\n{thread}"
    rivals = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2)]
    try:
        _await(lambda: min(read_hindrance(rival.pid).core_wait for rival in rivals) > 0.2)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert read_hindrance(rivals[0].pid).core_wait == 0.0 and describe_threads(rivals[0].pid) == ""


def test_a_process_that_sleeps_uninterruptibly_is_seen(tmp_path: Path) -> None:
    """A thread that spawns a program so until the program has begun, and this one waits at a pipe before."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    actions = f"[(os.POSIX_SPAWN_OPEN, 0, {str(pipe)!r}, 0, 0)]"
    spawn = f"import os; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions={actions})"
    spawner = subprocess.Popen([sys.executable, "-c", spawn])
    _await(lambda: read_hindrance(spawner.pid).is_blocked)
    assert describe_threads(spawner.pid).startswith("D")
    pipe.open("wb").close()
    assert spawner.wait(_PATIENCE) == 0


def _await(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_state(pid: int) -> str:
    """Return the letter of a process's state; T: stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def beating() -> Iterator[Child]:
    child = Child("beating", [sys.executable, "-c", _BEATING])
    child.start()
    yield child
    child.send(signal.SIGKILL)
    while child.is_running and child.reap() is None:
        time.sleep(0.02)


def test_a_child_is_silent_once_it_stops_to_beat_and_not_before_it_began(beating: Child) -> None:
    deadline = time.monotonic() + _PATIENCE
    assert beating.heartbeat_age(0.0) == beating.heartbeat_age(1000.0) == 0.0
    while beating._heartbeat_age is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        beating.heartbeat_age(2000.0)
    beating.send(signal.SIGSTOP)
    assert beating._process is not None
    while read_state(beating._process.pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    beating.heartbeat_age(2001.0)  # takes the last beats
    silent = [beating.heartbeat_age(2001.0 + now) for now in (1.0, 2.0, 3.0)]
    assert silent[0] > 0.9
    assert [silent[1] - silent[0], silent[2] - silent[1]] == pytest.approx([1.0, 1.0])
    beating.send(signal.SIGCONT)
    while beating.heartbeat_age(2004.0):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    beating.send(signal.SIGKILL)
    while beating.reap() is None:
        time.sleep(0.02)
    assert beating.heartbeat_age(9000.0) == 0.0


_HANGING = """
import asyncio, os, sys, threading
from blink.host.heartbeat import start_beating
os.sched_setaffinity(0, {int(sys.argv[1])})
def hang():
    number = 1
    while True:
        number = number * 5 & 0xffff
async def run():
    start_beating(asyncio.get_running_loop())
    threads = [threading.Thread(target=hang, daemon=True) for _ in range(int(sys.argv[2]))]
    await asyncio.sleep(1.0)
    for thread in threads:
        thread.start()
    hang()
asyncio.run(run())
"""


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [0, 3])
def test_a_loop_that_hangs_beside_two_busy_processes_is_found(num_threads: int) -> None:
    core = str(min(os.sched_getaffinity(0)))
    burn = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2)]
    child = Child("hanging", [sys.executable, "-c", _HANGING, core, str(num_threads)])
    child.start()
    try:
        deadline, silent, ran = time.monotonic() + 4 * _PATIENCE, 0.0, 0.0
        while silent <= 3.0:
            assert time.monotonic() < deadline and child.reap() is None
            time.sleep(0.5)
            before, silent = silent, child.heartbeat_age(time.monotonic())
            if not before:
                ran = child.hindrance().core_time
        assert 2.0 < child.hindrance().core_time - ran < 6.0
    finally:
        child.send(signal.SIGKILL)
        for burner in burners:
            burner.kill()
            burner.wait()
        while child.is_running and child.reap() is None:
            time.sleep(0.02)


class Beats:
    """A region's file of which only the heartbeat is written."""

    def __init__(self, name: str) -> None:
        self.path = region_path(name)

    def beat(self, count: int) -> None:
        place = CONSTANTS["control_offset"] + field_offset(CONTROL, "heartbeat")
        self.path.write_bytes(bytes(place) + count.to_bytes(8, sys.byteorder))
        self.path.chmod(0o600)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"beats-{os.getpid()}-{secrets.token_hex(3)}"
    yield name
    region_path(name).unlink(missing_ok=True)


def test_an_engine_that_boots_has_no_fault_however_long(name: str) -> None:
    health = EngineHealth(name, 10.0)
    assert [health.fault(float(now)) for now in range(100)] == [None] * 100
    assert not health.was_seen


def test_an_engine_is_at_fault_when_its_heartbeat_stands(name: str) -> None:
    health, beats = EngineHealth(name, 10.0), Beats(name)
    for now in range(30):
        beats.beat(now + 1)
        assert health.fault(float(now)) is None
    faults = [health.fault(float(now)) for now in range(30, 42)]
    assert faults[:10] == [None] * 10
    assert faults[10] == "has shown no heartbeat for 11 s"
    health.reset()
    assert health.fault(50.0) is None


def test_an_engine_is_at_fault_when_its_region_stays_away(name: str) -> None:
    health, beats = EngineHealth(name, 10.0), Beats(name)
    beats.beat(1)
    assert health.fault(0.0) is None and health.was_seen
    beats.path.unlink()
    assert [health.fault(now) for now in (1.0, 2.0)] == [None, None]
    beats.beat(2)
    assert health.fault(3.0) is None
    beats.path.unlink()
    assert [health.fault(now) for now in (4.0, 5.0, 6.0)] == [None, None, "has lost its region"]
