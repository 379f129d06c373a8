# SPDX-License-Identifier: Apache-2.0
"""What a weight of the model may be, and what the module of a number format says of it: in files and on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.layouts import Layout, Matrix
from blink.formats.schemes import BF16, FormatId, Quantization


class QuantizedWeight(ABC):
    """A weight [out, in] that is no plain tensor; `linear` multiplies with it."""

    shape: tuple[int, int]
    dtype: torch.dtype  # that it computes in
    device: torch.device

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that a GEMM reads of it."""

    @property
    def matrix(self) -> Matrix:
        """Its sizes, and how it lies in memory."""
        return Matrix(*self.shape, Layout.GGUF, None, name_dtype(self.dtype))

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T; x: contiguous [rows, in] of its dtype."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the weight as a tensor of its dtype."""


class QuantizedEmbedding(QuantizedWeight):
    """A quantised weight whose single rows can be read."""

    @abstractmethod
    def take_rows(self, rows: Tensor) -> Tensor:
        """Return some rows [len(rows), in] of the weight as a tensor of its dtype; rows: int32 [number].

        Raises:
            IndexError: the weight has no such row.
        """


Weight = Tensor | QuantizedWeight


def matrix_of(weight: Weight) -> Matrix:
    """Return a weight's sizes, and how it lies in memory."""
    if isinstance(weight, QuantizedWeight):
        return weight.matrix
    layout, is_bf16 = Layout.BLOCKED if weight.is_mkldnn else Layout.ROWS, weight.dtype == torch.bfloat16
    return Matrix(weight.shape[0], weight.shape[1], layout, BF16 if is_bf16 else None, name_dtype(weight.dtype))


def name_dtype(dtype: torch.dtype) -> str:
    """Return a type's name, as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def parts_of(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a weight's values, the scales of its rows and the words of its groups; None: it has none."""
    return weight.parts if matrix_of(weight).is_packed else (plain(weight), None, None)  # pyright: ignore[reportAttributeAccessIssue]


def take_rows(weight: Tensor | QuantizedEmbedding, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Return some rows [len(rows), in] of a weight, in `out` if that is given; rows: int32 [number]."""
    if isinstance(weight, Tensor):
        return torch.index_select(weight, 0, rows, out=out)
    found = weight.take_rows(rows)
    return found if out is None else out.copy_(found)


def plain(weight: object) -> Tensor:
    """Return a weight that must be a tensor, for kernels that know no other."""
    assert isinstance(weight, Tensor)
    return weight


class StoredMatrix(ABC):
    """A matrix [out, in] as checkpoints have it."""

    __slots__ = ()

    @property
    @abstractmethod
    def format(self) -> FormatId:
        """The format of its numbers."""

    @abstractmethod
    def take_rows(self, rows: Tensor) -> StoredMatrix:
        """Return some rows, by their numbers."""

    @abstractmethod
    def take_columns(self, columns: range) -> StoredMatrix:
        """Return columns that follow each other, of which no group is parted."""

    @abstractmethod
    def to(self, device: torch.device) -> StoredMatrix:
        """Return the matrix on a device."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in another type."""


class TensorFiles(Protocol):
    """The tensors of a checkpoint, by name."""

    @property
    def place(self) -> str:
        """Where they are, for messages."""
        ...

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape, None if there is none."""
        ...

    def read(self, name: str, types: Sequence[torch.dtype], entry: int | None = None) -> Tensor:
        """Return a tensor as it is stored, in one of these types, or one entry of its first dimension.

        Raises:
            ConfigError: it is of another type, or cannot be read.
        """
        ...


Held = TypeVar("Held", bound=StoredMatrix)
Shapes = dict[str, list[tuple[int, ...]]]  # of tensors, each with the shapes that it may have


class Storage(ABC, Generic[Held]):
    """One of the ways in which a format's matrices lie in a checkpoint's files."""

    @abstractmethod
    def holds(self, files: TensorFiles, name: str) -> bool:
        """Tell whether a matrix, or a tensor of all experts', is stored so."""

    @abstractmethod
    def list_tensors(self, files: TensorFiles, name: str, shape: Sequence[int], scheme: Quantization) -> Shapes:
        """Return the tensors of a matrix of that shape.

        Raises:
            ConfigError: no matrix of that shape is stored so.
        """

    @abstractmethod
    def read(
        self,
        files: TensorFiles,
        name: str,
        scheme: Quantization,
        device: torch.device | None = None,
        expert: int | None = None,
    ) -> Held:
        """Return a matrix; expert: whose, of a tensor of all experts'.

        Raises:
            ConfigError: it cannot be read.
        """

    def fill(self, files: TensorFiles, name: str, scheme: Quantization, target: Tensor) -> None:
        """Write what the tensors stand for."""
        target.copy_(self.read(files, name, scheme).dequantize(target.dtype).view(target.shape))


class NumberFormat(ABC, Generic[Held]):
    """A number format: how it is stored, and how a GPU's kernels read it."""

    id: ClassVar[FormatId]
    has_row_scales: ClassVar[bool] = False  # of experts, beside their groups' words
    storages: ClassVar[Mapping[str, Storage[Any]]]  # by their names in schemes.py

    @abstractmethod
    def draw(self, weights: Tensor, scheme: Quantization) -> Held:
        """Return a matrix near random weights of a standard deviation of 0.02."""

    @abstractmethod
    def pack_expert(self, matrix: Held, missing: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows as experts.py's PackedExperts have them, `missing` columns of zeros behind: bytes, words, scales.

        Words: int32 [rows, groups]; scales: float32 [rows], where rows have them.
        """

    @abstractmethod
    def unpack_expert(self, values: Tensor, words: Tensor) -> Tensor:
        """Undo pack_expert, but for rows' scales: float32."""


class UnitFormat(NumberFormat[Held]):
    """A format whose matrices beside experts stay as they are, too: packed.py's PackedWeight."""

    @abstractmethod
    def compress(self, matrix: Held) -> Mapping[str, Tensor]:
        """Return a matrix's tensors as compressed-tensors has them, by the ends of their names."""

    @abstractmethod
    def order(self, values: Tensor) -> Tensor:
        """Return numbers in the order of units: uint8 [rows, bytes of a row]."""

    @abstractmethod
    def restore(self, values: Tensor) -> Tensor:
        """Undo order."""

    @abstractmethod
    def join_scales(self, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Return the words of each row's groups, int32, as csrc/kernels/common/quantized.cuh describes them."""

    @abstractmethod
    def split_scales(self, words: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return groups' scales, float32, and zero points, uint8, of their words."""


def uneven(files: TensorFiles, name: str, group: int) -> ConfigError:
    """Return what is to be raised of a matrix of 4 bits that does not consist of whole groups."""
    return ConfigError(f"{files.place}: '{name}' of 4 bits must have whole groups of {group} columns.")
