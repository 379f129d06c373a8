# SPDX-License-Identifier: Apache-2.0
"""Weights in GGUF's blocks on the CPU: multiplied as the file holds them, by csrc/cpu/gguf.

Weights become float32 in registers and activations are not rounded: a GEMM differs from that with the dequantized
weight by the order of its sums alone. What a row gives does not depend on the other rows. --cpu-gemm and
--cpu-prompt-gemm round: kernels/rounding.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from blink.formats.base import QuantizedEmbedding, Weight
from blink.formats.experts import ExpertWeights
from blink.formats.gguf import GgufRows
from blink.kernels.cpu.thread_pool import find_thread_pool
from blink.kernels.rounding import find_prompt_rows, rounds_activations
from blink.region.native import lib


class Isa(IntEnum):
    """Instruction sets that have kernels; csrc/cpu/gguf/product.h."""

    BEST = 0
    PLAIN = 1
    AVX2 = 2
    AVX512 = 3

    @property
    def is_here(self) -> bool:
        """Whether this machine has it."""
        return bool(lib.blink_has_gguf_kernels(self))


class Bf16Isa(IntEnum):
    """What multiplies in bfloat16; csrc/cpu/gguf/bf16.h."""

    BEST = 0
    PLAIN = 1  # the reference
    AMX = 2

    @property
    def is_here(self) -> bool:
        """Whether this machine has it."""
        return bool(lib.blink_has_bf16_kernel(self))


class Int16Isa(IntEnum):
    """What multiplies in integers; csrc/cpu/gguf/int16.h."""

    BEST = 0
    PLAIN = 1  # the reference
    VNNI = 2

    @property
    def is_here(self) -> bool:
        """Whether this machine has it."""
        return bool(lib.blink_has_int16_kernel(self))


def row_bytes(format: int, columns: int) -> int:
    """Return the bytes of a row; 0 for a format that has no kernels, or where its blocks do not fit the columns."""
    values = lib.blink_gguf_block_values(format)
    return 0 if not values or columns % values else columns // values * lib.blink_gguf_block_bytes(format)


def find_address(weight: Weight | ExpertWeights) -> int:
    """Return where the native library finds a weight's description; 0: the weight is none in GGUF's blocks."""
    return getattr(weight, "address", 0)


class GgufWeight(QuantizedEmbedding):
    """A weight in GGUF's blocks: parts of one number of columns, one below the other, each in a format of its own."""

    def __init__(self, parts: Sequence[GgufRows], columns: int, isa: Isa = Isa.BEST) -> None:
        """Take the parts, which must be contiguous and have whole blocks."""
        for part in parts:
            assert part.blocks.dtype == torch.uint8 and part.blocks.is_contiguous()
            assert part.blocks.shape[1] == row_bytes(part.format, columns) > 0
        assert isa.is_here
        self.shape = (sum(len(part.blocks) for part in parts), columns)
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self._isa = isa
        self._blocks = [part.blocks for part in parts]  # of which the words below hold the addresses
        words = [columns, len(parts)]
        for part in parts:
            words += [part.blocks.data_ptr(), part.format, len(part.blocks)]
        self._words = torch.tensor(words, dtype=torch.int64)
        self.address = self._words.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return sum(blocks.nbytes for blocks in self._blocks)

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T."""
        assert x.dtype == torch.float32 and x.is_contiguous()
        rows = x.shape[0]  # its length, which Python asks for more slowly
        result = torch.empty(rows, self.shape[0])
        first = find_prompt_rows(rows)
        if first < rows:
            self.multiply_rounded(x[first:], result[first:])
        operands = self.address, x.data_ptr(), first, result.data_ptr(), find_thread_pool()
        if first and rounds_activations():
            lib.blink_multiply_gguf_int16(Int16Isa.BEST, *operands)
        elif first:
            lib.blink_multiply_gguf(self._isa, *operands)
        return result

    def multiply_int16(self, x: Tensor, out: Tensor, isa: Int16Isa = Int16Isa.BEST) -> None:
        """Write x @ weight.T to out, with x rounded to 16 bits: 32 values of a row share a scale."""
        assert x.dtype == torch.float32 and x.is_contiguous() and out.is_contiguous()
        pool = find_thread_pool()
        lib.blink_multiply_gguf_int16(isa, self.address, x.data_ptr(), len(x), out.data_ptr(), pool)

    def multiply_rounded(self, x: Tensor, out: Tensor, isa: Bf16Isa = Bf16Isa.BEST) -> None:
        """Write x @ weight.T to out, with both rounded to bfloat16 and sums in float32."""
        assert x.dtype == torch.float32 and x.is_contiguous() and out.is_contiguous()
        pool = find_thread_pool()
        lib.blink_multiply_gguf_bf16(isa, self.address, x.data_ptr(), len(x), out.data_ptr(), pool)

    def dequantize(self) -> Tensor:
        """Return the weight as a tensor."""
        result = torch.empty(self.shape)
        lib.blink_dequantize_gguf(self._isa, self.address, result.data_ptr(), find_thread_pool())
        return result

    def take_rows(self, rows: Tensor) -> Tensor:
        """Return some rows."""
        rows = rows.to(torch.int32).contiguous()
        result = torch.empty(len(rows), self.shape[1])
        found = lib.blink_take_gguf_rows(self._isa, self.address, rows.data_ptr(), len(rows), result.data_ptr())
        if found < len(rows):
            raise IndexError(f"row {int(rows[found])} of a weight of {self.shape[0]} rows")
        return result
