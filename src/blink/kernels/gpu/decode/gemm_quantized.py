# SPDX-License-Identifier: Apache-2.0
"""How products of up to 64 rows with weights of 4 bits are split: csrc/gpu/decode/gemm_quantized.cuh."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from blink.kernels.gpu.decode.splits import REUSE_BYTES, Output, can_share, parts_bytes, shared_bytes_of
from blink.kernels.quantized import GROUP, Format, PackedWeight

MAX_ROWS = 64
_MAX_STAGES = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """What sets a product apart."""

    format: Format
    grouped: bool
    output: Output
    tokens: int  # rows, rounded up
    k: int
    n: int  # weight rows

    @classmethod
    def of(cls, weight: PackedWeight, output: Output, tokens: int) -> Shape:
        """Describe the product of so many rows, rounded up, with a weight."""
        n, k = weight.shape
        return cls(weight.format, weight.groups is not None, output, tokens, k, n)


class RingSplit(ABC):
    """How a product with quantised weights, which come through a ring of stages, is split among blocks."""

    __slots__ = ()
    groups: int  # of 64 weight rows
    cluster: int  # blocks that share k
    stages: int

    @property
    def tile(self) -> int:
        """Weight rows of a block."""
        return 64 * self.groups

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a block."""

    @abstractmethod
    def total_stages(self, shape: Shape) -> int:
        """Return the stages of all of k."""

    @abstractmethod
    def ring_bytes(self, shape: Shape) -> int:
        """Return the size of the ring."""

    @abstractmethod
    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of what a block has in shared memory."""

    @abstractmethod
    def kernel_name(self, shape: Shape, *, norm: bool) -> str:
        """Return the name of the kernel."""

    def fits(self, shape: Shape, blocks: int) -> bool:
        """Tell whether there is such a kernel, and so many blocks of it fit a multiprocessor."""
        if not can_share(shape.output, self.tile, self.cluster) or self.stages < 2:
            return False
        parts = parts_bytes(shape.tokens, self.tile)
        if parts > REUSE_BYTES and self.ring_bytes(shape) < parts:
            return False
        return self.shared_bytes(shape) <= shared_bytes_of(blocks)

    def gemm_bytes(self, shape: Shape) -> int:
        """Return the size of csrc/gpu/decode/gemm.cuh's GemmShared."""
        parts = parts_bytes(shape.tokens, self.tile)
        own = 16 if parts > REUSE_BYTES else parts
        size = self.ring_bytes(shape) + own + self.cluster * shape.tokens * 4 + self.stages * 16 + 8
        return -(-size // 1024) * 1024


@dataclass(frozen=True, slots=True)
class QuantizedGemmSplit(RingSplit):
    """See csrc/gpu/decode/gemm_quantized.cuh."""

    groups: int  # of 64 weight rows
    cluster: int  # blocks that share k
    boxes: int  # of weights, in a stage
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and a warp each that copies, converts and sums squares."""
        return 128 * self.groups + 96

    def total_stages(self, shape: Shape) -> int:
        """Return the stages of all of k."""
        return -(-shape.k // (self.boxes * Format.INT4.unit))

    def ring_bytes(self, shape: Shape) -> int:
        """Return the size of the ring."""
        return self.stages * self.boxes * (self.tile * 128 + shape.tokens * Format.INT4.unit * 2)

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of QuantizedGemmShared with the words of groups behind it."""
        words = -(-self.total_stages(shape) // self.cluster) * self.boxes * (Format.INT4.unit // GROUP)
        return self.gemm_bytes(shape) + 1024 + words * (self.tile + 1) * 4

    def kernel_name(self, shape: Shape, *, norm: bool) -> str:
        """Return the name of a kernel of csrc/gpu/decode/gemm_quantized.cuh."""
        sizes = (shape.tokens, self.groups, self.cluster, self.boxes, self.stages)
        return f"blink::gemm_quantized<{', '.join(map(str, sizes))}, {shape.output.value}, {str(norm).lower()}>"


@functools.cache
def choose_split(shape: Shape) -> QuantizedGemmSplit | None:
    """Return the split of a product; None if there is none."""
    # Activations of many rows are as many bytes as weights: two groups then share them.
    shares = shape.tokens == 64 or (shape.tokens == 32 and is_wide(shape))
    for groups in (2, 1) if shares else (1,):
        cluster = choose_cluster(shape, groups)
        each = shape.n / (64 * groups) * cluster / processors()
        most = min(math.ceil(each), _most_blocks(shape, groups))
        for blocks in range(most, 0, -1):
            for stages in range(_MAX_STAGES, 2, -1):
                split = QuantizedGemmSplit(groups, cluster, 1, stages)
                if split.fits(shape, blocks):
                    return split
    return None


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of a multiprocessor the kernel keeps registers."""
    return (4 if shape.tokens < 32 else 3) - groups


def choose_cluster(shape: Shape, groups: int) -> int:
    """Return the number of blocks that leaves the least idle of the multiprocessors; 1 where there are many tiles."""
    if shape.output is not Output.ADD and is_wide(shape):
        return 1

    def idle(cluster: int) -> float:
        each = shape.n / (64 * groups) * cluster / processors()
        return math.ceil(each) / each

    # Of ADD the larger first: more warps of a multiprocessor then convert weights.
    options = (4, 2) if shape.output is Output.ADD else (1, 2, 4)
    shared = [cluster for cluster in options if can_share(shape.output, 64 * groups, cluster)]
    return min(shared, key=lambda cluster: round(idle(cluster), 1))


def is_wide(shape: Shape) -> bool:
    """Tell whether tiles of 64 weight rows are more than three for each multiprocessor."""
    return shape.n / 64 / processors() > 3


def processors() -> int:
    """Return how many multiprocessors there are."""
    return torch.cuda.get_device_properties().multi_processor_count
