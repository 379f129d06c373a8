# SPDX-License-Identifier: Apache-2.0
"""What a weight of the model may be: a tensor, or something that stays in fewer bits than it computes in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """The same matrix of each expert."""

    weights: tuple[QuantizedWeight, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns."""
        return (len(self.weights), *self.weights[0].shape)

    def __getitem__(self, expert: int) -> QuantizedWeight:
        return self.weights[expert]


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """The matrices of all experts in FP8, in their usual order, each row with a scale."""

    values: Tensor  # FP8 [experts, out, in]
    scales: Tensor  # float32 [experts, out]

    @property
    def shape(self) -> torch.Size:
        """The matrices' shape."""
        return self.values.shape

    def to(self, device: torch.device) -> Fp8Experts:
        """Return the matrices on a device."""
        return Fp8Experts(self.values.to(device), self.scales.to(device))

    def __getitem__(self, expert: int) -> Tensor:
        return self.values[expert].float() * self.scales[expert, :, None]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices in another type."""
        return (self.values.float() * self.scales[..., None]).to(dtype)


Weight = Tensor | QuantizedWeight
ExpertWeights = Tensor | QuantizedExperts | Fp8Experts  # [experts, out, in]


def plain(weight: Weight | ExpertWeights) -> Tensor:
    """Return a weight that must be a tensor, for kernels that know no other."""
    assert isinstance(weight, Tensor)
    return weight


def split_experts(weight: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    """Return the values of all experts' matrices, which are contiguous, and their scales if they are FP8."""
    values, scales = (weight.values, weight.scales) if isinstance(weight, Fp8Experts) else (plain(weight), None)
    assert values.is_contiguous() and (scales is None or scales.is_contiguous())
    return values, scales
