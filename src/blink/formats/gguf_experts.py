# SPDX-License-Identifier: Apache-2.0
"""The matrices of all experts in GGUF's formats, as a GPU keeps them: gguf.py's arrays of each expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.gguf import GgufArrays, GgufRows, pack_rows
from blink.formats.schemes import Encoding, FormatId

_ROWS_AT_ONCE = 8192  # of experts that are taken apart together: few launches, and little more memory


@dataclass(frozen=True, slots=True)
class GgufExperts:
    """The same matrix of each expert: one part, or gates and ups, which may differ in their formats."""

    shape: tuple[int, int, int]  # experts, rows of all parts and columns
    stacks: tuple[GgufArrays, ...]  # of as many rows each; their arrays have the experts before their other dimensions

    @property
    def encoding(self) -> Encoding:
        """How the first part is kept."""
        return Encoding(self.stacks[0].format, grouped=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(part.nbytes for part in self.stacks)

    def multiply(self, factors: Tensor) -> None:
        """Multiply each expert's matrix by its factor; the scales are rounded to float16, as files have them."""
        for part in self.stacks:
            scales = (part.words if part.tops is None else part.tops).view(torch.float16)
            scales.copy_(scales.float() * factors[:, None, None])


def pack_experts(
    experts: Iterable[Sequence[GgufRows]],
    shape: tuple[int, int, int],
    allocate: Callable[..., Tensor],
    device: torch.device,
) -> GgufExperts:
    """Take the matrices of all experts apart on a device.

    experts: of each the parts, in the same formats as the first's; shape: as GgufExperts has it; allocate: takes a
    shape and a dtype.
    """

    def pack() -> Iterator[list[GgufArrays]]:
        remaining = iter(experts)
        while some := list(itertools.islice(remaining, max(1, _ROWS_AT_ONCE // shape[1]))):
            formats = [FormatId.of_ggml(part.format) for part in some[0]]
            joined = (torch.cat([part.blocks for part in of_part]) for of_part in zip(*some, strict=True))
            yield [pack_rows(format, [blocks], device) for format, blocks in zip(formats, joined, strict=True)]

    return stack_experts(pack(), shape, allocate)


def stack_experts(
    packed: Iterable[Sequence[GgufArrays]], shape: tuple[int, int, int], allocate: Callable[..., Tensor]
) -> GgufExperts:
    """Stack the arrays of all experts, some experts after the others; packed: of these, the rows of each part."""
    parts: list[GgufArrays] = []
    start = 0
    for some in packed:
        height = shape[1] // len(some)
        for index, found in enumerate(some):
            stacked = found.change(lambda array, height=height: array.unflatten(1, (-1, height)).transpose(0, 1))
            if start == 0:
                parts.append(stacked.change(lambda array: allocate(shape[0], *array.shape[1:], dtype=array.dtype)))
            _store(parts[index], start, stacked)
        start += some[0].num_rows // height
    assert start == shape[0]
    return GgufExperts(shape, tuple(parts))


def _store(target: GgufArrays, start: int, found: GgufArrays) -> None:
    """Write some experts' arrays from that of a number on."""
    for array, part in zip(target.arrays, found.arrays, strict=True):
        if array is not None and part is not None:
            array[start : start + len(part)] = part
