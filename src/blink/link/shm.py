# SPDX-License-Identifier: Apache-2.0
"""The region on this host: POSIX shared memory, which the GPU polls too."""

from __future__ import annotations

from typing import Any

import numpy as np

from blink.region.memory import Region
from blink.region.native import lib


class ShmTransport:
    """Access a mapped region; ordered words go through the native library, as numpy loads order nothing on Arm."""

    def __init__(self, region: Region) -> None:
        self._bytes = region.bytes
        self._address = region.address

    def write(self, offset: int, data: bytes | np.ndarray[Any, Any]) -> None:
        source = np.frombuffer(data, np.uint8)
        self._bytes[offset : offset + len(source)] = source

    def store_word(self, offset: int, value: int) -> None:
        lib.blink_store_u32(self._address + offset, value)

    def load_word(self, offset: int) -> int:
        return lib.blink_load_u32(self._address + offset)

    def drain(self, cq_offset: int, entries: int, head: int, out: np.ndarray[Any, Any]) -> int:
        return lib.blink_cq_drain(self._address + cq_offset, entries, head, out.ctypes.data, len(out))
