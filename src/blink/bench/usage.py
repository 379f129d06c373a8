# SPDX-License-Identifier: Apache-2.0
"""What a load takes of this host: joules of the server's GPUs, and CPU seconds of its processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from blink.errors import BlinkError
from blink.host.cpu_time import ProcessTrees
from blink.host.nvml import Gpu


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used, by counters or between two looks at them. None: nothing tells."""

    joules: float | None = None
    cpu_seconds: float | None = None

    def since(self, before: Usage) -> Usage:
        """Return what was used after an earlier look."""
        return Usage(_subtract(self.joules, before.joules), _subtract(self.cpu_seconds, before.cpu_seconds))


@dataclass(frozen=True, slots=True)
class UsageMeter:
    """Reads the counters of some GPUs, and of some processes with their descendants."""

    gpus: Sequence[Gpu] = ()
    processes: ProcessTrees | None = None

    def read(self) -> Usage:
        """Read all counters."""
        return Usage(self._read_joules(), self.processes.read_seconds() if self.processes else None)

    def _read_joules(self) -> float | None:
        try:
            return sum(gpu.read_joules() for gpu in self.gpus) if self.gpus else None
        except BlinkError:  # a GPU that fell off its bus
            return None


def is_this_host(host: str) -> bool:
    """Say whether a host's address is one of this machine's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _subtract(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before
