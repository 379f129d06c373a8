# SPDX-License-Identifier: Apache-2.0
"""What the matrices of a mixture of experts may be: a tensor of all, or something in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.base import QuantizedWeight, StoredMatrix, plain
from blink.formats.fp8 import FP8
from blink.formats.gguf_experts import GgufExperts
from blink.formats.layouts import ExpertMatrices
from blink.formats.matrix import QuantizedMatrix
from blink.formats.registry import FORMATS, UNIT_FORMATS
from blink.formats.schemes import BF16, FP8_ROW, GROUP, Encoding, FormatId, Quantization


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """The same matrix of each expert."""

    weights: tuple[QuantizedWeight, ...]

    @property
    def encoding(self) -> None:
        """None: each has its own."""

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

    @classmethod
    def allocate(cls, shape: tuple[int, int, int], allocate: Callable[..., Tensor] = torch.empty) -> Fp8Experts:
        """Allocate matrices that store() fills; allocate: takes a shape and a dtype."""
        return cls(allocate(*shape, dtype=FP8), allocate(*shape[:2], dtype=torch.float32))

    @property
    def encoding(self) -> Encoding:
        """How the matrices are kept."""
        return FP8_ROW

    @property
    def shape(self) -> torch.Size:
        """The matrices' shape."""
        return self.values.shape

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Values and scales."""
        return self.values, self.scales

    def to(self, device: torch.device) -> Fp8Experts:
        """Return the matrices on a device."""
        return Fp8Experts(self.values.to(device), self.scales.to(device))

    def store(self, expert: int, rows: slice, matrix: QuantizedMatrix) -> None:
        """Copy a matrix, whose rows have a scale each, into some rows of an expert's."""
        self.values[expert, rows], self.scales[expert, rows] = matrix.values, matrix.scales[:, 0]

    def multiply(self, factors: Tensor) -> None:
        """Multiply each expert's matrix by its factor."""
        self.scales.mul_(factors[:, None])

    def __getitem__(self, expert: int) -> Tensor:
        return self.values[expert].float() * self.scales[expert, :, None]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices in another type."""
        return (self.values.float() * self.scales[..., None]).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The matrices of all experts in 8 or 4 bits, scales by the GROUP of columns, as a GPU's GEMMs read them.

    Rows are filled up with zeros to whole groups. What lies in a row and in a group's word, the format's module says.
    """

    format: FormatId
    shape: tuple[int, int, int]  # experts, rows and columns
    values: Tensor  # uint8 [experts, out, bytes of a row]
    groups: Tensor  # int32 [experts, groups, out]
    row_scales: Tensor | None = None  # float32 [experts, out], of formats that have them

    @property
    def encoding(self) -> Encoding:
        """How the matrices are kept."""
        return Encoding(self.format, grouped=True)

    @classmethod
    def allocate(
        cls, format: FormatId, shape: tuple[int, int, int], allocate: Callable[..., Tensor] = torch.empty
    ) -> PackedExperts:
        """Allocate matrices that store() fills; allocate: takes a shape and a dtype."""
        experts, rows, columns = shape
        groups = -(-columns // GROUP)
        return cls(
            format,
            shape,
            allocate(experts, rows, groups * GROUP * format.bits // 8, dtype=torch.uint8),
            allocate(experts, groups, rows, dtype=torch.int32),
            allocate(experts, rows, dtype=torch.float32) if FORMATS[format].has_row_scales else None,
        )

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Values and the groups' words."""
        return self.values, self.groups

    def to(self, device: torch.device) -> PackedExperts:
        """Return the matrices on a device."""
        scales = None if self.row_scales is None else self.row_scales.to(device)
        return PackedExperts(self.format, self.shape, self.values.to(device), self.groups.to(device), scales)

    def store(self, expert: int, rows: slice, matrix: StoredMatrix) -> None:
        """Pack a matrix into some rows of an expert's."""
        values, words, scales = FORMATS[self.format].pack_expert(matrix, -self.shape[2] % GROUP)
        self.values[expert, rows], self.groups[expert, :, rows] = values, words.T
        if self.row_scales is not None and scales is not None:
            self.row_scales[expert, rows] = scales

    def multiply(self, factors: Tensor) -> None:
        """Multiply each expert's matrix by its factor; the scales are rounded as their format has them."""
        if self.row_scales is not None:
            self.row_scales.mul_(factors[:, None])
            return
        form = UNIT_FORMATS[self.format]
        for words, factor in zip(self.groups, factors, strict=True):
            scales, zeros = form.split_scales(words)
            words.copy_(form.join_scales(scales * factor, zeros))

    def __getitem__(self, expert: int) -> Tensor:
        """Return an expert's matrix in float32."""
        values = self.values[expert]
        words = self.groups[expert].T.flatten().view(len(values), -1)  # of which a group's bytes are neighbours
        found = FORMATS[self.format].unpack_expert(values, words)[:, : self.shape[2]]
        return found if self.row_scales is None else found * self.row_scales[expert, :, None]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices in another type."""
        return torch.stack([self[expert].to(dtype) for expert in range(self.shape[0])])


def allocate_experts(
    scheme: Quantization, shape: tuple[int, int, int], allocate: Callable[..., Tensor]
) -> Fp8Experts | PackedExperts:
    """Allocate the matrices of all experts as a GPU keeps them, where they are quantized by a scheme."""
    if scheme.encoding == FP8_ROW:
        return Fp8Experts.allocate(shape, allocate)
    return PackedExperts.allocate(scheme.format, shape, allocate)


ExpertWeights = Tensor | QuantizedExperts | Fp8Experts | PackedExperts | GgufExperts  # [experts, out, in]


def multiply_experts(weight: ExpertWeights, factors: Tensor) -> None:
    """Multiply each expert's matrix, kept as all are, in place by its factor, float32 [experts]."""
    if find_encoding(weight) == BF16:
        plain(weight).mul_(factors[:, None, None])
    else:
        weight.multiply(factors)  # pyright: ignore[reportAttributeAccessIssue]


def find_encoding(weight: ExpertWeights) -> Encoding | None:
    """Return how experts are kept; None if that differs among them."""
    return BF16 if isinstance(weight, Tensor) else weight.encoding


def experts_of(gate_up: ExpertWeights, down: ExpertWeights, top_k: int = 1, *, is_plain: bool = True) -> ExpertMatrices:
    """Return experts' sizes, and how they lie in memory. is_plain: SiLU is between them, and no bias."""
    experts, hidden, size = down.shape
    encodings = find_encoding(gate_up), find_encoding(down)
    return ExpertMatrices(experts, top_k, hidden, size, encodings, is_plain)


def split_experts(weight: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    """Return the values of all experts' matrices, which are contiguous, and the scales or words if they have any."""
    values, scales = (plain(weight), None) if find_encoding(weight) == BF16 else weight.parts  # pyright: ignore[reportAttributeAccessIssue]
    assert values.is_contiguous() and (scales is None or scales.is_contiguous())
    return values, scales
