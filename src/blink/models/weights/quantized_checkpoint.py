# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantized matrices, and those whose matrices become FP8 when they are read.

What reads them like any other gets the dequantized weights; read_matrix() gives the matrices as they are.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.fp8 import quantize_fp8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.registry import FORMATS, STORAGES
from blink.formats.schemes import FP8_ROWS, Quantization
from blink.models.weights.checkpoint import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint

OUTPUT = "lm_head.weight"
# No embeddings, no routers, and of recurrent layers not what they have for each head.
_MATRIX = re.compile(r".*(_proj|_proj_with_mqa|_proj_qkvz?|_proj_xbc|_proj_z|\.w[123]|lm_head)\.weight")
_ALL_EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")  # of gpt-oss, one tensor for all


def is_matrix(name: str) -> bool:
    """Tell whether a tensor is one of the matrices that are quantized."""
    return _MATRIX.fullmatch(name) is not None


class MatrixCheckpoint(ABC):
    """A checkpoint that gives matrices as they are stored, or as they are to be."""

    norm_shift: float
    keeps_groups: bool
    stored_rows: GgufCheckpoint | None = None

    @property
    def matrices(self) -> MatrixCheckpoint:
        """It does."""
        return self

    @abstractmethod
    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape, or what it is made of."""

    @abstractmethod
    def fill(self, name: str, target: Tensor) -> None:
        """Write a tensor, dequantised if it must be."""

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> None:
        """Leave matrices to read_matrix()."""
        del names, order

    @abstractmethod
    def find_scheme(self, name: str) -> Quantization | None:
        """Return how a matrix, or a tensor of all experts', is quantized; None if it is not."""

    @abstractmethod
    def read_matrix(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedMatrix | None:
        """Return a matrix in its format; None if it is not quantized."""

    def read_expert(self, name: str, expert: int, shape: tuple[int, int], device: torch.device) -> Any:
        """Return an expert's matrix [out, in] of a quantized tensor of all, in its format."""
        raise NotImplementedError


class QuantizedCheckpoint(MatrixCheckpoint):
    """A Hugging Face directory some of whose matrices are quantized."""

    def __init__(self, files: SafetensorsCheckpoint, quantization: Quantization) -> None:
        self._files = files
        self._quantization = quantization
        self.norm_shift, self.keeps_groups = files.norm_shift, files.keeps_groups

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape, or what it is made of."""
        scheme = self.find_scheme(name)
        if scheme is None:
            self._files.check(name, shape)
            return
        for stored, shapes in STORAGES[scheme.storage].list_tensors(self._files, name, shape, scheme).items():
            found = self._files.shape(stored)
            if found not in shapes:
                raise ConfigError(
                    f"{self._files.place}: '{stored}' has shape {found}, but the model's description asks for"
                    f" {' or '.join(map(str, shapes))}; the files do not belong together."
                )

    def fill(self, name: str, target: Tensor) -> None:
        """Write a tensor, dequantised if it must be."""
        scheme = self.find_scheme(name)
        if scheme is None:
            self._files.fill(name, target)
        else:
            STORAGES[scheme.storage].fill(self._files, name, scheme, target)

    def find_scheme(self, name: str) -> Quantization | None:
        """Return how a matrix, or a tensor of all experts', is quantized; None if it is not.

        Beside matrices of 4 bits some may be FP8.
        """
        schemes = (self._quantization, FP8_ROWS)
        return next((one for one in schemes if STORAGES[one.storage].holds(self._files, name)), None)

    def read_matrix(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedMatrix | None:
        """Return a matrix as it is stored; None if it is not quantized."""
        del shape  # check() has compared it
        scheme = self.find_scheme(name)
        return None if scheme is None else STORAGES[scheme.storage].read(self._files, name, scheme, device)

    def read_expert(self, name: str, expert: int, shape: tuple[int, int], device: torch.device) -> Any:
        """Return an expert's matrix [out, in] of a quantized tensor of all, as it is stored."""
        del shape  # as above
        scheme = self.find_scheme(name)
        assert scheme is not None
        return STORAGES[scheme.storage].read(self._files, name, scheme, device, expert)


class Fp8Checkpoint(MatrixCheckpoint):
    """A checkpoint of 16 or more bits whose matrices are rounded to FP8, each row with a scale of its own."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self.norm_shift, self.keeps_groups = source.norm_shift, source.keeps_groups

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape."""
        self._source.check(name, shape)

    def fill(self, name: str, target: Tensor) -> None:
        """Write a tensor; a matrix as FP8 rounds it."""
        self._source.fill(name, target)
        if target.ndim == 2 and is_matrix(name):
            target.copy_(quantize_fp8(target).dequantize(target.dtype))

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


class DummyMatrices(MatrixCheckpoint):
    """Random weights, matrices in the form that a quantized checkpoint would have them."""

    def __init__(self, source: Checkpoint, quantization: Quantization) -> None:
        self._source = source
        self._quantization = quantization
        self.norm_shift, self.keeps_groups = source.norm_shift, source.keeps_groups

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Find a tensor of every name and shape."""

    def fill(self, name: str, target: Tensor) -> None:
        """Write random values, not rounded."""
        self._source.fill(name, target)

    def read_matrix(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedMatrix | None:
        """Return a random matrix; None for what is not quantized in such checkpoints."""
        scheme = self.find_scheme(name)
        if scheme is None:
            return None
        whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._source.fill(name, whole)
        return FORMATS[scheme.format].draw(whole, scheme)

    def read_expert(self, name: str, expert: int, shape: tuple[int, int], device: torch.device) -> Any:
        """Return a random matrix of an expert."""
        whole = torch.empty(shape, device=device)
        self._source.fill(f"{name}.{expert}", whole)
        return FORMATS[self._quantization.format].draw(whole, self._quantization)

    def find_scheme(self, name: str) -> Quantization | None:
        """Return how a matrix, or a tensor of all experts', is quantized; None if it is not."""
        if self._quantization.experts_only:
            return self._quantization if _ALL_EXPERTS.fullmatch(name) else None
        if name == OUTPUT:
            return self._quantization.output
        return self._quantization if is_matrix(name) else None
