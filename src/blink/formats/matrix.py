# SPDX-License-Identifier: Apache-2.0
"""Matrices of 8 and 4 bits as checkpoints have them: numbers, scales and zero points.

The CPU's GEMMs know neither: there a quantized matrix becomes one of the compute type when it is loaded. To do so in
each step would cost more than the GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.base import StoredMatrix
from blink.formats.schemes import GROUP, FormatId


@dataclass(frozen=True, slots=True)
class QuantizedMatrix(StoredMatrix):
    """A matrix [out, in] as checkpoints have it: (value - zero point) * scale."""

    values: Tensor  # FP8 or uint8 from 0 to 15, [out, in]
    scales: Tensor  # float32 [out, 1] or [out, groups]
    zeros: Tensor | None = None  # uint8 [out, groups], of 4 bits

    @property
    def format(self) -> FormatId:
        """The format of its numbers."""
        return FormatId.INT4 if self.values.dtype == torch.uint8 else FormatId.FP8

    def take_rows(self, rows: Tensor) -> QuantizedMatrix:
        """Return some rows, by their numbers."""
        zeros = None if self.zeros is None else self.zeros[rows]
        values = self.values.view(torch.uint8)[rows]  # not every PyTorch picks rows of FP8
        return QuantizedMatrix(values.view(self.values.dtype), self.scales[rows], zeros)

    def take_columns(self, columns: range) -> QuantizedMatrix:
        """Return columns that follow each other, of which no group is parted."""
        values = self.values[:, columns.start : columns.stop].contiguous()
        if self.zeros is None and self.scales.shape[1] == 1:
            return QuantizedMatrix(values, self.scales)
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        zeros = None if self.zeros is None else self.zeros[:, groups].contiguous()
        return QuantizedMatrix(values, self.scales[:, groups].contiguous(), zeros)

    def to(self, device: torch.device) -> QuantizedMatrix:
        """Return the matrix on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QuantizedMatrix(self.values.to(device), self.scales.to(device), zeros)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in another type."""
        if self.zeros is None and self.scales.shape[1] == 1:
            return (self.values.float() * self.scales).to(dtype)
        values = self.values.float()
        if self.zeros is not None:
            values -= self._repeat(self.zeros.float())
        return values.mul_(self._repeat(self.scales)).to(dtype)

    @property
    def group(self) -> int:
        """Columns of a group: all groups are whole, but for the last one of GROUP columns."""
        columns, groups = self.values.shape[1], self.scales.shape[1]
        return GROUP if groups == -(-columns // GROUP) else columns // groups

    def _repeat(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
