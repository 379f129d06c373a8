# SPDX-License-Identifier: Apache-2.0
"""How few rows of an all-reduce with a norm are spread: csrc/kernels/comm/all_reduce_spread.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blink.kernels.gpu.comm.boxes import MOST_BLOCKS

THREADS: Final = 256  # csrc/kernels/comm/words.cuh: kSpreadThreads
_MOST_BLOCKS = MOST_BLOCKS * 2  # of half as many threads, which run at once with all else
_CLUSTERS = (2, 4, 8)
_MOST_LINES = 4  # which a thread has in registers


@dataclass(frozen=True, slots=True)
class Spread:
    """How many blocks have a row, and how many of its lines each of their threads."""

    cluster: int
    lines: int


def choose_spread(rows: int, lines: int) -> Spread | None:
    """Return how rows of so many lines are spread; None: a block has a row, or several.

    It is the smallest cluster whose threads have a line each, or the largest with which all blocks run at once.
    """
    fitting = [cluster for cluster in _CLUSTERS if rows * cluster <= _MOST_BLOCKS]
    if not fitting:
        return None
    cluster = next((one for one in fitting if one * THREADS >= lines), fitting[-1])
    each = -(-lines // (cluster * THREADS))
    return Spread(cluster, each) if each <= _MOST_LINES else None
