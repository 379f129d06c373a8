# SPDX-License-Identifier: Apache-2.0
"""How products of weights of 4 bits with activations in bfloat16 are split: csrc/gpu/decode/gemm_int4.cuh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from blink.formats.schemes import GROUP, UNIT_BYTES, FormatId
from blink.kernels.gpu.decode.gemm_planes import name_kernel
from blink.kernels.gpu.decode.ring_split import Int4Split, Shape, fill_ring
from blink.kernels.gpu.decode.splits import gemm_key, read_table
from blink.kernels.gpu.device import cached, count_processors

MAX_ROWS = 128
_MAX_STAGES = 16
_STAGE_K = FormatId.INT4.unit
_STAGE_WORDS_BYTES = _STAGE_K // GROUP * 4  # of a weight row's groups
_GROUPS, _CLUSTERS = (4, 2, 1), (1, 2, 4, 8)
_PLACED = 0.95  # of the clusters that all multiprocessors have room for


@dataclass(frozen=True, slots=True)
class Int4GemmSplit(Int4Split):
    """See csrc/gpu/decode/gemm_int4.cuh."""

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and a warp each that copies and sums squares."""
        return 128 * self.groups + 64

    def stage_bytes(self, shape: Shape) -> int:
        """Return the size of a stage."""
        return self.tile * UNIT_BYTES + shape.tokens * _STAGE_K * 2

    def ring_bytes(self, shape: Shape) -> int:
        """Return the size of the ring."""
        return self.stages * self.stage_bytes(shape)

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of Int4GemmShared."""
        return self.gemm_bytes(shape) + 2 * self.tile * _STAGE_WORDS_BYTES

    def kernel_name(self, shape: Shape, *, norm: bool, writes: FormatId | None = None) -> str:
        """Return the name of a kernel of csrc/gpu/decode/gemm_int4.cuh."""
        sizes = (shape.tokens, self.groups, self.cluster, self.stages)
        return name_kernel("gemm_int4", sizes, shape.output, norm=norm, writes=writes)


def key(shape: Shape) -> str:
    """Return a product's key in the table of measured splits."""
    return f"int4 {gemm_key(shape.output, shape.tokens, shape.n, shape.k)}"


def list_splits(shape: Shape) -> Iterator[Int4GemmSplit]:
    """Yield the splits that are worth a measurement."""
    yield from dict.fromkeys(split for split, _ in _list_options(shape))


def choose_split(shape: Shape) -> Int4GemmSplit | None:
    """Return the split of a product; None if there is none."""
    found = read_table().get(key(shape))
    return _guess_split(shape) if found is None else Int4GemmSplit(*found)


@cached
def _guess_split(shape: Shape) -> Int4GemmSplit | None:
    """Return the split whose busiest multiprocessor copies the least."""
    options = [(_count_bytes(shape, *option), -option[0].groups, option[0]) for option in _list_options(shape)]
    return min(options, key=lambda option: option[:2])[2] if options else None


def _list_options(shape: Shape) -> Iterator[tuple[Int4GemmSplit, int]]:
    """Yield splits, each with how many of its blocks a multiprocessor holds."""
    for groups, cluster in itertools.product(_GROUPS, _CLUSTERS):
        for blocks in range(_most_blocks(shape, groups), 0, -1):
            split = _fill(shape, groups, cluster, blocks)
            if split is not None:
                yield split, blocks


def _count_bytes(shape: Shape, split: Int4GemmSplit, blocks: int) -> float:
    """Return what the multiprocessor with the most blocks copies, in stages of all of k."""
    processors, tiles = count_processors(), math.ceil(shape.n / split.tile)
    places = _count_places(processors * blocks, split.cluster)
    busiest = math.ceil(tiles * split.cluster / processors) if tiles <= places else math.ceil(tiles / places) * blocks
    return busiest * split.stage_bytes(shape) / split.cluster


def _count_places(blocks: int, cluster: int) -> int:
    """Return how many clusters find their places at once among so many: the resident scheduler keeps one
    multiprocessor, and the others of its part of the GPU may be too few for whole clusters."""
    return blocks - 1 if cluster == 1 else max(int(blocks / cluster * _PLACED), 1)


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of a multiprocessor the kernel keeps registers."""
    if groups == 4:
        return 1
    return (4 if shape.tokens <= 64 else 3) - groups


def _fill(shape: Shape, groups: int, cluster: int, blocks: int) -> Int4GemmSplit | None:
    """Return the split with as many stages as let so many blocks fit a multiprocessor; None if too few do."""
    return fill_ring(shape, _MAX_STAGES, blocks, lambda stages: Int4GemmSplit(groups, cluster, stages))
