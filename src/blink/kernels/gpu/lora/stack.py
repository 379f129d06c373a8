# SPDX-License-Identifier: Apache-2.0
"""The matrices of all adapters for one weight, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LEAST_RANK = 16  # the least k of tl.dot
MOST_RANK_TILE = 64


@dataclass(frozen=True, slots=True)
class Stack:
    """The updates of one weight by all adapters, the scales in `up`."""

    down: Tensor  # [places, parts * rank, in], of experts [places, experts, ...]; a part is a matrix of the weight
    up: Tensor  # [places, out, rank], of experts [places, experts, out, rank]
    parts: Tensor  # int32 [out / tile]; the part that each tile of the weight's rows belongs to
    num_parts: int
    tile: int  # rows of the weight

    @property
    def rank(self) -> int:
        """The rank, padding included."""
        return self.up.shape[-1]
