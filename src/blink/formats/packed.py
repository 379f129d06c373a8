# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 and 4 bits, packed in the order in which the GPU's kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import QuantizedWeight
from blink.formats.fp8 import FP8
from blink.formats.layouts import Layout, Matrix
from blink.formats.matrix import QuantizedMatrix
from blink.formats.registry import UNIT_FORMATS
from blink.formats.schemes import UNIT_BYTES, Encoding, FormatId


class PackedWeight(QuantizedWeight):
    """A weight [out, in] on a GPU, in the order that its kernels read; pack() makes it. Computes in bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, format: FormatId, values: Tensor, scales: Tensor | None, groups: Tensor | None) -> None:
        """Take the parts.

        values: uint8 [out, bytes of a row]; scales: float32 [out], or None with groups: int32 [out, in / GROUP],
        each a word as csrc/kernels/common/quantized.cuh says.
        """
        rows, num_bytes = values.shape
        self.format, self.values, self.scales, self.groups = format, values, scales, groups
        self.shape = rows, num_bytes // UNIT_BYTES * format.unit
        self.device = values.device
        # What many rows are multiplied with: the groups' scales of FP8, float32 [in / GROUP, out].
        self.group_scales: Tensor | None = None
        if format is FormatId.FP8 and groups is not None:
            self.group_scales = groups.view(torch.float32).t().contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        parts = (self.values, self.scales, self.groups, self.group_scales)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def matrix(self) -> Matrix:
        """Its sizes, and how it lies in memory."""
        return Matrix(*self.shape, Layout.UNITS, Encoding(self.format, self.groups is not None))

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Its values, the scales of its rows and the words of its groups."""
        return self.values, self.scales, self.groups

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T, plainly: the reference of what `linear` does on a GPU."""
        return functional.linear(x, self.dequantize())

    def dequantize(self) -> Tensor:
        """Return the weight as a tensor of its dtype."""
        return unpack(self).dequantize(self.dtype)

    def fp8_values(self) -> Tensor:
        """Return the values as FP8, in their packed order."""
        assert self.format is FormatId.FP8
        return self.values.view(FP8)


def pack(parts: Sequence[QuantizedMatrix]) -> PackedWeight:
    """Pack matrices of the same columns and kind, one below the other."""
    format = UNIT_FORMATS[parts[0].format]
    values = torch.cat([format.order(part.values) for part in parts])
    if all(part.scales.shape[1] == 1 for part in parts):
        return PackedWeight(format.id, values, torch.cat([part.scales[:, 0] for part in parts]), None)
    groups = torch.cat([format.join_scales(part.scales, part.zeros) for part in parts])
    return PackedWeight(format.id, values, None, groups)


def unpack(weight: PackedWeight) -> QuantizedMatrix:
    """Undo pack."""
    format = UNIT_FORMATS[weight.format]
    values = format.restore(weight.values)
    if weight.scales is not None:
        return QuantizedMatrix(values, weight.scales[:, None])
    assert weight.groups is not None
    return QuantizedMatrix(values, *format.split_scales(weight.groups))
