# SPDX-License-Identifier: Apache-2.0
"""Whole numbers of 4 bits, of which a group of columns shares a scale and a zero point: AWQ, GPTQ, compressed-tensors.

Checkpoints keep eight numbers in a word of 32 bits, along a matrix's columns or its rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import Shapes, Storage, TensorFiles, UnitFormat, uneven
from blink.formats.matrix import QuantizedMatrix
from blink.formats.schemes import FormatId, Quantization

_PIECE = 64  # columns of experts whose numbers lie in the same 32 bytes
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # at which place of a word each of eight columns lies
_WORD = 8  # numbers
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ZERO = 8  # where there are no zero points
_DRAWN_SCALE = 0.01
_ZERO_POINTS, _ORDER = "weight_zero_point", "g_idx"


@dataclass(frozen=True, slots=True)
class Int4Tensors:
    """The tensors of a matrix, by the ends of their names."""

    files: TensorFiles
    stem: str
    scheme: Quantization
    device: torch.device | None = None
    expert: int | None = None

    def has(self, ending: str) -> bool:
        """Tell whether there is such a tensor."""
        return self.files.has(f"{self.stem}.{ending}")

    def read(self, ending: str, *types: torch.dtype) -> Tensor:
        """Return a tensor of one of these types, on the device."""
        return self.files.read(f"{self.stem}.{ending}", types, self.expert).to(self.device or "cpu")


class Int4Storage(Storage[QuantizedMatrix]):
    """What the three have in common."""

    numbers: ClassVar[str]  # the end of the name of the tensor of these

    def holds(self, files: TensorFiles, name: str) -> bool:
        """Tell whether a matrix has words of numbers."""
        return files.has(f"{_stem(name)}.{self.numbers}")

    def list_tensors(self, files: TensorFiles, name: str, shape: Sequence[int], scheme: Quantization) -> Shapes:
        """Return a matrix's words, scales and zero points."""
        rows, columns = shape
        if columns % scheme.group or rows % _WORD:
            raise uneven(files, _stem(name), scheme.group)
        found = self.list_parts(Int4Tensors(files, _stem(name), scheme), rows, columns)
        return {f"{_stem(name)}.{ending}": [size] for ending, size in found.items()}

    def read(
        self,
        files: TensorFiles,
        name: str,
        scheme: Quantization,
        device: torch.device | None = None,
        expert: int | None = None,
    ) -> QuantizedMatrix:
        """Return a matrix."""
        values, scales, zeros = self.read_parts(Int4Tensors(files, _stem(name), scheme, device, expert))
        return QuantizedMatrix(values, _half(scales), zeros)

    @abstractmethod
    def list_parts(self, tensors: Int4Tensors, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of a matrix's tensors."""

    @abstractmethod
    def read_parts(self, tensors: Int4Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers, scales and zero points as QuantizedMatrix has them."""


class PackedStorage(Int4Storage):
    """compressed-tensors: words along the columns; zero points only where they are not all the same."""

    numbers = "weight_packed"

    def list_parts(self, tensors: Int4Tensors, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of a matrix's tensors."""
        groups = columns // tensors.scheme.group
        found = {self.numbers: (rows, columns // _WORD), "weight_scale": (rows, groups)}
        return found | ({_ZERO_POINTS: (rows // _WORD, groups)} if tensors.has(_ZERO_POINTS) else {})

    def read_parts(self, tensors: Int4Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers, scales and zero points."""
        values = unpack_columns(tensors.read(self.numbers, torch.int32))
        scales = tensors.read("weight_scale", *_FLOATS)
        if tensors.has(_ZERO_POINTS):
            return values, scales, unpack_rows(tensors.read(_ZERO_POINTS, torch.int32))
        return values, scales, torch.full(scales.shape, _ZERO, dtype=torch.uint8, device=values.device)


class _TransposedStorage(Int4Storage):
    numbers = "qweight"

    @abstractmethod
    def pack_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the words of numbers."""

    def list_parts(self, tensors: Int4Tensors, rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of a matrix's tensors."""
        groups = columns // tensors.scheme.group
        points = {"qzeros": (groups, rows // _WORD), "scales": (groups, rows)}
        return {self.numbers: self.pack_shape(rows, columns)} | points

    def read_words(self, tensors: Int4Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return the words of numbers and of zero points, and scales [rows, groups]."""
        words, points = tensors.read(self.numbers, torch.int32), tensors.read("qzeros", torch.int32)
        return words, points, tensors.read("scales", *_FLOATS).T.contiguous()


class AwqStorage(_TransposedStorage):
    """AWQ: transposed, words along the rows of the matrix, their numbers in an order of their own."""

    def pack_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the words of numbers."""
        return columns, rows // _WORD

    def read_parts(self, tensors: Int4Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers, scales and zero points."""
        words, points, scales = self.read_words(tensors)
        return unpack_awq(words).T.contiguous(), scales, unpack_awq(points).T.contiguous()


class GptqStorage(_TransposedStorage):
    """GPTQ: transposed, words along the columns of the matrix."""

    def pack_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the words of numbers."""
        return columns // _WORD, rows

    def read_parts(self, tensors: Int4Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers, scales and zero points."""
        words, points, scales = self.read_words(tensors)
        _check_order(tensors)
        zeros = unpack_columns(points).T.contiguous() + tensors.scheme.zero_offset
        return unpack_rows(words).T.contiguous(), scales, zeros


class Int4(UnitFormat[QuantizedMatrix]):
    """Numbers from 0 to 15, less a zero point.

    A group's word: the scale as half, above it -(128 + zero point) as bf16.
    """

    id = FormatId.INT4
    storages: ClassVar[Mapping[str, Storage[Any]]] = {
        "awq": AwqStorage(),
        "gptq": GptqStorage(),
        "packed": PackedStorage(),
    }

    def draw(self, weights: Tensor, scheme: Quantization) -> QuantizedMatrix:
        """Return a matrix near random weights."""
        values = (weights.float().div_(_DRAWN_SCALE).round_() + _ZERO).clamp_(0, 15).to(torch.uint8)
        shape = (len(weights), weights.shape[1] // scheme.group)
        scales = torch.full(shape, _DRAWN_SCALE, device=weights.device)
        return QuantizedMatrix(values, _half(scales), torch.full_like(scales, _ZERO, dtype=torch.uint8))

    def pack_expert(self, matrix: QuantizedMatrix, missing: int) -> tuple[Tensor, Tensor, None]:
        """Return numbers by halves of bytes, and their groups' words."""
        words = self.join_scales(matrix.scales, matrix.zeros)
        return pack_halves(functional.pad(matrix.values, (0, missing))), words, None

    def unpack_expert(self, values: Tensor, words: Tensor) -> Tensor:
        """Undo pack_expert."""
        return QuantizedMatrix(unpack_halves(values), *self.split_scales(words)).dequantize(torch.float32)

    def compress(self, matrix: QuantizedMatrix) -> Mapping[str, Tensor]:
        """Return a matrix's tensors: scales that float16 and bfloat16 both hold."""
        assert matrix.zeros is not None
        return {
            PackedStorage.numbers: pack_columns(matrix.values),
            "weight_scale": matrix.scales.to(torch.bfloat16),
            _ZERO_POINTS: pack_columns(matrix.zeros.T).T,
            "weight_shape": torch.tensor(matrix.values.shape),
        }

    def order(self, values: Tensor) -> Tensor:
        """Return numbers in the order of units."""
        words = values.view(len(values), -1, 8, 2, 2, 4, 2)  # units, words, steps of 16, 8 further, lane, k
        ordered = words.permute(0, 1, 5, 2, 6, 3, 4)
        return (ordered[..., 0] | ordered[..., 1] << 4).reshape(len(values), -1)

    def restore(self, values: Tensor) -> Tensor:
        """Undo order."""
        nibbles = torch.stack([values & 15, values >> 4], -1)
        lanes = nibbles.view(len(nibbles), -1, 4, 8, 2, 2, 2)  # lane, word, k, step, 8 further
        return lanes.permute(0, 1, 3, 5, 6, 2, 4).reshape(len(values), -1)

    def join_scales(self, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Return the words of groups."""
        assert zeros is not None
        # 128 + zero point has 8 bits at most: bfloat16 holds it.
        high = (-(zeros.float() + 128)).to(torch.bfloat16).view(torch.int16)
        low = scales.to(torch.float16).view(torch.int16)
        return torch.stack([low, high], -1).view(torch.int32)[..., 0]

    def split_scales(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and zero points of words."""
        halves = words.contiguous().view(torch.int16).view(*words.shape, 2)
        scales = halves[..., 0].contiguous().view(torch.float16).float()
        zeros = -halves[..., 1].contiguous().view(torch.bfloat16).float() - 128
        return scales, zeros.to(torch.uint8)


def pack_halves(codes: Tensor) -> Tensor:
    """Return bytes [rows, columns / 2]: of each 64 columns the first 32 lie in the low halves."""
    pieces = codes.view(len(codes), -1, 2, _PIECE // 2)
    return (pieces[:, :, 0] | pieces[:, :, 1] << 4).flatten(1)


def unpack_halves(values: Tensor) -> Tensor:
    """Undo pack_halves."""
    pieces = values.view(len(values), -1, 1, _PIECE // 2)
    return torch.cat([pieces & 15, pieces >> 4], 2).flatten(1)


def pack_columns(codes: Tensor) -> Tensor:
    """Return int32 words [rows, columns / 8] of numbers of 4 bits [rows, columns], the first in the lowest bits."""
    places = codes.to(torch.int64).unflatten(1, (-1, _WORD)) << torch.arange(0, 4 * _WORD, 4)
    return places.sum(-1).to(torch.int32)


def unpack_columns(words: Tensor) -> Tensor:
    """Return uint8 [rows, 8 * columns] of int32 words [rows, columns], the lowest bits first."""
    return _unpack(words, -1).flatten(1)


def unpack_rows(words: Tensor) -> Tensor:
    """Return uint8 [8 * rows, columns] of int32 words [rows, columns], the lowest bits first."""
    return _unpack(words, 1).flatten(0, 1)


def unpack_awq(words: Tensor) -> Tensor:
    """Return uint8 [rows, 8 * columns] of AWQ's int32 words [rows, columns]."""
    return _unpack(words, -1)[..., list(_AWQ_ORDER)].flatten(1)


def _unpack(words: Tensor, dim: int) -> Tensor:
    """Return the eight numbers of each word along a new dimension."""
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in range(_WORD)], dim)


def _check_order(tensors: Int4Tensors) -> None:
    if not tensors.has(_ORDER):
        return
    order = tensors.read(_ORDER, torch.int32, torch.int64).cpu()
    if not torch.equal(order.long(), torch.arange(len(order)) // tensors.scheme.group):
        name = f"{tensors.stem}.{_ORDER}"
        raise ConfigError(f"{tensors.files.place}: '{name}' reorders columns (desc_act), which is not supported.")


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _half(scales: Tensor) -> Tensor:
    """Round scales to what a packed weight keeps of them."""
    return scales.to(torch.float16).float()
