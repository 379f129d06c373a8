# SPDX-License-Identifier: Apache-2.0
"""The region through NIXL: one transfer after the other, each waited for, as NIXL orders nothing between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from blink.link.rdma.nixl_link import NixlChannel


class NixlTransport:
    """Access a region through a connected channel.

    Once the connection is broken, writes go nowhere and words read as 0; `NixlChannel.failure` says so.
    """

    def __init__(self, channel: NixlChannel) -> None:
        self._channel = channel
        self._word = np.zeros(1, np.uint32)

    def write(self, offset: int, data: bytes | np.ndarray[Any, Any]) -> None:
        self._channel.write(offset, data)

    def store_word(self, offset: int, value: int) -> None:
        self._channel.write(offset, np.array([value], np.uint32))

    def load_word(self, offset: int) -> int:
        return int(self._word[0]) if self._channel.read(offset, self._word) else 0

    def drain(self, cq_offset: int, entries: int, head: int, out: np.ndarray[Any, Any]) -> int:
        """Copy completions that the channel has collected: it knows the queue and follows its head by itself."""
        del cq_offset, entries, head
        return self._channel.drain(out)
