# SPDX-License-Identifier: Apache-2.0
"""Module: a matrix of a model that adapters' files may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from blink.formats.base import Weight
from blink.formats.experts import ExpertWeights
from blink.models.weights.cuts import Cut, Whole

ALL = Whole()
Orientation = Literal["rows", "columns", "unknown"]  # of a parameter [experts, out, in], of [experts, in, out]


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter that has a matrix of each expert."""

    orientation: Orientation  # as the model that is trained has it
    num_parts: int  # matrices one below the other in each expert's


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix of a checkpoint, or a rank's part of it: some rows of a weight. A fused one is that of each expert."""

    weight: Weight | ExpertWeights
    rows: slice  # of the weight
    shape: tuple[int, int]  # out and in, of the part
    order: Tensor | None  # which of the part's rows are the weight's; None: all, as they are
    expert: int | None = None  # whose matrix it is; None: nobody's, or everybody's
    fused: Fused | None = None
    refusal: str = ""  # why adapters may not change it; empty: they may
    cut: Cut | Whole = ALL  # what the part is of the file's matrix

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Out and in, as files have them."""
        return self.cut.widen(self.shape)

    def take(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part's A [..., rank, in] and B [..., rows, rank] of a file's."""
        if isinstance(self.cut, Cut):
            down, up = (down, self.cut.take(up)) if self.cut.dim == 0 else (self.cut.take(down), up)
        return down, up if self.order is None else up.index_select(up.ndim - 2, self.order)

    @property
    def is_of_experts(self) -> bool:
        """Whether the weight has experts."""
        return self.expert is not None or self.fused is not None

    @property
    def num_experts(self) -> int:
        """How many experts the weight has; 0: it is none of experts."""
        return self.weight.shape[0] if self.is_of_experts else 0

    @property
    def parts(self) -> tuple[slice, ...]:
        """The rows of each matrix in it."""
        count = 1 if self.fused is None else self.fused.num_parts
        size = (self.rows.stop - self.rows.start) // count
        return tuple(slice(self.rows.start + size * part, self.rows.start + size * (part + 1)) for part in range(count))
