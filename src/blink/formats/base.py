# SPDX-License-Identifier: Apache-2.0
"""What a weight of the model may be: a tensor, or something that stays in fewer bits than it computes in."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class QuantizedWeight(ABC):
    """A weight [out, in] that is no plain tensor; `linear` multiplies with it."""

    shape: tuple[int, int]
    dtype: torch.dtype  # that it computes in
    device: torch.device

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that a product reads of it."""

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T; x: contiguous [rows, in] of its dtype."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the weight as a tensor of its dtype."""


class QuantizedEmbedding(QuantizedWeight):
    """A quantised weight whose single rows can be read."""

    @abstractmethod
    def take_rows(self, rows: Tensor) -> Tensor:
        """Return some rows [len(rows), in] of the weight as a tensor of its dtype; rows: int32 [number].

        Raises:
            IndexError: the weight has no such row.
        """


Weight = Tensor | QuantizedWeight


def plain(weight: object) -> Tensor:
    """Return a weight that must be a tensor, for kernels that know no other."""
    assert isinstance(weight, Tensor)
    return weight
