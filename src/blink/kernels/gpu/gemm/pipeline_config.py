# SPDX-License-Identifier: Apache-2.0
"""What the configs of GEMMs with quantized weights have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from blink.formats.layouts import Matrix
from blink.formats.schemes import FormatId
from blink.kernels.gpu.device import count_processors
from blink.kernels.gpu.gemm.tile_configs import REUSE_BYTES, Output, can_share, parts_bytes, shared_bytes_of


@dataclass(frozen=True, slots=True)
class Shape:
    """What sets a GEMM apart."""

    format: FormatId
    grouped: bool
    output: Output
    tokens: int  # rows, rounded up
    k: int
    n: int  # weight rows

    @classmethod
    def of(cls, matrix: Matrix, output: Output, tokens: int) -> Shape:
        """Describe the GEMM of so many rows, rounded up, with a packed weight."""
        assert matrix.encoding is not None
        return cls(matrix.encoding.format, matrix.encoding.grouped, output, tokens, matrix.k, matrix.n)


class PipelineConfig(ABC):
    """How a GEMM with quantised weights, which come through a pipeline of stages, is split among blocks."""

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
    def pipeline_bytes(self, shape: Shape) -> int:
        """Return the size of the pipeline."""

    @abstractmethod
    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of what a block has in shared memory."""

    @abstractmethod
    def kernel_name(self, shape: Shape, *, norm: bool, writes: FormatId | None = None) -> str:
        """Return the name of the kernel; writes: the order of hi/lo FP8 that it writes."""

    def fits(self, shape: Shape, blocks: int) -> bool:
        """Tell whether there is such a kernel, and so many blocks of it fit an SM."""
        if not can_share(shape.output, self.tile, self.cluster) or self.stages < 2:
            return False
        parts = parts_bytes(shape.tokens, self.tile)
        if parts > REUSE_BYTES and self.pipeline_bytes(shape) < parts:
            return False
        return self.shared_bytes(shape) <= shared_bytes_of(blocks)

    def gemm_bytes(self, shape: Shape) -> int:
        """Return the size of csrc/kernels/gemm/gemm.cuh's GemmShared."""
        parts = parts_bytes(shape.tokens, self.tile)
        own = 16 if parts > REUSE_BYTES else parts
        size = self.pipeline_bytes(shape) + own + self.cluster * shape.tokens * 4 + self.stages * 16 + 8
        return -(-size // 1024) * 1024


@dataclass(frozen=True, slots=True)
class Int4GemvConfig(PipelineConfig):
    """How a GEMM with weights of 4 bits is split: a stage of the pipeline is one unit of each weight row."""

    groups: int
    cluster: int
    stages: int

    def total_stages(self, shape: Shape) -> int:
        """Return the stages of all of k."""
        return shape.k // FormatId.INT4.unit


TileConfig = TypeVar("TileConfig", bound=PipelineConfig)


def fill_pipeline(shape: Shape, most_stages: int, blocks: int, make: Callable[[int], TileConfig]) -> TileConfig | None:
    """Return the tile config with as many stages as let so many blocks fit an SM; None if too few do."""
    for stages in range(most_stages, 1, -1):
        config = make(stages)
        if config.fits(shape, blocks):
            return config
    return None


def guess_config(
    shape: Shape,
    groups_in_order: Iterable[int],
    most_blocks: Callable[[int], int],
    fill: Callable[[int, int, int], TileConfig | None],
) -> TileConfig | None:
    """Return the tile config of a GEMM that nobody measured; None if there is none.

    most_blocks: of an SM, by groups; fill: returns a tile config by groups, cluster and blocks.
    """
    for groups in groups_in_order:
        cluster = _choose_cluster(shape, groups)
        each = shape.n / (64 * groups) * cluster / count_processors()
        for blocks in range(min(math.ceil(each), most_blocks(groups)), 0, -1):
            config = fill(groups, cluster, blocks)
            if config is not None and config.stages >= min(3, config.total_stages(shape)):
                return config
    return None


def _choose_cluster(shape: Shape, groups: int) -> int:
    """Return the number of blocks that leaves the least idle of the SMs; 1 where tiles are enough."""
    tiles = shape.n / (64 * groups) / count_processors()
    if shape.output is not Output.ADD and tiles > 0.8:
        return 1
    options = (2, 4, 8) if shape.output is Output.ADD else (1, 2, 4)
    return min(options, key=lambda cluster: round(math.ceil(tiles * cluster) / (tiles * cluster), 1))
