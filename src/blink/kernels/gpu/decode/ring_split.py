# SPDX-License-Identifier: Apache-2.0
"""What the splits of products with quantized weights have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from blink.kernels.gpu.decode.splits import REUSE_BYTES, Output, can_share, parts_bytes, shared_bytes_of
from blink.kernels.quantized import Format, PackedWeight


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
    def kernel_name(self, shape: Shape, *, norm: bool, writes: Format | None = None) -> str:
        """Return the name of the kernel; writes: the order of planes that it writes."""

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


def processors() -> int:
    """Return how many multiprocessors there are."""
    return torch.cuda.get_device_properties().multi_processor_count
