# SPDX-License-Identifier: Apache-2.0
"""The matrices of all experts in GGUF's formats, as a GPU keeps them: gguf.py's arrays of each expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
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
    parts: tuple[GgufArrays, ...]  # of as many rows each; their arrays have the experts before their other dimensions

    @property
    def encoding(self) -> Encoding:
        """How the first part is kept."""
        return Encoding(self.parts[0].format, grouped=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(part.nbytes for part in self.parts)


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
    count, rows, _ = shape
    parts: list[GgufArrays] = []
    start, remaining = 0, iter(experts)
    while some := list(itertools.islice(remaining, max(1, _ROWS_AT_ONCE // rows))):
        for index, of_part in enumerate(zip(*some, strict=True)):
            blocks = torch.cat([own.blocks for own in of_part])
            found = pack_rows(FormatId.of_ggml(of_part[0].format), [blocks], device)
            height = rows // len(some[0])
            stacked = found.change(lambda array, height=height: array.unflatten(1, (-1, height)).transpose(0, 1))
            if start == 0:
                parts.append(stacked.change(lambda array: allocate(count, *array.shape[1:], dtype=array.dtype)))
            _store(parts[index], start, stacked)
        start += len(some)
    assert start == count
    return GgufExperts(shape, tuple(parts))


def _store(target: GgufArrays, start: int, found: GgufArrays) -> None:
    """Write some experts' arrays from that of a number on."""
    for array, part in zip(target.arrays, found.arrays, strict=True):
        if array is not None and part is not None:
            array[start : start + len(part)] = part
