# SPDX-License-Identifier: Apache-2.0
"""The engine's words that keep its scheduler from launching, while the host changes what steps run on."""

from __future__ import annotations

import time
from typing import Final

from blink.errors import EngineUnavailableError
from blink.region.layout import Absent, Drop
from blink.region.memory import Region

_LOOK_SECONDS = 0.001
_BEGIN_SECONDS: Final = 300.0  # of a scheduler that runs: it begins when the step in flight is over
_END_SECONDS = 5.0


class Hold:
    """Holds a scheduler; csrc/scheduler/pause.h has the protocol. Use from one thread at a time."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._number = 0
        self.is_on = False

    def begin(self, drop: Drop) -> None:
        """Let the scheduler launch nothing, and take `drop` away; return when it is so. It may be on already.

        Raises:
            EngineUnavailableError: the scheduler does not run.
        """
        self._number = self._number % 0xFFFFFFFF + 1
        self._region.store_control("hold_drop", drop)
        self._region.store_control("hold", self._number)
        if not self._await_held(self._number, _BEGIN_SECONDS):
            self.end()
            raise EngineUnavailableError("The scheduler does not stand still.")
        self.is_on = True

    def end(self) -> None:
        """Let the scheduler go on."""
        self._region.store_control("hold", 0)
        self._await_held(0, _END_SECONDS)
        self.is_on = False

    @property
    def absent(self) -> Absent | int:
        """What the model lacks: bits of Absent, which frontends see."""
        return self._region.control_word("absent")

    @absent.setter
    def absent(self, bits: int) -> None:
        self._region.store_control("absent", bits)

    def _await_held(self, number: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._region.control_word("held") != number:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True
