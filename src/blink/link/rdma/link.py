# SPDX-License-Identifier: Apache-2.0
"""What the links over RDMA share: the engine's header and control block by reads, and completions by a collector."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from blink.errors import EngineUnavailableError
from blink.link.rdma.handshake import Descriptor
from blink.link.rdma.message import Message
from blink.region.layout import CONSTANTS, CONTROL, HEADER
from blink.region.memory import QueuePairAddresses, check_header
from blink.region.native import lib

if TYPE_CHECKING:
    from _ctypes import CFuncPtr


class RdmaLink(ABC):
    """A queue pair in another machine's memory; usable once connect() has returned."""

    backend: ClassVar[str]
    min_interval_us: ClassVar[int] = 0  # between two reads for completions

    header: np.void
    geometry: np.void
    addresses: QueuePairAddresses

    def __init__(self) -> None:
        self._control = np.zeros(1, CONTROL)
        self._word = np.zeros(1, np.uint32)
        self._collector: int | None = None
        self._renewer: int | None = None

    @abstractmethod
    def info(self) -> Message:
        """Describe this end to the engine's."""

    @abstractmethod
    def reach(self, descriptor: Descriptor) -> None:
        """Connect to the engine's end and its memory.

        Raises:
            ConfigError: no memory can be registered, or there is no path.
            HandshakeError: the description of the engine's end is none.
        """

    @abstractmethod
    def read(self, offset: int, out: npt.NDArray[np.generic]) -> bool:
        """Read bytes of the region into `out` (at most 16 KiB) and wait for them; False after a failure."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None: ...

    @abstractmethod
    def store_word(self, offset: int, value: int) -> None: ...

    @abstractmethod
    def native_reader(self) -> tuple[CFuncPtr, int | None]:
        """Return a ReadRegion (csrc/rdma/collector.h) and the address of its context, valid until disconnect()."""

    @abstractmethod
    def native_writer(self) -> tuple[CFuncPtr, int | None]:
        """Return a StoreWord (csrc/cpu/lease_renewer.h) and the address of its context, valid until disconnect()."""

    @abstractmethod
    def failure(self) -> str:
        """Say why the connection is broken; empty while it works."""

    @abstractmethod
    def disconnect(self) -> None:
        """Break the connection."""

    def connect(self, descriptor: Descriptor) -> None:
        """Reach the engine's end, and read the engine's header.

        Raises:
            ConfigError: no memory can be registered, or there is no path.
            EngineUnavailableError: nothing can be read, or the engine was restarted.
            LayoutMismatchError: engine and frontend are of different builds.
        """
        self.reach(descriptor)
        header = np.zeros(1, HEADER)
        if not self.read(0, header):
            raise EngineUnavailableError(f"there is no RDMA path to the engine: {self.failure()}")
        self.header = header[0]
        check_header(self.header)
        if int(self.header["epoch"]) != descriptor.epoch:
            raise EngineUnavailableError("the engine was restarted while this frontend connected")
        self.geometry = self.header["geometry"]
        self.addresses = QueuePairAddresses(self, descriptor.pair_index)
        self.report()

    def load_word(self, offset: int) -> int:
        return int(self._word[0]) if self.read(offset, self._word) else 0

    def keep(self, offset: int, value: int, grace: float) -> None:
        if self._renewer is None:
            self._renewer = lib.blink_lease_renewer_start(*self.native_writer(), offset, value, round(1000 * grace))
            self._stop_renewer = weakref.finalize(self, lib.blink_lease_renewer_stop, self._renewer)
        lib.blink_lease_renewer_renew(self._renewer)

    def notify(self, event_fd: int, head: int, interval_us: int) -> None:
        entries, interval_us = int(self.geometry["cq_entries"]), max(interval_us, self.min_interval_us)
        self._collector = lib.blink_collector_start(
            *self.native_reader(), self.addresses.cq, entries, head, event_fd, interval_us
        )
        # Its thread must not outlive the interpreter, which it may call.
        self._stop_collector = weakref.finalize(self, lib.blink_collector_stop, self._collector)

    def drain(self, head: int, out: int, most: int) -> int:
        assert self._collector is not None, "notify() comes first"
        return lib.blink_collector_drain(self._collector, head, out, most)

    def expect(self, head: int, active: bool) -> None:
        assert self._collector is not None, "notify() comes first"
        lib.blink_collector_expect(self._collector, head, active)

    def state(self) -> int:
        return int(self._control[0]["state"])

    def report(self) -> np.void:
        self.read(CONSTANTS["control_offset"], self._control)
        return self._control[0]

    def loss(self) -> str | None:
        failure = self.failure()
        return f"the RDMA connection to the engine broke ({failure})" if failure else None

    def close(self) -> None:
        if self._collector is not None:
            self._stop_collector()
            self._collector = None
        if self._renewer is not None:
            self._stop_renewer()
            self._renewer = None
        self.disconnect()
