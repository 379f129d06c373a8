# SPDX-License-Identifier: Apache-2.0
"""The time in which a GPU is the host's: the scheduler, which is held, has left it, and goes on afterwards.

While the resident kernel runs, a call that allocates on the GPU, or waits for it, would wait for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch

from blink.errors import EngineUnavailableError
from blink.region.memory import Region

_LEAVE_SECONDS: Final = 30.0  # a scheduler that is held looks at the word every few milliseconds
_LOOK_SECONDS: Final = 0.0005
_BEAT_SECONDS: Final = 0.1


class LeavingScheduler(Protocol):
    """What launches the resident kernel."""

    def has_ended(self) -> bool:
        """Whether the kernel has returned, and nothing of it is in flight."""
        ...

    def start(self) -> None:
        """Launch it."""
        ...


@contextmanager
def without_scheduler(region: Region, scheduler: LeavingScheduler) -> Iterator[None]:
    """Have the GPU to oneself; the scheduler must be held (hold.py). Frontends hear the engine's heartbeat meanwhile.

    Raises:
        EngineUnavailableError: the scheduler does not leave.
    """
    region.store_control("leave", region.control_word("hold"))
    try:
        _await_end(scheduler)
        with _beating(region):
            try:
                yield
            finally:
                _settle()
    finally:
        region.store_control("leave", 0)
        if scheduler.has_ended():
            scheduler.start()


def _await_end(scheduler: LeavingScheduler) -> None:
    deadline = time.monotonic() + _LEAVE_SECONDS
    while not scheduler.has_ended():
        if time.monotonic() > deadline:
            raise EngineUnavailableError("The scheduler does not leave the GPU, so its model cannot be changed.")
        time.sleep(_LOOK_SECONDS)


def _settle() -> None:
    """Wait for what the host has asked of the GPU, and give memory back that only the change needed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def _beating(region: Region) -> Iterator[None]:
    """Keep the heartbeat going, whose writer the scheduler is else; on a thread, as a load may take minutes."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            region.store_control("heartbeat", region.heartbeat() + 1)

    thread = threading.Thread(target=beat, name="blink-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
