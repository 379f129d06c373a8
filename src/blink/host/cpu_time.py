# SPDX-License-Identifier: Apache-2.0
"""The CPU time of processes and of all that descend from them, by /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blink.errors import ConfigError

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    born: int  # in ticks since the machine's start: a later process may get the same id
    ticks: int  # its own, and those of its children that ended


class ProcessTrees:
    """Processes with their descendants.

    A descendant counts to its end, even after its parent has ended. What it used then counts if its parent has waited
    for it, as servers do.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        """Take the roots.

        Raises:
            ConfigError: one of them cannot be seen.
        """
        seen = _read_processes()
        if missing := [pid for pid in pids if pid not in seen]:
            raise ConfigError(f"there is no process {', '.join(map(str, missing))} here")
        self._roots = {pid: seen[pid].born for pid in pids}
        self._known = dict(self._roots)

    def read_seconds(self) -> float | None:
        """Return the CPU seconds, user and system; None once a root has ended."""
        seen = _read_processes()
        living = {pid for pid, born in self._known.items() if pid in seen and seen[pid].born == born}
        if not living.issuperset(self._roots):
            return None
        members = _with_descendants(living, seen)
        self._known = {pid: seen[pid].born for pid in members}
        return sum(seen[pid].ticks for pid in members) / _TICKS_PER_SECOND


def _with_descendants(pids: set[int], seen: Mapping[int, _Process]) -> set[int]:
    members, newest = set(pids), set(pids)
    while newest := {pid for pid, process in seen.items() if process.parent in newest} - members:
        members |= newest
    return members


def _read_processes() -> dict[int, _Process]:
    found: dict[int, _Process] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # from the third on; proc(5)
        except OSError:  # it has ended
            continue
        found[int(folder.name)] = _Process(int(fields[1]), int(fields[19]), sum(map(int, fields[11:15])))
    return found
