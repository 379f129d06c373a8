# SPDX-License-Identifier: Apache-2.0
"""Low-rank updates of matrix multiplications: what adapters (LoRA) add to the results of a step's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blink.formats.base import Weight
from blink.formats.experts import ExpertWeights


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of some rows of a weight; the adapter's scale is in `up`. One of experts has a matrix of each."""

    rows: slice  # of the weight, which may hold several matrices one below the other
    down: Tensor  # [rank, in], or [experts, rank, in]
    up: Tensor  # [rows, rank], or [experts, rows, rank]


# The updates of an adapter, by the identity of the weight that they belong to.
Updates = Mapping[int, Sequence[LowRank]]


@dataclass(frozen=True, slots=True)
class TokenUpdates:
    """The updates of those of a step's tokens that have one adapter."""

    tokens: Tensor  # int64, their indices in the step
    updates: Updates


# Adds what adapters change to results [tokens, out], in place, and returns them; factors: float32 [tokens], what rows
# of x are to be multiplied by, or none.
Finish = Callable[[Tensor, Tensor | None], Tensor]


class StepUpdates(Protocol):
    """The updates of a step's tokens; those of tokens without an adapter are none."""

    def begin(self, x: Tensor, weight: Weight, *, early: bool = False) -> Finish:
        """Begin the update of x [tokens, in] times a weight, which add() does at once; return what ends it."""
        ...

    def add(
        self, result: Tensor, x: Tensor, weight: Weight, factors: Tensor | None = None, *, early: bool = False
    ) -> Tensor:
        """Add to result [tokens, out] what adapters change of x [tokens, in] times a weight, in place; return it.

        factors: float32 [tokens], what rows of x are to be multiplied by. early: whether the kernels before and after
        this are launched early (PDL).
        """
        ...


class AdapterStore(Protocol):
    """Holds adapters by index where the model reads them."""

    def put(self, index: int, updates: Updates) -> None:
        """Hold an adapter, once nobody uses the one before it; blocks until the model can read it."""
        ...

    def clear(self, index: int) -> None:
        """Free an adapter that nobody uses any more."""
        ...


@dataclass(frozen=True, slots=True)
class WeightParts:
    """A weight that adapters may change."""

    shape: tuple[int, int]  # out and in
    rows: tuple[slice, ...]  # those of each matrix in it, ascending
    experts: int = 0  # that have such a weight each; 0: it is none of experts


class GroupedUpdates:
    """Adds the updates of one adapter after the other."""

    def __init__(self, groups: Sequence[TokenUpdates]) -> None:
        self._groups = groups

    def begin(self, x: Tensor, weight: Weight, *, early: bool = False) -> Finish:  # noqa: ARG002
        """Do what StepUpdates.begin() says: all at its end."""
        return lambda result, factors: self.add(result, x, weight, factors)

    def add(
        self,
        result: Tensor,
        x: Tensor,
        weight: Weight,
        factors: Tensor | None = None,
        *,
        early: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """Do what StepUpdates.add() says."""
        x = x if factors is None else x * factors[:, None].to(x.dtype)
        for group in self._groups:
            for update in group.updates.get(id(weight), ()):
                found = (x[group.tokens] @ update.down.T) @ update.up.T
                result[:, update.rows].index_add_(0, group.tokens, found)
        return result

    def add_expert(self, result: Tensor, x: Tensor, weight: ExpertWeights, expert: int, tokens: Tensor) -> Tensor:
        """Do what kernels/cpu/moe.py's RowUpdates.add_expert() says."""
        for group in self._groups:
            updates = group.updates.get(id(weight), ())
            rows = torch.isin(tokens, group.tokens).nonzero()[:, 0] if updates else tokens
            for update in updates:
                found = (x[rows] @ update.down[expert].T) @ update.up[expert].T
                result[:, update.rows].index_add_(0, rows, found)
        return result
