# SPDX-License-Identifier: Apache-2.0
"""The interface between a queue pair and the memory that holds it. Offsets are bytes from the region's start."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Transport(Protocol):
    """One-sided access to a region. Writes become visible in the order in which they were made."""

    def write(self, offset: int, data: bytes | np.ndarray[Any, Any]) -> None:
        """Write bytes; a later store_word() is seen only after them."""
        ...

    def store_word(self, offset: int, value: int) -> None:
        """Store a 32-bit word with release order."""
        ...

    def load_word(self, offset: int) -> int:
        """Load a 32-bit word with acquire order."""
        ...

    def drain(self, cq_offset: int, entries: int, head: int, out: np.ndarray[Any, Any]) -> int:
        """Copy the completions that have arrived at `head` and behind it into `out`; return how many."""
        ...
