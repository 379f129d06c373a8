# SPDX-License-Identifier: Apache-2.0
"""Ranks: what a rank of a tensor-parallel group asks of the others while it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from blink.errors import StepFailedError
from blink.region.layout import CONSTANTS


class RankLostError(StepFailedError):
    """A rank of a tensor-parallel group has failed or does not come, which ends the engine."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}", CONSTANTS["first_lost_rank"] + rank)
        self.rank = rank


# Of the partial sum, the residual [rows, width] that is written, the norm's weights [width] and its epsilon: the norm.
AddNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class Ranks(Protocol):
    """One rank's end of its group. All ranks call the same methods in the same order, with tensors of one shape."""

    rank: int
    size: int

    def add(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' partial results, in the order of ranks: the same bits on each.

        Raises:
            RankLostError: a rank does not come.
        """
        ...

    @property
    def add_norm(self) -> AddNorm | None:
        """What adds that sum to the residual in one kernel with the RMS norm; None: there is no such kernel."""
        ...

    def join(self, part: Tensor) -> Tensor:
        """Return all ranks' parts one beside the other along the last dimension, where widths may differ.

        Only the first rank gets them; others get no row.

        Raises:
            RankLostError: a rank does not come.
        """
        ...


class _OneRank:
    """A group of one, which has all that it needs."""

    rank, size, add_norm = 0, 1, None

    def add(self, partial: Tensor) -> Tensor:
        """Return what is no sum."""
        return partial

    def join(self, part: Tensor) -> Tensor:
        """Return the whole."""
        return part


ONE_RANK: Ranks = _OneRank()


def mean_of(ranks: Ranks, means: Tensor) -> Tensor:
    """Return the mean of something whose equal parts the ranks have, from each part's mean."""
    return ranks.add(means) if ranks.size == 1 else ranks.add(means).div_(ranks.size)
