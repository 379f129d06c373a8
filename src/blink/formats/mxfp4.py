# SPDX-License-Identifier: Apache-2.0
"""MXFP4, the format of gpt-oss's experts: floats of 4 bits (e2m1), of which 32 of a row share a power of two (e8m0).

Source: the OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # columns of a row that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A matrix [out, in] as checkpoints have it."""

    codes: Tensor  # uint8 [out, in]: sign, two bits of the exponent, one of the mantissa
    exponents: Tensor  # uint8 [out, in / GROUP]; a scale is 2^(exponent - 127)

    @classmethod
    def from_blocks(cls, blocks: Tensor, exponents: Tensor) -> Mxfp4Matrix:
        """Take the tensors of a checkpoint: uint8 [out, groups, 16], pairs of numbers, the first low; [out, groups]."""
        return cls(torch.stack([blocks & 15, blocks >> 4], -1).flatten(1), exponents)

    def take_rows(self, rows: Tensor) -> Mxfp4Matrix:
        """Return some rows, by their numbers."""
        return Mxfp4Matrix(self.codes[rows], self.exponents[rows])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in another type."""
        return multiply_groups(self.codes, powers_of_two(self.exponents)).to(dtype)


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
