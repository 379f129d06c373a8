# SPDX-License-Identifier: Apache-2.0
"""How products of weights of 4 bits with planes of activations are split: csrc/gpu/decode/gemm_planes_int4.cuh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from blink.formats.schemes import GROUP, UNIT_BYTES, FormatId
from blink.kernels.gpu.decode.gemm_planes import PLANES, name_kernel
from blink.kernels.gpu.decode.ring_split import Int4Split, Shape, fill_ring, guess_split
from blink.kernels.gpu.decode.splits import Output, gemm_key, read_table
from blink.kernels.gpu.device import cached

_MAX_STAGES = 16
_STAGE_K = FormatId.INT4.unit
_STAGE_GROUPS = _STAGE_K // GROUP
MAX_ROWS = 32  # of more, operands made in bfloat16 are faster: gemm_int4.py
_GROUPS = (1, 2, 4)  # that may share activations, which are as many bytes as the weights of 4 rows each


@dataclass(frozen=True, slots=True)
class Int4PlanesSplit(Int4Split):
    """See csrc/gpu/decode/gemm_planes_int4.cuh."""

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, two warps that add, and one each that copies and sums squares."""
        return 128 * self.groups + 128

    def ring_bytes(self, shape: Shape) -> int:
        """Return the size of the ring."""
        return self.stages * (self.tile * UNIT_BYTES + PLANES * shape.tokens * _STAGE_K)

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of Int4PlanesShared with the words of groups behind it."""
        own = self.stages * (_STAGE_GROUPS * shape.tokens * 4 + 8)
        words = -(-self.total_stages(shape) // self.cluster) * _STAGE_GROUPS
        pitch = -(-words // 8) * 8 + 4
        return self.gemm_bytes(shape) + -(-own // 1024) * 1024 + self.tile * pitch * 4

    def kernel_name(self, shape: Shape, *, norm: bool, writes: FormatId | None = None) -> str:
        """Return the name of a kernel of csrc/gpu/decode/gemm_planes_int4.cuh; writes: the order of planes."""
        sizes = (shape.tokens, self.groups, self.cluster, self.stages)
        return name_kernel("gemm_planes_int4", sizes, shape.output, norm=norm, writes=writes)


def key(shape: Shape) -> str:
    """Return a product's key in the table of measured splits."""
    return f"planes4 {gemm_key(shape.output, shape.tokens, shape.n, shape.k)}"


def list_splits(shape: Shape) -> Iterator[Int4PlanesSplit]:
    """Yield the splits that are worth a measurement."""
    clusters = (2, 4, 8) if shape.output is Output.ADD else (1, 2, 4)
    found: set[Int4PlanesSplit] = set()
    for groups, cluster in itertools.product(_GROUPS, clusters):
        for blocks in range(1, _most_blocks(shape, groups) + 1):
            split = _fill(shape, groups, cluster, blocks)
            if split is not None and split not in found:
                found.add(split)
                yield split


def choose_split(shape: Shape) -> Int4PlanesSplit | None:
    """Return the split of a product; None if there is none."""
    found = read_table().get(key(shape))
    return _guess_split(shape) if found is None else Int4PlanesSplit(*found)


@cached
def _guess_split(shape: Shape) -> Int4PlanesSplit | None:
    return guess_split(
        shape,
        reversed(_GROUPS),
        lambda groups: _most_blocks(shape, groups),
        lambda groups, cluster, blocks: _fill(shape, groups, cluster, blocks),
    )


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of a multiprocessor the kernel keeps registers."""
    if groups == 4:
        return 1
    return {8: 4 - groups, 16: 2, 32: 3 - groups}[shape.tokens]


def _fill(shape: Shape, groups: int, cluster: int, blocks: int) -> Int4PlanesSplit | None:
    """Return the split with as many stages as let so many blocks fit a multiprocessor; None if too few do."""
    return fill_ring(shape, _MAX_STAGES, blocks, lambda stages: Int4PlanesSplit(groups, cluster, stages))
