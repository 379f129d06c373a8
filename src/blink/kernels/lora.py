# SPDX-License-Identifier: Apache-2.0
"""Low-rank updates of matrix multiplications: what adapters (LoRA) add to the results of a step's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from blink.formats.base import Weight


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of some rows of a weight; the adapter's scale is in `up`."""

    rows: slice  # of the weight, which may hold several matrices one below the other
    down: Tensor  # [rank, in]
    up: Tensor  # [rows, rank]


# The updates of an adapter, by the identity of the weight that they belong to.
Updates = Mapping[int, Sequence[LowRank]]


@dataclass(frozen=True, slots=True)
class TokenUpdates:
    """The updates of those of a step's tokens that have one adapter."""

    tokens: Tensor  # int64, their indices in the step
    updates: Updates


class StepUpdates:
    """The updates of a step's tokens; those of tokens without an adapter are none."""

    def __init__(self, groups: Sequence[TokenUpdates]) -> None:
        self._groups = groups

    def add(self, result: Tensor, x: Tensor, weight: Weight) -> Tensor:
        """Add to result [tokens, out], which is x [tokens, in] times a weight, what adapters change, in place."""
        for group in self._groups:
            for update in group.updates.get(id(weight), ()):
                found = (x[group.tokens] @ update.down.T) @ update.up.T
                result[:, update.rows].index_add_(0, group.tokens, found)
        return result
