# SPDX-License-Identifier: Apache-2.0
"""Read quantized matrices for a GPU whose kernels multiply them as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blink.kernels.quantized import FP8, Format, PackedWeight, QuantizedMatrix, can_pack, pack
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.quantized_checkpoint import DummyMatrices, Fp8Checkpoint, QuantizedCheckpoint
from blink.models.weights.target import WeightTarget

_HOPPER = (9, 0)


def load_packed(
    checkpoint: Checkpoint, parts: Mapping[str, int], columns: int, target: WeightTarget
) -> PackedWeight | None:
    """Read matrices of the given numbers of rows into one, one below the other.

    None if these are not quantized alike, in a form that the device has no kernels for, or of a size that these do not
    take: they are then to be dequantised.

    Raises:
        ConfigError: one is missing, of another shape, or cannot be read.
    """
    if not isinstance(checkpoint, QuantizedCheckpoint | Fp8Checkpoint | DummyMatrices) or not _has_kernels(target):
        return None
    found: list[QuantizedMatrix] = []
    for name, rows in parts.items():
        checkpoint.check(f"{name}.weight", (rows, columns))
    for name, rows in parts.items():
        matrix = checkpoint.read_matrix(f"{name}.weight", (rows, columns), target.device)
        if matrix is None or not can_pack(columns, Format.FP8 if matrix.values.dtype == FP8 else Format.INT4):
            return None
        found.append(matrix)
    if any(_kind(matrix) != _kind(found[0]) for matrix in found):
        return None
    weight = pack(found)
    target.advance(weight.shape[0] * weight.shape[1] * target.dtype.itemsize)
    return weight


def _has_kernels(target: WeightTarget) -> bool:
    is_gpu = target.device.type == "cuda" and target.dtype == torch.bfloat16
    return is_gpu and torch.cuda.get_device_capability(target.device) >= _HOPPER


def _kind(matrix: QuantizedMatrix) -> tuple[torch.dtype, bool]:
    return matrix.values.dtype, matrix.scales.shape[1] == 1
