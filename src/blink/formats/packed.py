# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 and 4 bits: as checkpoints have them, and packed in the order in which the GPU's kernels read them.

The CPU's products know neither: there a quantized matrix becomes one of the compute type when it is loaded, since to
do so in each step would cost more than the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import QuantizedWeight

GROUP = 128  # columns of one row that share a scale in a packed weight, and with 4 bits a zero point
UNIT_BYTES = 128  # csrc/gpu/decode/quantized.cuh says what lies where in a unit
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class Format(Enum):
    """How a packed weight is stored: csrc/gpu/decode/quantized.cuh's Format."""

    FP8 = "blink::Format::kFp8"
    INT4 = "blink::Format::kInt4"

    @property
    def unit(self) -> int:
        """Columns of a unit; a row has a whole number of them."""
        return UNIT_BYTES if self is Format.FP8 else 2 * UNIT_BYTES


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [out, in] as checkpoints have it: (value - zero point) * scale."""

    values: Tensor  # FP8 or uint8 from 0 to 15, [out, in]
    scales: Tensor  # float32 [out, 1] or [out, groups]
    zeros: Tensor | None = None  # uint8 [out, groups], of 4 bits

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


class PackedWeight(QuantizedWeight):
    """A weight [out, in] on a GPU, in the order that its kernels read; pack() makes it. Computes in bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, format: Format, values: Tensor, scales: Tensor | None, groups: Tensor | None) -> None:
        """Take the parts.

        values: uint8 [out, bytes of a row]; scales: float32 [out], or None with groups: int32 [out, in / GROUP], each a
        word as csrc/gpu/decode/quantized.cuh says.
        """
        rows, num_bytes = values.shape
        self.format, self.values, self.scales, self.groups = format, values, scales, groups
        self.shape = rows, num_bytes // UNIT_BYTES * format.unit
        self.device = values.device
        # What many rows are multiplied with: the groups' scales of FP8, float32 [in / GROUP, out].
        self.group_scales: Tensor | None = None
        if format is Format.FP8 and groups is not None:
            self.group_scales = groups.view(torch.float32).t().contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        parts = (self.values, self.scales, self.groups, self.group_scales)
        return sum(part.nbytes for part in parts if part is not None)

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T, plainly: the reference of what `linear` does on a GPU."""
        return functional.linear(x, self.dequantize())

    def dequantize(self) -> Tensor:
        """Return the weight as a tensor of its dtype."""
        return unpack(self).dequantize(self.dtype)

    def fp8_values(self) -> Tensor:
        """Return the values as FP8, in their packed order."""
        assert self.format is Format.FP8
        return self.values.view(FP8)


def quantize_fp8(weight: Tensor) -> QuantizedMatrix:
    """Return a matrix [out, in] in FP8, each row with a scale of its own."""
    scales = weight.abs().amax(1, keepdim=True).float().clamp_(min=1e-12) / FP8_MAX
    return QuantizedMatrix((weight.float() / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales)


def can_pack(columns: int, format: Format) -> bool:
    """Tell whether rows of so many columns can be packed."""
    return columns % format.unit == 0


def pack(parts: Sequence[QuantizedMatrix]) -> PackedWeight:
    """Pack matrices of the same columns and kind, one below the other."""
    is_fp8 = parts[0].values.dtype == FP8
    values = torch.cat([_pack_fp8(part.values) if is_fp8 else _pack_int4(part.values) for part in parts])
    if all(part.scales.shape[1] == 1 for part in parts):
        return PackedWeight(Format.FP8, values, torch.cat([part.scales[:, 0] for part in parts]), None)
    groups = torch.cat([group_words(part) for part in parts])
    return PackedWeight(Format.FP8 if is_fp8 else Format.INT4, values, None, groups)


def unpack(weight: PackedWeight) -> QuantizedMatrix:
    """Undo pack."""
    if weight.format is Format.FP8:
        lanes = weight.values.view(len(weight.values), -1, 4, 8, 2, 2)
        values = lanes.permute(0, 1, 3, 4, 2, 5).reshape(weight.shape).view(FP8)
        if weight.scales is not None:
            return QuantizedMatrix(values, weight.scales[:, None])
        assert weight.groups is not None
        return QuantizedMatrix(values, weight.groups.view(torch.float32))
    assert weight.groups is not None
    nibbles = torch.stack([weight.values & 15, weight.values >> 4], -1)
    lanes = nibbles.view(len(nibbles), -1, 4, 8, 2, 2, 2)  # lane, word, k, step, 8 further
    values = lanes.permute(0, 1, 3, 5, 6, 2, 4).reshape(weight.shape)
    return QuantizedMatrix(values, *split_group_words(weight.groups))


def _pack_fp8(values: Tensor) -> Tensor:
    steps = values.view(torch.uint8).view(len(values), -1, 8, 2, 4, 2)  # units, steps of 16, 8 further, lane, k
    return steps.permute(0, 1, 4, 2, 3, 5).reshape(len(values), -1)


def _pack_int4(values: Tensor) -> Tensor:
    words = values.view(len(values), -1, 8, 2, 2, 4, 2)  # units, words, steps of 16, 8 further, lane, k
    ordered = words.permute(0, 1, 5, 2, 6, 3, 4)
    return (ordered[..., 0] | ordered[..., 1] << 4).reshape(len(values), -1)


def group_words(part: QuantizedMatrix) -> Tensor:
    """Return the word of each row's groups, int32 [out, groups], as csrc/gpu/decode/quantized.cuh describes it."""
    columns = part.values.shape[1]
    if part.zeros is None:
        groups = -(-columns // GROUP)
        return part.scales.expand(-1, groups).contiguous().view(torch.int32)
    # 128 + zero point has 8 bits at most: bfloat16 holds it.
    high = (-(part.zeros.float() + 128)).to(torch.bfloat16).view(torch.int16)
    low = part.scales.to(torch.float16).view(torch.int16)
    return torch.stack([low, high], -1).view(torch.int32)[..., 0]


def split_group_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales, float32, and zero points, uint8, of numbers of 4 bits."""
    halves = words.contiguous().view(torch.int16).view(*words.shape, 2)
    scales = halves[..., 0].contiguous().view(torch.float16).float()
    zeros = -halves[..., 1].contiguous().view(torch.bfloat16).float() - 128
    return scales, zeros.to(torch.uint8)
