# SPDX-License-Identifier: Apache-2.0
"""The ranks of a CPU engine: threads of one process that exchange tensors in lock-step.

Each rank has a word that it alone writes: the number of the exchange that it has come to. It stores its tensor, then
its word; it reads the others' tensors once their words have that number. Tensors are double-buffered. A rank that
stores the tensor of exchange e + 2 has seen all others come to e + 1, so no rank still reads exchange e.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from blink.kernels.all_reduce import RankLostError

_LOOK_SECONDS = 0.25  # a wait counts no longer than this at a time: a process that was stopped has not waited


class Exchange:
    """What all ranks share."""

    def __init__(self, size: int, timeout: float) -> None:
        """timeout: seconds that a rank waits for another, in which it sees no other."""
        self.size = size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._words = [0] * size
        self._buffers: list[list[Tensor | None]] = [[None] * size, [None] * size]
        self._lost: RankLostError | None = None

    @property
    def lost(self) -> RankLostError | None:
        """Why the group has ended; None: it has not."""
        return self._lost

    def fail(self, rank: int, reason: str) -> None:
        """End the group because of a rank: whoever waits fails, and whoever comes. The first reason stays."""
        with self._changed:
            self._lost = self._lost or RankLostError(rank, reason)
            self._changed.notify_all()

    def tell(self) -> None:
        """Wake the ranks that wait: a word that one of them looks at has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, has_come: Callable[[], bool], rank_of: Callable[[], int], *, bounded: bool = True) -> None:
        """Wait until something has come; rank_of: says which rank is missing.

        Raises:
            RankLostError: it has not in time, or the group has ended.
        """
        waited = 0.0
        with self._changed:
            while not has_come():
                if self._lost is not None:
                    raise self._lost
                if bounded and waited >= self._timeout:
                    self._lost = RankLostError(rank_of(), f"did not come within {self._timeout:g} s")
                    self._changed.notify_all()
                    raise self._lost
                start = time.monotonic()
                self._changed.wait(_LOOK_SECONDS)
                waited += min(time.monotonic() - start, _LOOK_SECONDS)
            if self._lost is not None:
                raise self._lost

    def meet(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Leave a rank's tensor, and return those of all ranks of the same exchange."""
        number = self._words[rank] + 1
        buffer = self._buffers[number % 2]
        buffer[rank] = tensor
        with self._changed:
            self._words[rank] = number
            self._changed.notify_all()
        self.wait(lambda: min(self._words) >= number, lambda: self._words.index(min(self._words)))
        return [one for one in buffer if one is not None]


class CpuRanks:
    """One rank's end of the group."""

    add_norm = None

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.rank, self.size = rank, exchange.size
        self._exchange = exchange

    def add(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' partial results, in the order of ranks: the same bits on each."""
        first, second, *others = self._exchange.meet(self.rank, partial)
        total = first + second
        for one in others:
            total.add_(one)
        return total

    def join(self, part: Tensor) -> Tensor:
        """Return all ranks' parts one beside the other on the first rank, and on others no row."""
        parts = self._exchange.meet(self.rank, part)
        return part[:0] if self.rank else torch.cat(parts, dim=-1)
