# SPDX-License-Identifier: Apache-2.0
"""Read quantized matrices for a GPU whose kernels multiply them as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.experts import ExpertFormat, Fp8Experts, PackedExperts
from blink.formats.packed import FP8, GROUP, Format, PackedWeight, QuantizedMatrix, can_pack, pack
from blink.formats.schemes import Quantization
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


def load_quantized_experts(
    checkpoint: Checkpoint, parts: Sequence[Sequence[str]], shape: tuple[int, int], target: WeightTarget
) -> Fp8Experts | PackedExperts | None:
    """Read each expert's matrices of a shape, which have been checked, one below the other.

    None if the first of them is not quantized or the device has no kernels: they are then to be dequantised.

    Raises:
        ConfigError: one cannot be read, or is not quantized like the first.
    """
    if not isinstance(checkpoint, _SOURCES) or not _has_kernels(target):
        return None
    scheme = checkpoint.find_scheme(parts[0][0])
    if scheme is None or not scheme.can_stay:
        return None
    rows, columns = shape
    size = (len(parts), rows * len(parts[0]), columns)
    experts = _allocate_experts(scheme, size, target)
    for expert, names in enumerate(parts):
        for place, name in enumerate(names):
            if checkpoint.find_scheme(name) != scheme:
                raise ConfigError(f"'{name}' is not quantized like the other experts; use another model.")
            matrix = checkpoint.read_matrix(name, shape, target.device)
            assert matrix is not None
            experts.store(expert, slice(place * rows, (place + 1) * rows), matrix)
            target.advance(rows * columns)
    return experts


def load_all_experts(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int, int], target: WeightTarget, rows: Tensor | None = None
) -> PackedExperts | None:
    """Read a tensor of all experts' matrices [experts, out, in], which has been checked.

    None as above. rows: which of the stored rows is to be each row of the matrices; None: as they are.

    Raises:
        ConfigError: it cannot be read.
    """
    if not isinstance(checkpoint, QuantizedCheckpoint | DummyMatrices) or not _has_kernels(target):
        return None
    scheme = checkpoint.find_scheme(name)
    if scheme is None or not scheme.can_stay:
        return None
    experts = PackedExperts.allocate(ExpertFormat.MXFP4, shape, target.allocate)
    for expert in range(shape[0]):
        matrix = checkpoint.read_expert(name, expert, shape[1:], target.device)
        experts.store(expert, slice(None), matrix if rows is None else matrix.take_rows(rows))
        target.advance(shape[1] * shape[2])
    return experts


def _allocate_experts(
    scheme: Quantization, shape: tuple[int, int, int], target: WeightTarget
) -> Fp8Experts | PackedExperts:
    if scheme.bits == 8 and not scheme.has_groups:
        values, scales = target.allocate(*shape, dtype=FP8), target.allocate(*shape[:2], dtype=torch.float32)
        return Fp8Experts(values, scales)
    form = ExpertFormat.FP8 if scheme.bits == 8 else ExpertFormat.INT4
    return PackedExperts.allocate(form, shape, target.allocate)


def _has_kernels(target: WeightTarget) -> bool:
    is_gpu = target.device.type == "cuda" and target.dtype == torch.bfloat16
    return is_gpu and torch.cuda.get_device_capability(target.device) >= _HOPPER


def _kind(matrix: QuantizedMatrix) -> tuple[torch.dtype, bool]:
    return matrix.values.dtype, matrix.scales.shape[1] == 1
