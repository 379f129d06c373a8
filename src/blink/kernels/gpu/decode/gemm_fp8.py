# SPDX-License-Identifier: Apache-2.0
"""How products of up to 32 rows with FP8 weights are split: csrc/gpu/decode/gemm_fp8.cuh."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from blink.kernels.gpu.decode.gemm_quantized import RingSplit, Shape, choose_cluster, is_wide, processors
from blink.kernels.gpu.decode.splits import gemm_key, read_table
from blink.kernels.quantized import UNIT_BYTES, Format

MAX_ROWS = 32
_MAX_STAGES = 24
_CONVERTERS = 4  # warps


@dataclass(frozen=True, slots=True)
class Fp8GemmSplit(RingSplit):
    """See csrc/gpu/decode/gemm_fp8.cuh."""

    groups: int  # of 64 weight rows
    cluster: int  # blocks that share k
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, those that convert, and a warp each that copies and sums squares."""
        return 128 * self.groups + 32 * _CONVERTERS + 64

    def total_stages(self, shape: Shape) -> int:
        """Return the stages of all of k."""
        return shape.k // UNIT_BYTES

    def ring_bytes(self, shape: Shape) -> int:
        """Return the size of the ring."""
        return self.stages * (self.tile * UNIT_BYTES + shape.tokens * Format.FP8.unit * 2)

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of Fp8GemmShared with the scales of groups behind it."""
        factors = _round_up(self.stages * 8, 16) + self.stages * shape.tokens * 4
        words = -(-self.total_stages(shape) // self.cluster) * (self.tile + 1) if shape.grouped else 0
        return self.gemm_bytes(shape) + _round_up(factors, 1024) + words * 4

    def kernel_name(self, shape: Shape, *, norm: bool) -> str:
        """Return the name of a kernel of csrc/gpu/decode/gemm_fp8.cuh."""
        sizes = (shape.tokens, self.groups, self.cluster, self.stages)
        flags = f"{shape.output.value}, {str(norm).lower()}"
        return f"blink::gemm_fp8<{str(shape.grouped).lower()}, {', '.join(map(str, sizes))}, {flags}>"


def key(shape: Shape) -> str:
    """Return a product's key in the table of measured splits."""
    return f"fp8 {gemm_key(shape.output, shape.tokens, shape.n, shape.k)}"


def choose_split(shape: Shape) -> Fp8GemmSplit | None:
    """Return the split of a product; None if there is none."""
    found = read_table().get(key(shape))
    if found is None:
        return _guess_split(shape)
    split = Fp8GemmSplit(*found)
    return _leave_room_for_groups(shape, split) if shape.grouped else split


def _leave_room_for_groups(shape: Shape, split: Fp8GemmSplit) -> Fp8GemmSplit | None:
    """Return a split measured without groups with fewer stages, for as many blocks of a multiprocessor if they fit."""
    alone = dataclasses.replace(shape, grouped=False)
    for blocks in range(_most_blocks(shape, split.groups), 0, -1):
        found = _fill(shape, split.groups, split.cluster, blocks) if split.fits(alone, blocks) else None
        if found is not None:
            return dataclasses.replace(found, stages=min(found.stages, split.stages))
    return None


@functools.cache
def _guess_split(shape: Shape) -> Fp8GemmSplit | None:
    # Each block converts its activations: of many rows, two groups had better share them.
    for groups in (2, 1) if shape.tokens >= 32 or (shape.tokens == 16 and is_wide(shape)) else (1, 2):
        cluster = choose_cluster(shape, groups)
        each = shape.n / (64 * groups) * cluster / processors()
        for blocks in range(min(math.ceil(each), _most_blocks(shape, groups)), 0, -1):
            split = _fill(shape, groups, cluster, blocks)
            if split is not None and split.stages >= min(3, split.total_stages(shape)):
                return split
    return None


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of a multiprocessor the kernel keeps registers."""
    return 4 - groups if shape.tokens == 8 else 2


def _fill(shape: Shape, groups: int, cluster: int, blocks: int) -> Fp8GemmSplit | None:
    """Return the split with as many stages as let so many blocks fit a multiprocessor; None if too few do."""
    for stages in range(_MAX_STAGES, 1, -1):
        split = Fp8GemmSplit(groups, cluster, stages)
        if split.fits(shape, blocks):
            return split
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
