# SPDX-License-Identifier: Apache-2.0
"""What a client needs of a running engine besides its queue pair, and the way to it through shared memory."""

from __future__ import annotations

from typing import Any, Protocol

from blink.link.shm import ShmTransport
from blink.region.memory import QueuePairAddresses, all_queue_pairs_taken, claim_queue_pair, open_region, region_path
from blink.region.native import lib
from blink.region.transport import Transport


class Connection(Protocol):
    """One queue pair of an engine, held for this process, and the engine's own words."""

    header: Any  # layout.HEADER
    geometry: Any  # layout.GEOMETRY
    addresses: QueuePairAddresses
    transport: Transport

    def refresh(self) -> None:
        """Look at the engine's words; the methods below tell what was seen."""
        ...

    def control_word(self, field: str) -> int:
        """Return a 32-bit word of the control block."""
        ...

    def heartbeat(self) -> int:
        """Return the scheduler's heartbeat."""
        ...

    def statistics(self) -> Any:
        """Return the engine's counters and gauges (dtype layout.STATISTICS)."""
        ...

    def loss(self) -> str | None:
        """Say why this engine cannot be reached any more; None while it can."""
        ...

    def start_watch(self, head: int, event_fd: int, interval_us: int) -> None:
        """Make `event_fd` readable when completions arrive at `head` or behind it."""
        ...

    def watch(self, head: int, active: bool) -> None:
        """Go on watching from `head`; `active` says that completions are expected at all."""
        ...

    def close(self) -> None:
        """Give the queue pair back."""
        ...


class Connector(Protocol):
    """A way to whatever engine serves at one place, now or later."""

    def open(self) -> Connection | None:
        """Return a connection, or None while one is on its way; never block for more than some milliseconds.

        Raises:
            BlinkError: there is none to be had now.
        """
        ...


class ShmConnector:
    """The way to an engine of this host, by its region's name."""

    def __init__(self, region: str) -> None:
        self._region = region

    def open(self) -> Connection:
        return ShmConnection(self._region)


class ShmConnection:
    """A queue pair in shared memory."""

    def __init__(self, name: str) -> None:
        """Open the region and claim a queue pair.

        Raises:
            EngineUnavailableError: no engine runs, or all its queue pairs are taken.
            LayoutMismatchError: engine and frontend are of different builds.
        """
        self._name = name
        self._region = open_region(name)
        index = claim_queue_pair(self._region)
        if index is None:
            self._region.close()
            raise all_queue_pairs_taken()
        self.header = self._region.header
        self.geometry = self._region.geometry
        self.addresses = QueuePairAddresses(self._region, index)
        self.transport: Transport = ShmTransport(self._region)
        self._waiter: int | None = None

    def refresh(self) -> None:
        """Do nothing: the words are in memory."""

    def control_word(self, field: str) -> int:
        return self._region.control_word(field)

    def heartbeat(self) -> int:
        return self._region.heartbeat()

    def statistics(self) -> Any:
        return self._region.control["statistics"]

    def loss(self) -> str | None:
        try:
            is_current = region_path(self._name).stat().st_ino == self._region.inode
        except FileNotFoundError:
            is_current = False
        return None if is_current else "the engine was restarted"

    def start_watch(self, head: int, event_fd: int, interval_us: int) -> None:
        queue = self._region.address + self.addresses.cq
        self._waiter = lib.blink_waiter_start(queue, int(self.geometry["cq_entries"]), event_fd, interval_us)
        self.watch(head, False)

    def watch(self, head: int, active: bool) -> None:
        if self._waiter is not None:
            lib.blink_waiter_watch(self._waiter, head, active)

    def close(self) -> None:
        if self._waiter is not None:
            lib.blink_waiter_stop(self._waiter)
            self._waiter = None
        self._region.close()
