# SPDX-License-Identifier: Apache-2.0
"""The link to an engine of this host: POSIX shared memory, which the GPU polls too."""

from __future__ import annotations

import numpy as np

from blink.region.memory import QueuePairAddresses, Region, all_queue_pairs_taken, claim_queue_pair, open_region
from blink.region.native import lib


class ShmConnector:
    """The way to an engine of this host, by its region's name."""

    retry_seconds = 0.05  # a look at a file: an engine that has just booted serves so much sooner

    def __init__(self, region: str) -> None:
        self._region = region

    def open(self) -> ShmLink:
        """Open the region and claim a queue pair.

        Raises:
            EngineUnavailableError: no engine runs, or all its queue pairs are taken.
            LayoutMismatchError: engine and frontend are of different builds.
        """
        region = open_region(self._region)
        index = claim_queue_pair(region)
        if index is None:
            region.close()
            raise all_queue_pairs_taken()
        return ShmLink(region, index)


class ShmLink:
    """A queue pair in mapped memory; ordered words go through the native library, as numpy orders nothing on Arm."""

    def __init__(self, region: Region, index: int) -> None:
        """Use a queue pair that this process has claimed; the region is this object's from then on."""
        self.region = region
        self.index = index
        self.header: np.void = region.header
        self.geometry: np.void = region.geometry
        self.addresses = QueuePairAddresses(region, index)
        self._entries = int(self.geometry["cq_entries"])
        self._poller: int | None = None
        self._renewer: int | None = None

    def write(self, offset: int, data: bytes) -> None:
        self.region.memory[offset : offset + len(data)] = data

    def store_word(self, offset: int, value: int) -> None:
        lib.blink_store_u32(self.region.address + offset, value)

    def load_word(self, offset: int) -> int:
        return lib.blink_load_u32(self.region.address + offset)

    def keep(self, offset: int, value: int, grace: float) -> None:
        if self._renewer is None:
            self._renewer = lib.blink_lease_renewer_start(
                lib.blink_store_at, self.region.address, offset, value, round(1000 * grace)
            )
        lib.blink_lease_renewer_renew(self._renewer)

    def notify(self, event_fd: int, head: int, interval_us: int) -> None:
        queue = self.region.address + self.addresses.cq
        self._poller = lib.blink_shm_poller_start(queue, self._entries, head, event_fd, interval_us)

    def drain(self, head: int, out: int, most: int) -> int:
        return lib.blink_cq_drain(self.region.address + self.addresses.cq, self._entries, head, out, most)

    def expect(self, head: int, active: bool) -> None:
        assert self._poller is not None, "notify() comes first"
        lib.blink_shm_poller_expect(self._poller, head, active)

    def state(self) -> int:
        return self.region.control_word("state")

    def report(self) -> np.void:
        state = self.region.control_word("state")  # acquired: the words below are no older
        words = self.region.control.copy()
        words["state"] = state
        return words

    def loss(self) -> str | None:
        return None if self.region.is_current() else "the engine was restarted"

    def close(self) -> None:
        if self._poller is not None:
            lib.blink_shm_poller_stop(self._poller)
            self._poller = None
        if self._renewer is not None:
            lib.blink_lease_renewer_stop(self._renewer)
            self._renewer = None
        self.region.close()
