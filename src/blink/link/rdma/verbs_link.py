# SPDX-License-Identifier: Apache-2.0
"""The link over verbs: one-sided writes and reads of one reliable RDMA connection, which orders them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from blink.link.rdma.handshake import Descriptor
from blink.link.rdma.link import RdmaLink
from blink.link.rdma.message import Message, struct_from_message, struct_to_message
from blink.link.rdma.verbs import Device, EndInfo, LinkCounters, check_verbs, verbs

if TYPE_CHECKING:
    from _ctypes import CFuncPtr


class VerbsLink(RdmaLink):
    """A queue pair reached by verbs. Writes are sent at once and waited for by nobody."""

    backend: ClassVar[str] = "verbs"

    def __init__(self, device: Device) -> None:
        """Open the device.

        Raises:
            ConfigError: there is no such device, or no library.
        """
        super().__init__()
        self._handle = check_verbs(verbs().blink_verbs_link_open(device.name.encode(), device.gid_index))

    def info(self) -> Message:
        info = EndInfo()
        verbs().blink_verbs_link_info(self._handle, ctypes.byref(info))
        return struct_to_message(info)

    def reach(self, descriptor: Descriptor) -> None:
        peer = struct_from_message(EndInfo, descriptor.end)
        arguments = (ctypes.byref(item) for item in (peer, descriptor.shared, descriptor.pair))
        check_verbs(verbs().blink_verbs_link_connect(self._handle, *arguments))

    def read(self, offset: int, out: npt.NDArray[np.generic]) -> bool:
        return bool(verbs().blink_verbs_link_read(self._handle, offset, out.ctypes.data, out.nbytes))

    def write(self, offset: int, data: bytes) -> None:
        verbs().blink_verbs_link_write(self._handle, offset, data, len(data))

    def store_word(self, offset: int, value: int) -> None:
        verbs().blink_verbs_link_store_u32(self._handle, offset, value)

    def native_reader(self) -> tuple[CFuncPtr, int | None]:
        return verbs().blink_verbs_link_read, self._handle

    def native_writer(self) -> tuple[CFuncPtr, int | None]:
        return verbs().blink_verbs_link_store_u32, self._handle

    def failure(self) -> str:
        return verbs().blink_verbs_link_failure(self._handle).decode() if self._handle else "closed"

    def counters(self) -> LinkCounters:
        """Return how much was sent so far."""
        counters = LinkCounters()
        verbs().blink_verbs_link_counters(self._handle, ctypes.byref(counters))
        return counters

    def disconnect(self) -> None:
        if self._handle:
            verbs().blink_verbs_link_close(self._handle)
            self._handle = 0
