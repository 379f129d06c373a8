# SPDX-License-Identifier: Apache-2.0
"""MXFP4, the format of gpt-oss's experts: floats of 4 bits (e2m1), of which 32 of a row share a power of two (e8m0).

Source: the OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import NumberFormat, Shapes, Storage, StoredMatrix, TensorFiles, uneven
from blink.formats.int4 import pack_halves, unpack_halves
from blink.formats.schemes import FormatId, Quantization

GROUP = 32  # columns of a row that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Kernels see a number of 4 bits as one that is 2^126 times smaller, so a scale of 1 has the exponent 253.
_EXPONENT_OF_ONE = 253
_DRAWN_EXPONENT = 127 - 6


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix(StoredMatrix):
    """A matrix [out, in] as checkpoints have it."""

    codes: Tensor  # uint8 [out, in]: sign, two bits of the exponent, one of the mantissa
    exponents: Tensor  # uint8 [out, in / GROUP]; a scale is 2^(exponent - 127)

    @property
    def format(self) -> FormatId:
        """The format of its numbers."""
        return FormatId.MXFP4

    @classmethod
    def from_blocks(cls, blocks: Tensor, exponents: Tensor) -> Mxfp4Matrix:
        """Take the tensors of a checkpoint: uint8 [out, groups, 16], pairs of numbers, the first low; [out, groups]."""
        return cls(torch.stack([blocks & 15, blocks >> 4], -1).flatten(1), exponents)

    def take_rows(self, rows: Tensor) -> Mxfp4Matrix:
        """Return some rows, by their numbers."""
        return Mxfp4Matrix(self.codes[rows], self.exponents[rows])

    def take_columns(self, columns: range) -> Mxfp4Matrix:
        """Return columns that follow each other, of which no group is parted."""
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        codes = self.codes[:, columns.start : columns.stop].contiguous()
        return Mxfp4Matrix(codes, self.exponents[:, groups].contiguous())

    def to(self, device: torch.device) -> Mxfp4Matrix:
        """Return the matrix on a device."""
        return Mxfp4Matrix(self.codes.to(device), self.exponents.to(device))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in another type."""
        return multiply_groups(self.codes, powers_of_two(self.exponents)).to(dtype)


class BlockStorage(Storage[Mxfp4Matrix]):
    """A tensor of all experts' blocks, transposed to what the model's description says, and one of their scales."""

    def holds(self, files: TensorFiles, name: str) -> bool:
        """Tell whether a tensor of all experts' matrices consists of blocks."""
        return files.has(f"{name}_blocks")

    def list_tensors(self, files: TensorFiles, name: str, shape: Sequence[int], scheme: Quantization) -> Shapes:
        """Return the tensors of all experts' matrices."""
        del scheme  # says no more, here and below
        experts, columns, rows = shape
        if columns % GROUP:
            raise uneven(files, name, GROUP)
        size = (experts, rows, columns // GROUP)
        return {f"{name}_blocks": [(*size, GROUP // 2)], f"{name}_scales": [size]}

    def read(
        self,
        files: TensorFiles,
        name: str,
        scheme: Quantization,
        device: torch.device | None = None,
        expert: int | None = None,
    ) -> Mxfp4Matrix:
        """Return an expert's matrix [out, in]."""
        del scheme
        parts = [files.read(f"{name}_{end}", (torch.uint8,), expert) for end in ("blocks", "scales")]
        return Mxfp4Matrix.from_blocks(*(part.to(device or "cpu") for part in parts))

    def fill(self, files: TensorFiles, name: str, scheme: Quantization, target: Tensor) -> None:
        """Write what the tensors stand for, expert by expert, for all of them are many."""
        for expert, part in enumerate(target):
            part.copy_(self.read(files, name, scheme, expert=expert).dequantize(part.dtype).T.view(part.shape))


class Mxfp4(NumberFormat[Mxfp4Matrix]):
    """e2m1. A group's word of 128 columns: the exponents of its four scales, the first lowest, over the row's scale."""

    id = FormatId.MXFP4
    has_row_scales = True
    storages: ClassVar[Mapping[str, Storage[Any]]] = {"mxfp4": BlockStorage()}

    def draw(self, weights: Tensor, scheme: Quantization) -> Mxfp4Matrix:
        """Return a matrix near random weights."""
        del scheme
        shape = (len(weights), weights.shape[1] // GROUP)
        exponents = torch.full(shape, _DRAWN_EXPONENT, dtype=torch.uint8, device=weights.device)
        return Mxfp4Matrix(round_to_codes(weights * 2 ** (127 - _DRAWN_EXPONENT)), exponents)

    def pack_expert(self, matrix: Mxfp4Matrix, missing: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers by halves of bytes, their groups' words, and the rows' scales."""
        exponents = functional.pad(matrix.exponents.int(), (0, missing // GROUP))
        largest = exponents.amax(1, keepdim=True)
        powers = (_EXPONENT_OF_ONE - largest + exponents).clamp_(min=0).to(torch.uint8)
        codes = pack_halves(functional.pad(matrix.codes, (0, missing)))
        return codes, powers.view(torch.int32), powers_of_two(largest[:, 0])

    def unpack_expert(self, values: Tensor, words: Tensor) -> Tensor:
        """Undo pack_expert, but for the rows' scales."""
        scales = (words.view(torch.uint8).int() << 23).view(torch.float32) * 2.0**-126
        return multiply_groups(unpack_halves(values), scales)


def round_to_codes(values: Tensor) -> Tensor:
    """Return the codes of the nearest numbers of 4 bits; of two as near the one with the larger magnitude."""
    magnitudes = torch.tensor(_MAGNITUDES, device=values.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(values.abs(), middles, right=True)
    return (codes + 8 * (values < 0)).to(torch.uint8)


def multiply_groups(codes: Tensor, scales: Tensor) -> Tensor:
    """Return numbers of 4 bits [out, in] times their groups' scales [out, in / GROUP], float32."""
    magnitudes = torch.tensor(_MAGNITUDES, device=codes.device)
    values = torch.cat([magnitudes, -magnitudes]).index_select(0, codes.flatten().int())
    return values.view(*scales.shape, GROUP).mul_(scales[..., None]).view(codes.shape)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(exponent - 127) of integers from 0 to 255, exactly; of the last infinity."""
    smallest = 1 << 22  # a subnormal float32
    bits = exponents.int() << 23
    return torch.where(bits == 0, smallest, bits).view(torch.float32)
