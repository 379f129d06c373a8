# SPDX-License-Identifier: Apache-2.0
"""Watches over one group of neighbours: starts them, and ends all when its standard input does, however that comes.

Runs as `python -m flat.burn PLAN`, PLAN being a JSON object with the fields of `Plan`; speaks in lines of JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from blink.host.process import die_with_parent
from flat.cgroups import Throttle, cgroup_of
from flat.kinds import KINDS, Maker, NotMeasuredError

STOP: Final = "stop"
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_START_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.2
_WORD: Final = 8
_STRIDE: Final = 64  # bytes between two counts: a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a group of neighbours does."""

    kind: str  # of KINDS, or STOP: `pids` are stopped for a while
    number: int
    cpus: Sequence[int]
    folder: str  # where files may be written
    pids: Sequence[int] = ()  # STOP, throttle: of the server
    seconds: float = 0.0  # STOP: how long


class Group:
    """The processes of a plan, one process group; orphans among them become this process's children."""

    def __init__(self, number: int) -> None:
        self.pgid = 0
        self._counts = mmap.mmap(-1, max(1, number) * _STRIDE)
        self._pids: list[int] = []
        self._ready, self._is_ready = os.pipe()

    def start(self, make: Maker) -> None:
        """Start the next process."""
        index, parent = len(self._pids), os.getpid()
        if (pid := os.fork()) == 0:
            self._be(index, parent, make)
        self.pgid = self.pgid or pid
        with suppress(ProcessLookupError, PermissionError):  # it has done so itself, or is gone
            os.setpgid(pid, self.pgid)
        self._pids.append(pid)

    def await_work(self) -> None:
        """Return when all have done a piece of work.

        Raises:
            NotMeasuredError: one could not start, or standard input ended.
        """
        deadline, left = time.monotonic() + _START_SECONDS, len(self._pids)
        while left:
            readable, _, _ = select.select([self._ready, sys.stdin], [], [], _LOOK_SECONDS)
            if self._ready in readable:
                left -= len(os.read(self._ready, left))
            elif readable or time.monotonic() > deadline or self.num_alive() < len(self._pids):
                raise NotMeasuredError(f"{left} of {len(self._pids)} processes could not start")

    def num_alive(self) -> int:
        """Count those that have not ended by themselves."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return sum(os.waitid(os.P_PID, pid, flags) is None for pid in self._pids)

    def work(self) -> int:
        """Return how many units of work all have done."""
        starts = range(0, len(self._pids) * _STRIDE, _STRIDE)
        return sum(int.from_bytes(self._counts[start : start + _WORD], sys.byteorder) for start in starts)

    def end(self) -> None:
        """Kill all, and return when none is left."""
        if self.pgid:
            with suppress(ProcessLookupError):
                os.killpg(self.pgid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _be(self, index: int, parent: int, make: Maker) -> NoReturn:
        try:
            os.setpgid(0, self.pgid)
            die_with_parent(parent, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work, done, place = make(index), 0, index * _STRIDE
            while True:
                is_first = done == 0
                done += work()
                self._counts[place : place + _WORD] = done.to_bytes(_WORD, sys.byteorder)
                if is_first:
                    os.write(self._is_ready, b"1")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def stop_and_go_on(plan: Plan) -> Maker:
    """Return the work of stopping the plan's processes for a while, once: one unit when they go on."""
    is_done = False

    def stop() -> int:
        nonlocal is_done
        while is_done:
            signal.pause()
        send(plan.pids, signal.SIGSTOP)
        time.sleep(plan.seconds)
        send(plan.pids, signal.SIGCONT)
        is_done = True
        return 1

    return lambda _index: stop


def throttle_server(plan: Plan) -> Throttle:
    """Put the server and this process, whose children follow, into one cgroup with little time.

    Raises:
        NotMeasuredError: it cannot be done here.
    """
    if not plan.pids:
        raise NotMeasuredError("whose cgroup is throttled? give --server-pid")
    homes = {pid: cgroup_of(pid) for pid in (*plan.pids, os.getpid())}
    return Throttle(homes[os.getpid()], homes, len(plan.cpus))


def send(pids: Sequence[int], signum: signal.Signals) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def watch(plan: Plan, folder: Path) -> None:
    """Run the neighbours until standard input ends; say when all are at work, and at the end what they did.

    STOP waits for the first byte of standard input.

    Raises:
        NotMeasuredError: they cannot run here.
    """
    group, throttle = Group(plan.number), None
    try:
        if plan.kind == STOP:
            say(pgid=0)
            if sys.stdin.buffer.read(1):
                group.start(stop_and_go_on(plan))
        else:
            make = KINDS[plan.kind].prepare(plan.number, folder)
            throttle = throttle_server(plan) if plan.kind == "throttle" else None
            for _ in range(plan.number):
                group.start(make)
            group.await_work()
            say(pgid=group.pgid)
        sys.stdin.buffer.read()
        say(alive=group.num_alive(), work=group.work())
    finally:
        group.end()
        if plan.kind == STOP:
            send(plan.pids, signal.SIGCONT)
        if throttle:
            throttle.leave()


def say(**fields: Any) -> None:
    """Write a line of JSON, if anybody reads it."""
    with suppress(BrokenPipeError):
        print(json.dumps(fields), flush=True)


def main() -> None:
    """Watch over the plan that the argument is."""
    plan = Plan(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(tempfile.mkdtemp(prefix="neighbours-", dir=plan.folder))
    try:
        os.sched_setaffinity(0, plan.cpus)
        watch(plan, folder)
    except (NotMeasuredError, OSError) as error:
        say(reason=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
