# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantized matrices, and those whose matrices become FP8 when they are read.

What reads them like any other gets the dequantised weights; read_matrix() gives the matrices as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats import mxfp4
from blink.formats.int4 import unpack_awq, unpack_columns, unpack_rows
from blink.formats.mxfp4 import Mxfp4Matrix
from blink.formats.packed import FP8, GROUP, QuantizedMatrix, quantize_fp8
from blink.formats.schemes import FP8_ROWS, Quantization
from blink.models.weights.checkpoint import Checkpoint, SafetensorsCheckpoint

OUTPUT = "lm_head.weight"
# No embeddings, no routers.
_MATRIX = re.compile(r".*(_proj|\.w[123]|lm_head)\.weight")
_ALL_EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")  # of gpt-oss, one tensor for all


def is_matrix(name: str) -> bool:
    """Tell whether a tensor is one of the matrices that are quantized."""
    return _MATRIX.fullmatch(name) is not None


class QuantizedCheckpoint:
    """A Hugging Face directory some of whose matrices are quantized."""

    def __init__(self, files: SafetensorsCheckpoint, quantization: Quantization) -> None:
        self._files = files
        self._quantization = quantization
        self.norm_shift = files.norm_shift

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape, or what it is made of."""
        if not self._is_quantized(name):
            self._files.check(name, shape)
            return
        for stored, shapes in self._list_tensors(name, shape).items():
            found = self._files.shape(stored)
            if found not in shapes:
                raise ConfigError(
                    f"{self._files.place}: '{stored}' has shape {found}, but the model's description asks for"
                    f" {' or '.join(map(str, shapes))}; the files do not belong together."
                )

    def fill(self, name: str, target: Tensor) -> None:
        """Write a tensor, dequantised if it must be."""
        if self._is_quantized(name) and self._quantization.storage == "mxfp4":
            for expert, part in enumerate(target):  # one by one, for all of them are many
                part.copy_(self._read_blocks(name, expert).dequantize(part.dtype).T.view(part.shape))
        elif self._is_quantized(name):
            target.copy_(self._read(name).dequantize(target.dtype).view(target.shape))
        else:
            self._files.fill(name, target)

    def read_quantized(self, names: Sequence[str]) -> None:
        """Leave matrices to read_matrix()."""

    def read_matrix(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedMatrix | None:
        """Return a matrix as it is stored; None if it is not quantized."""
        del shape  # check() has compared it
        return self._read(name, device) if self._is_quantized(name) else None

    def read_expert(self, name: str, expert: int, shape: tuple[int, int], device: torch.device) -> Mxfp4Matrix:
        """Return an expert's matrix [out, in] of a tensor of all that is MXFP4."""
        del shape  # as above
        return self._read_blocks(name, expert, device)

    def find_scheme(self, name: str) -> Quantization | None:
        """Return how a matrix, or a tensor of all experts', is quantized; None if it is not.

        Beside matrices of 4 bits some may be FP8.
        """
        quantization, stem = self._quantization, name.removesuffix(".weight")
        if quantization.storage == "fp8":
            return quantization if self._files.has(self._scale_name(stem)) else None
        if quantization.storage == "mxfp4":
            return quantization if self._files.has(f"{name}_blocks") else None
        if self._files.has(f"{stem}.{'weight_packed' if quantization.storage == 'packed' else 'qweight'}"):
            return quantization
        return FP8_ROWS if self._files.has(f"{stem}.weight_scale") else None

    def _is_quantized(self, name: str) -> bool:
        return self.find_scheme(name) is not None

    def _scale_name(self, stem: str) -> str:
        inverse = f"{stem}.weight_scale_inv"
        return inverse if self._files.has(inverse) else f"{stem}.weight_scale"

    def _list_tensors(self, name: str, shape: Sequence[int]) -> dict[str, list[tuple[int, ...]]]:
        """Return the tensors of a matrix, each with the shapes that it may have."""
        if self._quantization.storage == "mxfp4":
            experts, columns, rows = shape  # the model's description has them transposed
            if columns % mxfp4.GROUP:
                raise self._uneven(name, mxfp4.GROUP)
            size = (experts, rows, columns // mxfp4.GROUP)
            return {f"{name}_blocks": [(*size, mxfp4.GROUP // 2)], f"{name}_scales": [size]}
        stem, (rows, columns) = name.removesuffix(".weight"), shape
        group = self._quantization.group
        groups = -(-columns // group)
        quantization = self.find_scheme(name)
        if quantization is not None and quantization.storage == "fp8":
            scales: list[tuple[int, ...]] = [(rows, 1), (rows,), (1,), (), (1, 1)]
            if quantization.has_groups:
                scales = [(-(-rows // GROUP), groups)]
            return {name: [(rows, columns)], self._scale_name(stem): scales}
        if columns % group or rows % 8:
            raise self._uneven(stem, group)
        if self._quantization.storage == "packed":
            found = {f"{stem}.weight_packed": [(rows, columns // 8)], f"{stem}.weight_scale": [(rows, groups)]}
            zeros = f"{stem}.weight_zero_point"
            return found | ({zeros: [(rows // 8, groups)]} if self._files.has(zeros) else {})
        packed = (columns, rows // 8) if self._quantization.storage == "awq" else (columns // 8, rows)
        return {
            f"{stem}.qweight": [packed],
            f"{stem}.qzeros": [(groups, rows // 8)],
            f"{stem}.scales": [(groups, rows)],
        }

    def _uneven(self, name: str, group: int) -> ConfigError:
        return ConfigError(f"{self._files.place}: '{name}' of 4 bits must have whole groups of {group} columns.")

    def _read(self, name: str, device: torch.device | None = None) -> QuantizedMatrix:
        stem = name.removesuffix(".weight")
        quantization = self.find_scheme(name)
        if quantization is not None and quantization.storage == "fp8":
            return self._read_fp8(name, quantization, device)

        def read(ending: str, *types: torch.dtype) -> Tensor:
            return self._files.read(f"{stem}.{ending}", types).to(device or "cpu")

        floats = (torch.float16, torch.bfloat16, torch.float32)
        if self._quantization.storage == "packed":
            values, scales = unpack_columns(read("weight_packed", torch.int32)), read("weight_scale", *floats)
            if self._files.has(f"{stem}.weight_zero_point"):
                zeros = unpack_rows(read("weight_zero_point", torch.int32))
            else:
                zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=values.device)
            return QuantizedMatrix(values, _half(scales), zeros)
        weights, points = read("qweight", torch.int32), read("qzeros", torch.int32)
        scales = read("scales", *floats).T.contiguous()
        if self._quantization.storage == "awq":
            return QuantizedMatrix(unpack_awq(weights).T.contiguous(), _half(scales), unpack_awq(points).T.contiguous())
        self._check_order(stem)
        zeros = unpack_columns(points).T.contiguous() + self._quantization.zero_offset
        return QuantizedMatrix(unpack_rows(weights).T.contiguous(), _half(scales), zeros)

    def _read_fp8(self, name: str, quantization: Quantization, device: torch.device | None) -> QuantizedMatrix:
        stem = name.removesuffix(".weight")
        values = self._files.read(name, (FP8,)).to(device or "cpu")
        floats = (torch.float32, torch.bfloat16, torch.float16)
        scales = self._files.read(self._scale_name(stem), floats).to(values.device, torch.float32)
        rows = values.shape[0]
        if quantization.has_groups:
            return QuantizedMatrix(values, scales.repeat_interleave(GROUP, 0)[:rows].contiguous())
        return QuantizedMatrix(values, scales.reshape(-1, 1).expand(rows, 1).contiguous())

    def _read_blocks(self, name: str, expert: int, device: torch.device | None = None) -> Mxfp4Matrix:
        parts = [self._files.read(f"{name}_{end}", (torch.uint8,), expert) for end in ("blocks", "scales")]
        return Mxfp4Matrix.from_blocks(*(part.to(device or "cpu") for part in parts))

    def _check_order(self, stem: str) -> None:
        name = f"{stem}.g_idx"
        if not self._files.has(name):
            return
        order = self._files.read(name, (torch.int32, torch.int64))
        if not torch.equal(order.long(), torch.arange(len(order)) // self._quantization.group):
            raise ConfigError(f"{self._files.place}: '{name}' reorders columns (desc_act), which is not supported.")


class Fp8Checkpoint:
    """A checkpoint of 16 or more bits whose matrices are rounded to FP8, each row with a scale of its own."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self.norm_shift = source.norm_shift

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape."""
        self._source.check(name, shape)

    def fill(self, name: str, target: Tensor) -> None:
        """Write a tensor; a matrix as FP8 rounds it."""
        self._source.fill(name, target)
        if target.ndim == 2 and is_matrix(name):
            target.copy_(quantize_fp8(target).dequantize(target.dtype))

    def read_quantized(self, names: Sequence[str]) -> None:
        """Leave matrices to read_matrix()."""

    def read_matrix(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedMatrix | None:
        """Return a matrix in FP8; None for what stays as it is."""
        if not is_matrix(name):
            return None
        whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._source.fill(name, whole)
        return quantize_fp8(whole)

    def find_scheme(self, name: str) -> Quantization | None:
        """Return how a matrix is rounded; None for what stays as it is."""
        return FP8_ROWS if is_matrix(name) else None


class DummyMatrices:
    """Random weights, matrices in the form that a quantized checkpoint would have them."""

    def __init__(self, source: Checkpoint, quantization: Quantization) -> None:
        self._source = source
        self._quantization = quantization
        self.norm_shift = source.norm_shift

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Find a tensor of every name and shape."""

    def fill(self, name: str, target: Tensor) -> None:
        """Write random values, not rounded."""
        self._source.fill(name, target)

    def read_quantized(self, names: Sequence[str]) -> None:
        """Leave matrices to read_matrix()."""

    def read_matrix(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedMatrix | None:
        """Return a random matrix; None for what is not quantized in such checkpoints."""
        scheme = self.find_scheme(name)
        if scheme is None:
            return None
        whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._source.fill(name, whole)
        rounded = quantize_fp8(whole)
        groups = shape[1] // scheme.group
        if scheme.bits == 8:
            scales = rounded.scales.expand(-1, groups).contiguous() if scheme.has_groups else rounded.scales
            return QuantizedMatrix(rounded.values, scales)
        values = (whole.float().div_(0.01).round_() + 8).clamp_(0, 15).to(torch.uint8)
        scales = torch.full((shape[0], groups), 0.01, device=device)
        return QuantizedMatrix(values, _half(scales), torch.full_like(scales, 8, dtype=torch.uint8))

    def read_expert(self, name: str, expert: int, shape: tuple[int, int], device: torch.device) -> Mxfp4Matrix:
        """Return a random matrix of an expert."""
        whole = torch.empty(shape, device=device)
        self._source.fill(f"{name}.{expert}", whole)
        exponents = torch.full((shape[0], shape[1] // mxfp4.GROUP), 127 - 6, dtype=torch.uint8, device=device)
        return Mxfp4Matrix(mxfp4.round_to_codes(whole * 2**6), exponents)

    def find_scheme(self, name: str) -> Quantization | None:
        """Return how a matrix, or a tensor of all experts', is quantized; None if it is not."""
        if self._quantization.experts_only:
            return self._quantization if _ALL_EXPERTS.fullmatch(name) else None
        if name == OUTPUT:
            return self._quantization.output
        return self._quantization if is_matrix(name) else None


def _half(scales: Tensor) -> Tensor:
    """Round scales to what a packed weight keeps of them."""
    return scales.to(torch.float16).float()
