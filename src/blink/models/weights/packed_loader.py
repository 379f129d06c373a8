# SPDX-License-Identifier: Apache-2.0
"""Read quantized matrices for a GPU whose kernels multiply them as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import QuantizedWeight
from blink.formats.experts import Fp8Experts, PackedExperts, allocate_experts
from blink.formats.gguf_experts import GgufExperts, stack_experts
from blink.formats.int4_arrays import fits_arrays, pack_small_groups
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import pack
from blink.formats.schemes import Quantization
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.planar import make_planar
from blink.models.weights.quantized_checkpoint import MatrixCheckpoint
from blink.models.weights.target import WeightTarget

_HOPPER = (9, 0)
_ROWS = 16  # of a weight: PyTorch's product in FP8 takes multiples


def load_packed(
    checkpoint: Checkpoint,
    parts: Mapping[str, int],
    columns: int,
    target: WeightTarget,
    order: Sequence[Tensor] | None = None,
) -> QuantizedWeight | None:
    """Read matrices of the given numbers of rows, which have been checked, into one, one below the other.

    order: which rows of each matrix to take; None: all, as they are.

    None if these are not quantized alike, in a form that the device has no kernels for, or of a size that these do not
    take: they are then to be dequantised.

    Raises:
        ConfigError: one cannot be read.
    """
    names = [f"{name}.weight" for name in parts]
    source, scheme = _find_source(checkpoint, names[0], target)
    if source is None or scheme is None or not _takes(scheme, sum(parts.values()), columns):
        return None
    if any(source.find_scheme(name) != scheme for name in names):
        return None
    shapes = ((rows, columns) for rows in parts.values())
    matrices = [_read(source, name, shape, target) for name, shape in zip(names, shapes, strict=True)]
    if order is not None:
        matrices = [one.take_rows(rows.to(target.device)) for one, rows in zip(matrices, order, strict=True)]
    if scheme.in_arrays:
        weight = make_planar([pack_small_groups(one) for one in matrices], columns, target.dtype)
    else:
        weight = pack(matrices)
    target.advance(weight.shape[0] * weight.shape[1])
    return weight


def _takes(scheme: Quantization, rows: int, columns: int) -> bool:
    """Tell whether a GPU's kernels take a matrix of a size."""
    if scheme.in_arrays:
        return fits_arrays(columns)
    return rows % _ROWS == 0 and columns % scheme.format.unit == 0


def load_quantized_experts(
    checkpoint: Checkpoint, parts: Sequence[Sequence[str]], shape: tuple[int, int], target: WeightTarget
) -> Fp8Experts | PackedExperts | GgufExperts | None:
    """Read each expert's matrices of a shape, which have been checked, one below the other.

    None if the first of them is not quantized or the device has no kernels: they are then to be dequantised.

    Raises:
        ConfigError: one cannot be read, or is not quantized like the first.
    """
    source, scheme = _find_source(checkpoint, parts[0][0], target)
    if source is None or scheme is None:
        return None
    rows, columns = shape
    if scheme.in_arrays and not fits_arrays(columns):
        return None

    def read(name: str) -> QuantizedMatrix:
        if source.find_scheme(name) != scheme:
            raise ConfigError(f"'{name}' is not quantized like the other experts; use another model.")
        matrix = _read(source, name, shape, target)
        target.advance(rows * columns)
        return matrix

    size = (len(parts), rows * len(parts[0]), columns)
    if scheme.in_arrays:
        return stack_experts(
            ([pack_small_groups(read(name)) for name in names] for names in parts), size, target.allocate
        )
    experts = allocate_experts(scheme, size, target.allocate)
    for expert, names in enumerate(parts):
        for place, name in enumerate(names):
            experts.store(expert, slice(place * rows, (place + 1) * rows), read(name))
    return experts


def load_all_experts(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int, int], target: WeightTarget, rows: Tensor | None = None
) -> Fp8Experts | PackedExperts | None:
    """Read a tensor of all experts' matrices [experts, out, in], which has been checked.

    None as above. rows: which of the stored rows is to be each row of the matrices; None: as they are.

    Raises:
        ConfigError: it cannot be read.
    """
    source, scheme = _find_source(checkpoint, name, target)
    if source is None or scheme is None or scheme.in_arrays:
        return None
    experts = allocate_experts(scheme, shape, target.allocate)
    for expert in range(shape[0]):
        matrix = source.read_expert(name, expert, shape[1:], target.device)
        experts.store(expert, slice(None), matrix if rows is None else matrix.take_rows(rows))
        target.advance(shape[1] * shape[2])
    return experts


def _find_source(
    checkpoint: Checkpoint, name: str, target: WeightTarget
) -> tuple[MatrixCheckpoint | None, Quantization | None]:
    """Return a checkpoint that gives a matrix as a GPU's kernels take it, and its scheme; None where it does not."""
    source = checkpoint.matrices
    if source is None or not _has_kernels(target):
        return None, None
    scheme = source.find_scheme(name)
    return (None, None) if scheme is None else (source, scheme)


def _read(source: MatrixCheckpoint, name: str, shape: tuple[int, int], target: WeightTarget) -> QuantizedMatrix:
    matrix = source.read_matrix(name, shape, target.device)
    assert matrix is not None
    return matrix


def _has_kernels(target: WeightTarget) -> bool:
    is_gpu = target.device.type == "cuda" and target.dtype == torch.bfloat16
    return is_gpu and torch.cuda.get_device_capability(target.device) >= _HOPPER
