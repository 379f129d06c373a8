# SPDX-License-Identifier: Apache-2.0
"""FP8 (e4m3): each row of a matrix has a scale, or each block of 128 x 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import Shapes, Storage, TensorFiles, UnitFormat
from blink.formats.matrix import QuantizedMatrix
from blink.formats.schemes import GROUP, FormatId, Quantization

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize_fp8(weight: Tensor) -> QuantizedMatrix:
    """Return a matrix [out, in] in FP8, each row with a scale of its own."""
    scales = weight.abs().amax(1, keepdim=True).float().clamp_(min=1e-12) / FP8_MAX
    return QuantizedMatrix((weight.float() / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales)


class Fp8Storage(Storage[QuantizedMatrix]):
    """The matrix in FP8, and its scales or their inverses, which are the same."""

    def holds(self, files: TensorFiles, name: str) -> bool:
        """Tell whether a matrix has scales."""
        return files.has(_scale_name(files, name))

    def list_tensors(self, files: TensorFiles, name: str, shape: Sequence[int], scheme: Quantization) -> Shapes:
        """Return the matrix and its scales."""
        rows, columns = shape
        scales: list[tuple[int, ...]] = [(rows, 1), (rows,), (1,), (), (1, 1)]
        if scheme.has_groups:
            scales = [(-(-rows // GROUP), -(-columns // GROUP))]
        return {name: [(rows, columns)], _scale_name(files, name): scales}

    def read(
        self,
        files: TensorFiles,
        name: str,
        scheme: Quantization,
        device: torch.device | None = None,
        expert: int | None = None,
    ) -> QuantizedMatrix:
        """Return a matrix, whose rows have a scale each or one for each group."""
        values = files.read(name, (FP8,), expert).to(device or "cpu")
        scales = files.read(_scale_name(files, name), _FLOATS, expert).to(values.device, torch.float32)
        rows = values.shape[0]
        if scheme.has_groups:
            return QuantizedMatrix(values, scales.repeat_interleave(GROUP, 0)[:rows].contiguous())
        return QuantizedMatrix(values, scales.reshape(-1, 1).expand(rows, 1).contiguous())


class Fp8(UnitFormat[QuantizedMatrix]):
    """e4m3."""

    id = FormatId.FP8
    storages: ClassVar[Mapping[str, Storage[Any]]] = {"fp8": Fp8Storage()}

    def draw(self, weights: Tensor, scheme: Quantization) -> QuantizedMatrix:
        """Return a matrix near random weights."""
        rounded = quantize_fp8(weights)
        if not scheme.has_groups:
            return rounded
        return QuantizedMatrix(rounded.values, _spread(rounded.scales, weights.shape[1] // scheme.group))

    def pack_expert(self, matrix: QuantizedMatrix, missing: int) -> tuple[Tensor, Tensor, None]:
        """Return a byte for each column, in order, and the groups' scales."""
        values = functional.pad(matrix.values.view(torch.uint8), (0, missing))
        return values, self.join_scales(_spread(matrix.scales, values.shape[1] // GROUP), None), None

    def unpack_expert(self, values: Tensor, words: Tensor) -> Tensor:
        """Undo pack_expert."""
        return QuantizedMatrix(values.view(FP8), *self.split_scales(words)).dequantize(torch.float32)

    def compress(self, matrix: QuantizedMatrix) -> Mapping[str, Tensor]:
        """Return a matrix's tensors."""
        return {"weight": matrix.values, "weight_scale": matrix.scales}

    def order(self, values: Tensor) -> Tensor:
        """Return numbers in the order of units."""
        steps = values.view(torch.uint8).view(len(values), -1, 8, 2, 4, 2)  # units, steps of 16, 8 further, lane, k
        return steps.permute(0, 1, 4, 2, 3, 5).reshape(len(values), -1)

    def restore(self, values: Tensor) -> Tensor:
        """Undo order."""
        lanes = values.view(len(values), -1, 4, 8, 2, 2)
        return lanes.permute(0, 1, 3, 4, 2, 5).reshape(len(values), -1).view(FP8)

    def join_scales(self, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Return the scales as words."""
        assert zeros is None
        return scales.contiguous().view(torch.int32)

    def split_scales(self, words: Tensor) -> tuple[Tensor, None]:
        """Return the scales of words."""
        return words.view(torch.float32), None


def _spread(scales: Tensor, groups: int) -> Tensor:
    return scales.expand(-1, groups).contiguous()


def _scale_name(files: TensorFiles, name: str) -> str:
    stem = name.removesuffix(".weight")
    inverse = f"{stem}.weight_scale_inv"
    return inverse if files.has(inverse) else f"{stem}.weight_scale"
