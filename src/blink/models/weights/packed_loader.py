# SPDX-License-Identifier: Apache-2.0
"""Read quantized matrices for a GPU whose kernels multiply them as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from blink.errors import ConfigError
from blink.kernels.quantized import FP8, GROUP, Format, PackedWeight, QuantizedMatrix, can_pack, pack
from blink.kernels.weight import Fp8Experts
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.quantized_checkpoint import DummyMatrices, Fp8Checkpoint, QuantizedCheckpoint
from blink.models.weights.target import WeightTarget

_SOURCES = (QuantizedCheckpoint, Fp8Checkpoint, DummyMatrices)
_HOPPER = (9, 0)
_ROWS = 16  # of a weight: PyTorch's product in FP8 takes multiples


def load_packed(
    checkpoint: Checkpoint, parts: Mapping[str, int], columns: int, target: WeightTarget
) -> PackedWeight | None:
    """Read matrices of the given numbers of rows, which have been checked, into one, one below the other.

    None if these are not quantized alike, in a form that the device has no kernels for, or of a size that these do not
    take: they are then to be dequantised.

    Raises:
        ConfigError: one cannot be read.
    """
    if not isinstance(checkpoint, _SOURCES) or not _has_kernels(target):
        return None
    if sum(parts.values()) % _ROWS:
        return None
    found: list[QuantizedMatrix] = []
    for name, rows in parts.items():
        matrix = checkpoint.read_matrix(f"{name}.weight", (rows, columns), target.device)
        if matrix is None or not can_pack(columns, Format.FP8 if matrix.values.dtype == FP8 else Format.INT4):
            return None
        if matrix.zeros is not None and matrix.group != GROUP:
            return None
        found.append(matrix)
    if any(_kind(matrix) != _kind(found[0]) for matrix in found):
        return None
    weight = pack(found)
    target.advance(weight.shape[0] * weight.shape[1])
    return weight


def has_fp8_experts(checkpoint: Checkpoint, name: str, target: WeightTarget) -> bool:
    """Tell whether experts are to be loaded in FP8, by one of their matrices."""
    if not isinstance(checkpoint, _SOURCES) or not _has_kernels(target):
        return False
    return checkpoint.stores_fp8_rows(name)


def load_fp8_experts(
    checkpoint: Checkpoint, parts: Sequence[Sequence[str]], shape: tuple[int, int], target: WeightTarget
) -> Fp8Experts:
    """Read each expert's matrices, which have been checked, one below the other."""
    assert isinstance(checkpoint, _SOURCES)
    rows, columns = shape
    height = rows * len(parts[0])
    values = target.allocate(len(parts), height, columns, dtype=FP8)
    scales = target.allocate(len(parts), height, dtype=torch.float32)
    for expert, names in enumerate(parts):
        for place, name in enumerate(names):
            matrix = checkpoint.read_matrix(name, shape, target.device)
            if matrix is None or matrix.values.dtype != FP8 or matrix.scales.shape[1] != 1:
                raise ConfigError(f"'{name}' is not quantized like the other experts; use another model.")
            part = slice(place * rows, (place + 1) * rows)
            values[expert, part], scales[expert, part] = matrix.values, matrix.scales[:, 0]
            target.advance(rows * columns)
    return Fp8Experts(values, scales)


def _has_kernels(target: WeightTarget) -> bool:
    is_gpu = target.device.type == "cuda" and target.dtype == torch.bfloat16
    return is_gpu and torch.cuda.get_device_capability(target.device) >= _HOPPER


def _kind(matrix: QuantizedMatrix) -> tuple[torch.dtype, bool]:
    return matrix.values.dtype, matrix.scales.shape[1] == 1
