# SPDX-License-Identifier: Apache-2.0
"""The region on another machine: one-sided RDMA writes and reads of one reliable queue pair, which orders them."""

from __future__ import annotations

from typing import Any

import numpy as np

from blink.link.rdma.verbs import Channel, verbs


class VerbsTransport:
    """Access a region through a connected channel.

    Writes are sent at once and waited for by nobody. Once the connection is broken, writes go nowhere and words read as
    0; `Channel.failure` says so.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._word = np.zeros(1, np.uint32)

    def write(self, offset: int, data: bytes | np.ndarray[Any, Any]) -> None:
        source = np.frombuffer(data, np.uint8)
        verbs().blink_channel_write(self._channel.handle, offset, source.ctypes.data, len(source))

    def store_word(self, offset: int, value: int) -> None:
        verbs().blink_channel_store_u32(self._channel.handle, offset, value)

    def load_word(self, offset: int) -> int:
        return int(self._word[0]) if self._channel.read(offset, self._word) else 0

    def drain(self, cq_offset: int, entries: int, head: int, out: np.ndarray[Any, Any]) -> int:
        """Copy completions that the channel has collected: it knows the queue and follows its head by itself."""
        del cq_offset, entries, head
        return verbs().blink_channel_drain(self._channel.handle, out.ctypes.data, len(out))
