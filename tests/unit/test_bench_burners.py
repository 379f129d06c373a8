# SPDX-License-Identifier: Apache-2.0
"""Burners burn, where they are told to, and end with their context and with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blink.bench.burners import Burners
from blink.errors import ConfigError

_SMALL = 1 << 20
_PARENT = f"""
import time
from blink.bench.burners import Burners
with Burners(2, (), {_SMALL}) as burners:
    print(*(process.pid for process in burners.processes), flush=True)
    time.sleep(600)
"""


def _cpu_ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _await_end(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_is_alive, processes))


def test_half_of_them_compute_and_half_copy_on_their_core() -> None:
    cpu = min(os.sched_getaffinity(0))
    with Burners(3, (cpu,), _SMALL) as burners:
        pids = [process.pid for process in burners.processes]
        work = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3] for pid in pids]
        assert work == [b"compute", b"copy", b"compute"]
        assert all(os.sched_getaffinity(pid) == {cpu} for pid in pids)
        before, deadline = [_cpu_ticks(pid) for pid in pids], time.monotonic() + 60
        while any(_cpu_ticks(pid) <= ticks for pid, ticks in zip(pids, before, strict=True)):
            assert time.monotonic() < deadline, "a burner does not burn"
            time.sleep(0.02)
    _await_end(pids)


def test_they_end_when_what_they_disturb_fails() -> None:
    burners = Burners(1, (), _SMALL)
    with pytest.raises(KeyboardInterrupt), burners:
        assert all(_is_alive(process.pid) for process in burners.processes)
        raise KeyboardInterrupt
    _await_end([process.pid for process in burners.processes])


def test_they_end_when_their_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(_is_alive, pids))
        parent.kill()
    _await_end(pids)


def test_buffers_that_do_not_fit_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--interference 4 needs"), Burners(4, (), 1 << 50):
        pass


def test_core_that_is_not_there_is_an_error_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    burners = Burners(2, (8000,), _SMALL)
    with pytest.raises(ConfigError, match="could not start"), burners:
        pass
    assert "8000 cannot be used" in capfd.readouterr().err
    _await_end([process.pid for process in burners.processes])
