# SPDX-License-Identifier: Apache-2.0
"""The interface between a frontend and its engine, wherever that is: one queue pair's memory and the engine's words."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from blink.region.memory import QueuePairAddresses


class Link(Protocol):
    """One queue pair of a running engine, held for this process. Offsets are bytes from the region's start.

    Writes become visible in the order in which they were made. Once the link is lost, writes go nowhere and words read
    as 0.
    """

    header: np.void  # layout.HEADER
    geometry: np.void  # layout.GEOMETRY
    addresses: QueuePairAddresses

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes; a later store_word() is seen only after them."""
        ...

    def store_word(self, offset: int, value: int) -> None:
        """Store a 32-bit word with release order."""
        ...

    def load_word(self, offset: int) -> int:
        """Load a 32-bit word with acquire order."""
        ...

    def keep(self, offset: int, value: int, grace: float) -> None:
        """Change a word, which holds `value` at the first call, now and ten times a second for `grace` seconds.

        A native thread does it, also while this process holds the interpreter's lock; until close().
        """
        ...

    def notify(self, event_fd: int, head: int, interval_us: int) -> None:
        """Look for completions from position `head` on, and make `event_fd` readable when there are some."""
        ...

    def drain(self, head: int, out: int, most: int) -> int:
        """Copy the completions that have arrived at `head` and behind it to the address `out`; return how many."""
        ...

    def expect(self, head: int, active: bool) -> None:
        """Go on from `head`, as all before it was drained; `active` says that completions are expected at all."""
        ...

    def state(self) -> int:
        """Return the engine's EngineState, as far as it is known without waiting."""
        ...

    def report(self) -> np.void:
        """Look at the engine's control block (layout.CONTROL)."""
        ...

    def loss(self) -> str | None:
        """Say why this engine cannot be reached any more; None while it can."""
        ...

    def close(self) -> None:
        """Give the queue pair back."""
        ...


class Connector(Protocol):
    """A way to whatever engine serves at one place, now or later."""

    retry_seconds: float  # to wait after open() has returned nothing or raised

    def open(self) -> Link | None:
        """Return a link, or None while one is on its way; never block for more than some milliseconds.

        Raises:
            BlinkError: there is none to be had now.
        """
        ...
