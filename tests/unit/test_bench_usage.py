# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of real processes that compute for a known time, and energy only where it is the server's."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from blink.bench import sweep
from blink.bench.config import UsageConfig
from blink.bench.usage import Usage, UsageMeter, is_this_host
from blink.errors import BlinkError, ConfigError
from blink.host.cpu_time import ProcessTrees

# Computes for a time at each line "own" of its input; "child" has a child do it, which then stays; "gone" has a child
# do it that ends.
_PROGRAM = """
import subprocess, sys, time
def burn():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    print("done", flush=True)
children = []
for line in sys.stdin:
    if line == "own\\n":
        burn()
        continue
    command = [sys.executable, "-c", open(sys.argv[1]).read(), sys.argv[1]]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    children.append(child)
    child.stdin.write("own\\n")
    child.stdin.flush()
    if line == "gone\\n":
        child.stdin.close()
        child.wait()
"""
_BURNT = 0.3
_SLACK = 0.25  # the interpreter's own start, twice


@pytest.fixture
def server(tmp_path: Any) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    command = [sys.executable, str(path), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        work(process, "own")  # it has started
        yield process
        assert process.stdin is not None
        process.stdin.close()  # which ends it, and then its children
        process.wait(10)


def work(process: subprocess.Popen[str], kind: str) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{kind}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def wait_until_idle(trees: ProcessTrees) -> float:
    """Return the seconds once they do not grow."""
    before = -1.0
    while (now := trees.read_seconds()) != before:
        assert now is not None
        before = now
        time.sleep(0.1)
    return before


def test_the_time_of_a_process_and_of_its_children_is_counted(server: subprocess.Popen[str]) -> None:
    trees = ProcessTrees([server.pid])
    before = wait_until_idle(trees)
    for kind in ("own", "child", "gone"):
        work(server, kind)
        now = wait_until_idle(trees)
        assert _BURNT - 0.03 <= now - before <= _BURNT + _SLACK * (kind != "own") + 0.03, kind
        before = now


def test_a_process_twice_named_counts_once(server: subprocess.Popen[str]) -> None:
    trees = ProcessTrees([server.pid, server.pid])
    assert wait_until_idle(trees) == wait_until_idle(ProcessTrees([server.pid]))


def test_nothing_is_said_of_a_server_that_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter = UsageMeter(processes=ProcessTrees([process.pid]))
    before = meter.read()
    process.communicate(b"\n")
    assert before.cpu_seconds is not None and meter.read().since(before) == Usage(None, None)
    with pytest.raises(ConfigError, match=f"no process {process.pid}"):
        ProcessTrees([process.pid])


class _Gpu:
    """A GPU of 100 W times its index, on a clock that each reading moves by a second; the fifth is not there."""

    def __init__(self, index: int) -> None:
        if index == 4:
            raise BlinkError("NVML: Not Found")
        self._joules, self._watts = 1e9, 100 * index

    def read_joules(self) -> float:
        self._joules += self._watts
        return self._joules


def test_energy_is_that_of_all_gpus_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "Gpu", _Gpu)
    meter = sweep._open_meter(UsageConfig(gpu="1,3"), is_here=True)
    assert meter.read().since(Usage(2e9, None)).joules == 400
    assert sweep._open_meter(UsageConfig(gpu=""), is_here=True) == UsageMeter()
    assert sweep._open_meter(UsageConfig(gpu="0,4"), is_here=True).read() == Usage()
    assert "no power is read: NVML: Not Found" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--gpu 0;1"):
        sweep._open_meter(UsageConfig(gpu="0;1"), is_here=True)


def test_nothing_is_read_of_a_server_on_another_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "Gpu", _Gpu)
    assert sweep._open_meter(UsageConfig(), is_here=False).read() == Usage()
    assert "another host's" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--server-pids"):
        sweep._open_meter(UsageConfig(server_pids="1"), is_here=False)


def test_this_hosts_addresses_are_known() -> None:
    assert is_this_host("127.0.0.1") and is_this_host("localhost")
    assert not is_this_host("192.0.2.1") and not is_this_host("no.such.host.invalid")
