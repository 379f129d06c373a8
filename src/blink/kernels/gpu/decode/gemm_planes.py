# SPDX-License-Identifier: Apache-2.0
"""Planes of activations, and how products of FP8 weights with them are split: csrc/gpu/decode/gemm_planes.cuh.

Planes lie in the order of the weights that they are made for: FormatId says which.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.schemes import UNIT_BYTES, FormatId
from blink.kernels.gpu.decode.ring_split import RingSplit, Shape, fill_ring, guess_split
from blink.kernels.gpu.decode.splits import Output, gemm_key, read_table
from blink.kernels.gpu.device import cached

PLANES = 2  # csrc/gpu/decode/planes.cuh's kPlanes
MAX_ROWS = 64
_MAX_STAGES = 24
_ORDERS = (None, FormatId.FP8, FormatId.INT4)  # by the numbers of csrc/gpu/formats.h: without planes kBf16


@dataclass(frozen=True, slots=True)
class PlanesGemmSplit(RingSplit):
    """See csrc/gpu/decode/gemm_planes.cuh."""

    groups: int  # of 64 weight rows
    cluster: int  # blocks that share k
    boxes: int  # of 128 k, in a stage
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and a warp each that copies and sums squares."""
        return 128 * self.groups + 64

    def total_stages(self, shape: Shape) -> int:
        """Return the stages of all of k."""
        return -(-shape.k // (self.boxes * UNIT_BYTES))

    def ring_bytes(self, shape: Shape) -> int:
        """Return the size of the ring."""
        return self.stages * self.boxes * (self.tile + PLANES * shape.tokens) * UNIT_BYTES

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of PlanesGemmShared with the scales of groups behind it."""
        words = -(-self.total_stages(shape) // self.cluster) * (self.tile + 1) if shape.grouped else 0
        return self.gemm_bytes(shape) + words * 4

    def kernel_name(self, shape: Shape, *, norm: bool, writes: FormatId | None = None) -> str:
        """Return the name of a kernel of csrc/gpu/decode/gemm_planes.cuh; writes: the order of planes it writes."""
        sizes = (str(shape.grouped).lower(), shape.tokens, self.groups, self.cluster, self.boxes, self.stages)
        return name_kernel("gemm_planes", sizes, shape.output, norm=norm, writes=writes)

    def fits(self, shape: Shape, blocks: int) -> bool:
        """Tell whether there is such a kernel, and so many blocks of it fit a multiprocessor."""
        if (shape.grouped and self.boxes > 1) or (self.groups > 2 and shape.tokens > 32):
            return False
        return RingSplit.fits(self, shape, blocks)  # dataclasses with slots are made anew: super() knows the old one


def new_planes(rows: int, columns: int, device: torch.device) -> Tensor:
    """Allocate planes of activations [rows, columns]: uint8 [PLANES, rows, columns]."""
    return torch.empty(PLANES, rows, columns, dtype=torch.uint8, device=device)


def are_planes(x: Tensor) -> bool:
    """Tell whether activations are planes."""
    return x.dtype == torch.uint8


def order_number(planes: FormatId | None) -> int:
    """Return the number that stands for planes for such weights; None: no planes."""
    return _ORDERS.index(planes)


def name_order(planes: FormatId | None) -> str:
    """Return the name of planes for such weights in CUDA C++."""
    return (planes or FormatId.BF16).cpp


def name_kernel(kind: str, sizes: Sequence[object], output: Output, *, norm: bool, writes: FormatId | None) -> str:
    """Return the name of a product's kernel in CUDA C++."""
    return f"blink::{kind}<{', '.join(map(str, sizes))}, {output.value}, {str(norm).lower()}, {name_order(writes)}>"


def new_inputs(residual: Tensor, *, planes: FormatId | None) -> Tensor:
    """Allocate what the product behind a residual's norm reads: rows like the residual's, or planes of them."""
    return new_rows(residual, *residual.shape, planes=planes is not None)


def new_rows(like: Tensor, rows: int, columns: int, *, planes: bool) -> Tensor:
    """Allocate activations beside others, or planes of such."""
    return new_planes(rows, columns, like.device) if planes else like.new_empty(rows, columns)


def key(shape: Shape) -> str:
    """Return a product's key in the table of measured splits."""
    return f"planes {gemm_key(shape.output, shape.tokens, shape.n, shape.k)}"


def list_splits(shape: Shape) -> Iterator[PlanesGemmSplit]:
    """Yield the splits that are worth a measurement."""
    few = shape.tokens <= 16
    clusters = (2, 4, 8) if shape.output is Output.ADD else (1, 2, 4)
    found: set[PlanesGemmSplit] = set()
    for groups, cluster, boxes in itertools.product(_list_groups(shape), clusters, (1, 2) if few else (1,)):
        for blocks in range(1, _most_blocks(shape, groups) + 1):
            split = _fill(shape, groups, cluster, boxes, blocks)
            if split is not None and split not in found:
                found.add(split)
                yield split


def choose_split(shape: Shape) -> PlanesGemmSplit | None:
    """Return the split of a product; None if there is none."""
    found = read_table().get(key(shape))
    if found is None:
        return _guess_split(shape)
    split = PlanesGemmSplit(*found)
    return _leave_room_for_groups(shape, split) if shape.grouped else split


def _leave_room_for_groups(shape: Shape, split: PlanesGemmSplit) -> PlanesGemmSplit | None:
    """Return a split measured without groups with fewer stages, for as many blocks of a multiprocessor if they fit."""
    alone = dataclasses.replace(shape, grouped=False)
    for blocks in range(_most_blocks(shape, split.groups), 0, -1):
        found = _fill(shape, split.groups, split.cluster, 1, blocks) if split.fits(alone, blocks) else None
        if found is not None:
            return dataclasses.replace(found, stages=min(found.stages, split.stages * split.boxes))
    return None


@cached
def _guess_split(shape: Shape) -> PlanesGemmSplit | None:
    return guess_split(
        shape,
        reversed(_list_groups(shape)),
        lambda groups: _most_blocks(shape, groups),
        lambda groups, cluster, blocks: _fill(shape, groups, cluster, 1, blocks),
    )


def _list_groups(shape: Shape) -> tuple[int, ...]:
    """Return how many groups may share activations: of 32 tokens, these are as many bytes as the weights of 96 rows."""
    return (1, 2, 4) if shape.tokens == 32 else (1, 2)


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of a multiprocessor the kernel keeps registers."""
    if groups == 4:
        return 1
    return {8: 4 - groups, 64: 3 - groups}.get(shape.tokens, 2)


def _fill(shape: Shape, groups: int, cluster: int, boxes: int, blocks: int) -> PlanesGemmSplit | None:
    """Return the split with as many stages as let so many blocks fit a multiprocessor; None if too few do."""
    return fill_ring(
        shape, _MAX_STAGES // boxes, blocks, lambda stages: PlanesGemmSplit(groups, cluster, boxes, stages)
    )
