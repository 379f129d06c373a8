# SPDX-License-Identifier: Apache-2.0
"""What the matrices of a mixture of experts may be: a tensor of all, or something in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats import mxfp4
from blink.formats.base import QuantizedWeight, plain
from blink.formats.mxfp4 import Mxfp4Matrix, multiply_groups, powers_of_two
from blink.formats.packed import FP8, GROUP, QuantizedMatrix, group_words, split_group_words

_PIECE = 64  # columns whose numbers of 4 bits lie in the same 32 bytes
# MXFP4: the kernels see a number of 4 bits as one that is 2^126 times smaller, so a scale of 1 has the exponent 253.
_EXPONENT_OF_ONE = 253


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

    def store(self, expert: int, rows: slice, matrix: QuantizedMatrix) -> None:
        """Copy a matrix, whose rows have a scale each, into some rows of an expert's."""
        self.values[expert, rows], self.scales[expert, rows] = matrix.values, matrix.scales[:, 0]

    def __getitem__(self, expert: int) -> Tensor:
        return self.values[expert].float() * self.scales[expert, :, None]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices in another type."""
        return (self.values.float() * self.scales[..., None]).to(dtype)


class ExpertFormat(Enum):
    """How PackedExperts store a number."""

    FP8 = "fp8"
    INT4 = "int4"
    MXFP4 = "mxfp4"

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 8 if self is ExpertFormat.FP8 else 4


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The matrices of all experts in 8 or 4 bits, scales by the GROUP of columns, as a GPU's products read them.

    Rows are filled up with zeros to whole groups. FP8: a byte for each column, in order. Of 4 bits 32 bytes hold 64
    columns, of which the first 32 lie in the low halves. A group's word: FP8 a float32 scale; INT4 as
    csrc/gpu/decode/quantized.cuh has it; MXFP4 the exponents of its four scales, the first lowest, over those of
    row_scales.
    """

    format: ExpertFormat
    shape: tuple[int, int, int]  # experts, rows and columns
    values: Tensor  # uint8 [experts, out, bytes of a row]
    groups: Tensor  # int32 [experts, groups, out]
    row_scales: Tensor | None = None  # float32 [experts, out], of MXFP4

    @classmethod
    def allocate(
        cls, format: ExpertFormat, shape: tuple[int, int, int], allocate: Callable[..., Tensor] = torch.empty
    ) -> PackedExperts:
        """Allocate matrices that store() fills; allocate: takes a shape and a dtype."""
        experts, rows, columns = shape
        groups = -(-columns // GROUP)
        return cls(
            format,
            shape,
            allocate(experts, rows, groups * GROUP * format.bits // 8, dtype=torch.uint8),
            allocate(experts, groups, rows, dtype=torch.int32),
            allocate(experts, rows, dtype=torch.float32) if format is ExpertFormat.MXFP4 else None,
        )

    def to(self, device: torch.device) -> PackedExperts:
        """Return the matrices on a device."""
        scales = None if self.row_scales is None else self.row_scales.to(device)
        return PackedExperts(self.format, self.shape, self.values.to(device), self.groups.to(device), scales)

    def store(self, expert: int, rows: slice, matrix: QuantizedMatrix | Mxfp4Matrix) -> None:
        """Pack a matrix into some rows of an expert's."""
        missing = -self.shape[2] % GROUP
        if isinstance(matrix, Mxfp4Matrix):
            assert self.row_scales is not None
            exponents = functional.pad(matrix.exponents.int(), (0, missing // mxfp4.GROUP))
            largest = exponents.amax(1, keepdim=True)
            powers = (_EXPONENT_OF_ONE - largest + exponents).clamp_(min=0).to(torch.uint8)
            self.row_scales[expert, rows] = powers_of_two(largest[:, 0])
            self.groups[expert, :, rows] = powers.view(torch.int32).T
            self.values[expert, rows] = _pack_halves(functional.pad(matrix.codes, (0, missing)))
            return
        self.groups[expert, :, rows] = group_words(matrix).T
        if self.format is ExpertFormat.FP8:
            self.values[expert, rows, : self.shape[2]] = matrix.values.view(torch.uint8)
            self.values[expert, rows, self.shape[2] :] = 0
        else:
            self.values[expert, rows] = _pack_halves(functional.pad(matrix.values, (0, missing)))

    def __getitem__(self, expert: int) -> Tensor:
        """Return an expert's matrix in float32."""
        values, columns = self.values[expert], self.shape[2]
        words = self.groups[expert].T.flatten().view(len(values), -1)
        if self.format is ExpertFormat.MXFP4:
            assert self.row_scales is not None
            scales = (words.view(torch.uint8).int() << 23).view(torch.float32) * 2.0**-126
            found = multiply_groups(_unpack_halves(values), scales)[:, :columns]
            return found * self.row_scales[expert, :, None]
        if self.format is ExpertFormat.FP8:
            return QuantizedMatrix(values.view(FP8), words.view(torch.float32)).dequantize(torch.float32)[:, :columns]
        return QuantizedMatrix(_unpack_halves(values), *split_group_words(words)).dequantize(torch.float32)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices in another type."""
        return torch.stack([self[expert].to(dtype) for expert in range(self.shape[0])])


ExpertWeights = Tensor | QuantizedExperts | Fp8Experts | PackedExperts  # [experts, out, in]


def split_experts(weight: ExpertWeights) -> tuple[Tensor, Tensor | None]:
    """Return the values of all experts' matrices, which are contiguous, and their scales if they are FP8."""
    values, scales = (weight.values, weight.scales) if isinstance(weight, Fp8Experts) else (plain(weight), None)
    assert values.is_contiguous() and (scales is None or scales.is_contiguous())
    return values, scales


def _pack_halves(codes: Tensor) -> Tensor:
    pieces = codes.view(len(codes), -1, 2, _PIECE // 2)
    return (pieces[:, :, 0] | pieces[:, :, 1] << 4).flatten(1)


def _unpack_halves(values: Tensor) -> Tensor:
    pieces = values.view(len(values), -1, 1, _PIECE // 2)
    return torch.cat([pieces & 15, pieces >> 4], 2).flatten(1)
