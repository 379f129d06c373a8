# SPDX-License-Identifier: Apache-2.0
"""Puts a server and its neighbours into one cgroup (version 2) with half of their cores' time, and takes it back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from flat.kinds import NotMeasuredError

SHARE: Final = 0.5  # of the time of the cores
_PERIOD_US: Final = 100_000


def cgroup_of(pid: int) -> Path:
    """Return the folder of a process's cgroup.

    Raises:
        NotMeasuredError: there is no cgroup v2, or no such process.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [Path(words[1]) for words in mounts if words[2] == "cgroup2"]
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        raise NotMeasuredError(f"there is no process {pid}") from None
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    if not roots or not paths:
        raise NotMeasuredError("cgroup v2 is not mounted")
    return roots[0] / paths[0]


class Throttle:
    """A cgroup below `parent`, into which processes move from their homes, and their later children with them."""

    def __init__(self, parent: Path, homes: Mapping[int, Path], cores: int) -> None:
        """Create and limit it, and move the processes.

        Raises:
            NotMeasuredError: the machine does not permit it; all is as before.
        """
        self._homes = homes
        self._folder = parent / f"flat-{os.getpid()}"
        try:
            self._folder.mkdir()
        except OSError as error:
            raise NotMeasuredError(f"no cgroup can be made in {parent}: {error.strerror}") from None
        try:
            if not (self._folder / "cpu.max").exists():
                raise NotMeasuredError("the cgroup of this process has no cpu.max")
            (self._folder / "cpu.max").write_text(f"{int(SHARE * cores * _PERIOD_US)} {_PERIOD_US}")
            for pid in homes:
                (self._folder / "cgroup.procs").write_text(str(pid))
        except (OSError, NotMeasuredError) as error:
            self.leave()
            raise NotMeasuredError(str(error)) from None

    def leave(self) -> None:
        """Move the processes back and remove the cgroup, which must have no others by then."""
        for pid, home in self._homes.items():
            with suppress(OSError):  # it may have ended
                (home / "cgroup.procs").write_text(str(pid))
        with suppress(OSError):
            self._folder.rmdir()
