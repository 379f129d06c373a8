# SPDX-License-Identifier: Apache-2.0
"""Weights in GGUF's formats, as files hold them and as a GPU reads them.

For a GPU blocks are taken apart into arrays, which kernels/gpu/gemm/gguf.py reads. They hold GGUF_UNIT columns of one
row after the other, all rows of a unit together: what the rows of a tile need at a time lies side by side. Every number
is kept; scales of 6 bits get a byte each, and numbers of Q8_0 have 128 added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.schemes import GGUF_UNIT, FormatId

BLOCK = 256  # columns that share a word of `tops`
_WITH_TOPS = (FormatId.Q4_K, FormatId.Q5_K, FormatId.Q6_K)  # whose blocks have a scale of their groups' scales
_ROWS_AT_ONCE = 8192  # taken apart at a time, so that loading needs little more memory than the arrays


@dataclass(frozen=True, slots=True)
class GgufRows:
    """Rows of a weight, as a GGUF file holds them."""

    format: int  # ggml's number, a gguf.GGMLQuantizationType
    blocks: Tensor  # uint8 [rows, bytes of a row]


@dataclass(frozen=True, slots=True)
class GgufArrays:
    """Rows of a weight in one format.

    Numbers of 4 bits, and the low ones of 6: a byte holds two that lie half a unit apart, with Q6_K a quarter.
    """

    format: FormatId
    codes: Tensor  # uint8 [units, rows, 32, or of Q8_0 64]
    words: Tensor  # int32 [units, rows], of Q4_1 [2 * units, rows]: scales, or scales and offsets, of a unit's groups
    tops: Tensor | None = None  # int32 [blocks, rows]: what these are multiplied by, as float16, the scales' half first
    # uint8 [units, rows, 16]: of Q6_K, two more bits for numbers 16, 32 and 48 apart; of Q5_K [units, rows, 8]: one
    # more bit for both numbers of bytes 8, 16 and 24 apart
    high: Tensor | None = None

    @property
    def has_tops(self) -> bool:
        """Whether the format has `tops`."""
        return self.format in _WITH_TOPS

    @property
    def num_rows(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays if array is not None)

    def store(self, start: int, rows: GgufArrays) -> None:
        """Write some rows from `start` on."""
        for array, part in zip(self.arrays, rows.arrays, strict=True):
            if array is not None and part is not None:
                array[:, start : start + rows.num_rows] = part

    def allocate(self, num_rows: int) -> GgufArrays:
        """Return arrays like these for so many rows."""
        return self.change(lambda array: array.new_empty(len(array), num_rows, *array.shape[2:]))

    def change(self, make: Callable[[Tensor], Tensor]) -> GgufArrays:
        """Return arrays that are made of these, one of each."""
        codes, words, tops, high = (None if array is None else make(array) for array in self.arrays)
        assert codes is not None and words is not None
        return GgufArrays(self.format, codes, words, tops, high)

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        """All arrays; None where the format has none."""
        return self.codes, self.words, self.tops, self.high


def pack_rows(format: FormatId, parts: Sequence[Tensor], device: torch.device) -> GgufArrays:
    """Take rows of blocks apart on a device; parts: uint8 [rows, bytes of a row], one below the other."""
    num_rows, start = sum(map(len, parts)), 0
    arrays: GgufArrays | None = None
    for blocks in parts:
        for some in blocks.split(_ROWS_AT_ONCE):
            found = _PACKERS[format](some.to(device))
            arrays = arrays or found.allocate(num_rows)
            arrays.store(start, found)
            start += len(some)
    assert arrays is not None
    return arrays


def _pack_q4_0(rows: Tensor) -> GgufArrays:
    blocks = _split(rows, 18)
    return GgufArrays(FormatId.Q4_0, _transpose(_pair(_nibbles(blocks[..., 2:])), 32), _words(blocks[..., :2]))


def _pack_q4_1(rows: Tensor) -> GgufArrays:
    blocks = _split(rows, 20)
    return GgufArrays(FormatId.Q4_1, _transpose(_pair(_nibbles(blocks[..., 4:])), 32), _words(blocks[..., :4]))


def _pack_q8_0(rows: Tensor) -> GgufArrays:
    blocks = _split(rows, 34)
    return GgufArrays(FormatId.Q8_0, _transpose(blocks[..., 2:] ^ 128, GGUF_UNIT), _words(blocks[..., :2]))


def _pack_q4_k(rows: Tensor) -> GgufArrays:
    blocks = rows.view(len(rows), -1, 144)
    # In the file a byte's halves are numbers of neighbouring groups already.
    codes = _transpose(blocks[..., 16:], 32)
    return GgufArrays(FormatId.Q4_K, codes, _group_words(blocks), _words(blocks[..., :4]))


def _pack_q5_k(rows: Tensor) -> GgufArrays:
    blocks = rows.view(len(rows), -1, 176)
    high = torch.stack([blocks[..., 16:48] >> shift & 3 for shift in (0, 2, 4, 6)], -2).unflatten(-1, (4, 8))
    joined = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    codes, tops = _transpose(blocks[..., 48:], 32), _words(blocks[..., :4])
    return GgufArrays(FormatId.Q5_K, codes, _group_words(blocks), tops, _transpose(joined, 8))


def _group_words(blocks: Tensor) -> Tensor:
    """Return the words of scales and offsets of 6 bits, of Q4_K and Q5_K."""
    low, middle, high = blocks[..., 4:16].split(4, -1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    offsets = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    return _words(torch.stack([scales, offsets], -1))


def _pack_q6_k(rows: Tensor) -> GgufArrays:
    blocks = rows.view(len(rows), -1, 210)
    low, high = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat([low & 15, low >> 4], -2).reshape(len(rows), -1, 2, 16)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).reshape(len(rows), -1, 4, 16)
    joined = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    tops = functional.pad(blocks[..., 208:], (0, 2))
    return GgufArrays(
        FormatId.Q6_K, _transpose(_pair(low), 32), _words(blocks[..., 192:208]), _words(tops), _transpose(joined, 16)
    )


_PACKERS = {
    FormatId.Q4_0: _pack_q4_0,
    FormatId.Q4_1: _pack_q4_1,
    FormatId.Q8_0: _pack_q8_0,
    FormatId.Q4_K: _pack_q4_k,
    FormatId.Q5_K: _pack_q5_k,
    FormatId.Q6_K: _pack_q6_k,
}


def _split(rows: Tensor, block_bytes: int) -> Tensor:
    """Return blocks of 32 columns [rows, blocks, bytes]; with a last one of zeros where that fills a unit."""
    blocks = rows.view(len(rows), -1, block_bytes)
    return functional.pad(blocks, (0, 0, 0, blocks.shape[1] % 2))


def _nibbles(quants: Tensor) -> Tensor:
    """Return the numbers of blocks of 32 columns [rows, units, 2, 32], from bytes that hold two 16 columns apart."""
    return torch.cat([quants & 15, quants >> 4], -1).unflatten(1, (-1, 2))


def _pair(numbers: Tensor) -> Tensor:
    return numbers[..., 0, :] | numbers[..., 1, :] << 4


def _transpose(values: Tensor, size: int) -> Tensor:
    """Return [bytes of a row / size, rows, size]."""
    return values.reshape(len(values), -1, size).transpose(0, 1)


def _words(values: Tensor) -> Tensor:
    """Return int32 [bytes of a row / 4, rows]."""
    # A copy, whose rows begin at whole words.
    return values.reshape(len(values), -1).clone(memory_format=torch.contiguous_format).view(torch.int32).T
