# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings: what a table has of each token, added to what its embedding was projected to."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class JoinInputs(Protocol):
    """Computes the inputs that layers have of their own."""

    def __call__(
        self, projected: Tensor, table: Tensor, ids: Tensor, weight: Tensor, layers: range, *, scale: float, eps: float
    ) -> Tensor:
        """Return (norm(projected * scale) + table[ids] * sqrt(size)) / sqrt(2) of some layers [tokens, layers, size].

        projected: [tokens, all layers * size]; table: [rows, all layers * size], in the memory of projected's device,
        or of the host and readable by that device; ids: [tokens], each below rows; weight: of the norm of a layer's
        part, [size].
        """
        ...
