# SPDX-License-Identifier: Apache-2.0
"""Neighbours of the flat protocol work, end with their context and with their parent, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flat.burn import STOP, Plan
from flat.cgroups import Throttle
from flat.kinds import KINDS, NotMeasuredError
from flat.neighbours import Neighbours, program

_PARENT = """
import sys, time
from flat.burn import Plan
from flat.neighbours import Neighbours
with Neighbours(Plan(kind="fork", number=2, cpus=[int(sys.argv[1])], folder=sys.argv[2])) as neighbours:
    print(neighbours.pgid, flush=True)
    time.sleep(600)
"""


def _plan(kind: str, folder: Path, number: int = 1) -> Plan:
    return Plan(kind=kind, number=number, cpus=[min(os.sched_getaffinity(0))], folder=str(folder))


def _members(pgid: int) -> list[str]:
    """Return the processes of a group."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == pgid:
                found.append(folder.name)
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "throttle"])
def test_each_kind_is_at_work_and_gone_afterwards(kind: str, tmp_path: Path) -> None:
    with Neighbours(_plan(kind, tmp_path)) as neighbours:
        assert _members(neighbours.pgid)
    assert neighbours.done["alive"] == 1
    assert neighbours.done["work"] > 0
    assert _members(neighbours.pgid) == []
    assert list(tmp_path.iterdir()) == []


def test_they_run_on_their_cores_as_many_as_asked_for(tmp_path: Path) -> None:
    plan = _plan("compute", tmp_path, 3)
    with Neighbours(plan) as neighbours:
        members = _members(neighbours.pgid)
        assert len(members) == 3
        assert all(os.sched_getaffinity(int(pid)) == set(plan.cpus) for pid in members)
    assert neighbours.done["alive"] == 3


def test_none_are_started_without_a_number(tmp_path: Path) -> None:
    with Neighbours(_plan("compute", tmp_path, 0)) as neighbours:
        assert neighbours.pgid == 0
    assert neighbours.done == {"alive": 0, "work": 0}


def test_they_and_their_files_go_when_their_parent_is_killed(tmp_path: Path) -> None:
    _, environment = program("burn")
    command = [sys.executable, "-c", _PARENT, str(min(os.sched_getaffinity(0))), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pgid = int(parent.stdout.readline())
        assert len(_members(pgid)) >= 2
        parent.kill()
    _await(lambda: not _members(pgid) and not list(tmp_path.iterdir()))


def test_what_cannot_run_here_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for kind, reason in {"fork": "no program `true`", "compile": r"no g\+\+", "throttle": "give --server-pid"}.items():
        with pytest.raises(NotMeasuredError, match=reason), Neighbours(_plan(kind, tmp_path)):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_process_is_stopped_for_a_while_and_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        plan = Plan(kind=STOP, number=1, cpus=[min(os.sched_getaffinity(0))], folder=str(tmp_path), pids=[process.pid])
        with Neighbours(plan) as neighbours:  # for no time
            neighbours.go()
            _await(lambda: not neighbours.pgid and _state(process.pid) != "T")
        with Neighbours(replace(plan, seconds=600.0)) as neighbours:
            neighbours.go()
            _await(lambda: _state(process.pid) == "T")
        assert _state(process.pid) != "T"  # ended early, the stop ends too
        assert neighbours.done["work"] == 0
        process.communicate(b"\n")


def test_a_cgroup_gets_half_of_its_cores_and_gives_its_processes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {7: tmp_path / "a", 8: tmp_path / "b"}
    for home in homes.values():
        home.mkdir()
    with pytest.raises(NotMeasuredError, match=r"no cpu\.max"):
        Throttle(tmp_path, homes, 4)
    made, make = tmp_path / f"flat-{os.getpid()}", Path.mkdir
    assert not made.exists()

    def mkdir(path: Path) -> None:
        make(path)
        (path / "cpu.max").touch()  # as the kernel does

    monkeypatch.setattr(Path, "mkdir", mkdir)
    throttle = Throttle(tmp_path, homes, 4)
    assert (made / "cpu.max").read_text() == "200000 100000"
    assert (made / "cgroup.procs").read_text() == "8"  # the last that moved
    throttle.leave()
    assert [(home / "cgroup.procs").read_text() for home in homes.values()] == ["7", "8"]
