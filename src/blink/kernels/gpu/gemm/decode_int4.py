# SPDX-License-Identifier: Apache-2.0
"""How GEMMs of weights of 4 bits with activations in bfloat16 are split: csrc/kernels/gemm/gemm_int4.cuh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from blink.formats.schemes import GROUP, UNIT_BYTES, FormatId
from blink.kernels.gpu.device import cached, count_processors
from blink.kernels.gpu.gemm.decode_hi_lo import name_kernel
from blink.kernels.gpu.gemm.pipeline_config import Int4GemvConfig, Shape, fill_pipeline
from blink.kernels.gpu.gemm.tile_configs import gemm_key, read_table

MAX_ROWS = 128
_MAX_STAGES = 16
_STAGE_K = FormatId.INT4.unit
_STAGE_WORDS_BYTES = _STAGE_K // GROUP * 4  # of a weight row's groups
_GROUPS, _CLUSTERS = (4, 2, 1), (1, 2, 4, 8)
_PERMUTED = 0.95  # of the clusters that all SMs have room for


@dataclass(frozen=True, slots=True)
class Int4GemmConfig(Int4GemvConfig):
    """See csrc/kernels/gemm/gemm_int4.cuh."""

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and a warp each that copies and sums squares."""
        return 128 * self.groups + 64

    def stage_bytes(self, shape: Shape) -> int:
        """Return the size of a stage."""
        return self.tile * UNIT_BYTES + shape.tokens * _STAGE_K * 2

    def pipeline_bytes(self, shape: Shape) -> int:
        """Return the size of the pipeline."""
        return self.stages * self.stage_bytes(shape)

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of Int4GemmShared."""
        return self.gemm_bytes(shape) + 2 * self.tile * _STAGE_WORDS_BYTES

    def kernel_name(self, shape: Shape, *, norm: bool, writes: FormatId | None = None) -> str:
        """Return the name of a kernel of csrc/kernels/gemm/gemm_int4.cuh."""
        sizes = (shape.tokens, self.groups, self.cluster, self.stages)
        return name_kernel("gemm_int4", sizes, shape.output, norm=norm, writes=writes)


def key(shape: Shape) -> str:
    """Return a GEMM's key in the table of measured configs."""
    return f"int4 {gemm_key(shape.output, shape.tokens, shape.n, shape.k)}"


def list_configs(shape: Shape) -> Iterator[Int4GemmConfig]:
    """Yield the configs that are worth a measurement."""
    yield from dict.fromkeys(config for config, _ in _list_options(shape))


def choose_config(shape: Shape) -> Int4GemmConfig | None:
    """Return the tile config of a GEMM; None if there is none."""
    found = read_table().get(key(shape))
    return _guess_config(shape) if found is None else Int4GemmConfig(*found)


@cached
def _guess_config(shape: Shape) -> Int4GemmConfig | None:
    """Return the tile config whose busiest SM copies the least."""
    options = [(_count_bytes(shape, *option), -option[0].groups, option[0]) for option in _list_options(shape)]
    return min(options, key=lambda option: option[:2])[2] if options else None


def _list_options(shape: Shape) -> Iterator[tuple[Int4GemmConfig, int]]:
    """Yield configs, each with how many of its blocks an SM holds."""
    for groups, cluster in itertools.product(_GROUPS, _CLUSTERS):
        for blocks in range(_most_blocks(shape, groups), 0, -1):
            config = _fill(shape, groups, cluster, blocks)
            if config is not None:
                yield config, blocks


def _count_bytes(shape: Shape, config: Int4GemmConfig, blocks: int) -> float:
    """Return what the SM with the most blocks copies, in stages of all of k."""
    processors, tiles = count_processors(), math.ceil(shape.n / config.tile)
    places = _count_places(processors * blocks, config.cluster)
    busiest = math.ceil(tiles * config.cluster / processors) if tiles <= places else math.ceil(tiles / places) * blocks
    return busiest * config.stage_bytes(shape) / config.cluster


def _count_places(blocks: int, cluster: int) -> int:
    """Return how many clusters find their places at once among so many: the resident scheduler keeps one
    SM, and the others of its part of the GPU may be too few for whole clusters."""
    return blocks - 1 if cluster == 1 else max(int(blocks / cluster * _PERMUTED), 1)


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of an SM the kernel keeps registers."""
    if groups == 4:
        return 1
    return (4 if shape.tokens <= 64 else 3) - groups


def _fill(shape: Shape, groups: int, cluster: int, blocks: int) -> Int4GemmConfig | None:
    """Return the tile config with as many stages as let so many blocks fit an SM; None if too few do."""
    return fill_pipeline(shape, _MAX_STAGES, blocks, lambda stages: Int4GemmConfig(groups, cluster, stages))
