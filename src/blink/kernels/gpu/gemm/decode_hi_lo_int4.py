# SPDX-License-Identifier: Apache-2.0
"""How GEMMs of weights of 4 bits with hi/lo FP8 of activations are split: csrc/kernels/gemm/gemm_hi_lo_int4.cuh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from blink.formats.schemes import GROUP, UNIT_BYTES, FormatId
from blink.kernels.gpu.device import cached
from blink.kernels.gpu.gemm.decode_hi_lo import HI_LO, name_kernel
from blink.kernels.gpu.gemm.pipeline_config import Int4GemvConfig, Shape, fill_pipeline, guess_config
from blink.kernels.gpu.gemm.tile_configs import Output, gemm_key, read_table

_MAX_STAGES = 16
_STAGE_K = FormatId.INT4.unit
_STAGE_GROUPS = _STAGE_K // GROUP
MAX_ROWS = 32  # of more, operands made in bfloat16 are faster: gemm_int4.py
_GROUPS = (1, 2, 4)  # that may share activations, which are as many bytes as the weights of 4 rows each


@dataclass(frozen=True, slots=True)
class Int4HiLoConfig(Int4GemvConfig):
    """See csrc/kernels/gemm/gemm_hi_lo_int4.cuh."""

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, two warps that add, and one each that copies and sums squares."""
        return 128 * self.groups + 128

    def pipeline_bytes(self, shape: Shape) -> int:
        """Return the size of the pipeline."""
        return self.stages * (self.tile * UNIT_BYTES + HI_LO * shape.tokens * _STAGE_K)

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of Int4HiLoShared with the words of groups behind it."""
        own = self.stages * (_STAGE_GROUPS * shape.tokens * 4 + 8)
        words = -(-self.total_stages(shape) // self.cluster) * _STAGE_GROUPS
        pitch = -(-words // 8) * 8 + 4
        return self.gemm_bytes(shape) + -(-own // 1024) * 1024 + self.tile * pitch * 4

    def kernel_name(self, shape: Shape, *, norm: bool, writes: FormatId | None = None) -> str:
        """Return the name of a kernel of csrc/kernels/gemm/gemm_hi_lo_int4.cuh; writes: the order of hi_lo."""
        sizes = (shape.tokens, self.groups, self.cluster, self.stages)
        return name_kernel("gemm_hi_lo_int4", sizes, shape.output, norm=norm, writes=writes)


def key(shape: Shape) -> str:
    """Return a GEMM's key in the table of measured configs."""
    return f"hi_lo_int4 {gemm_key(shape.output, shape.tokens, shape.n, shape.k)}"


def list_configs(shape: Shape) -> Iterator[Int4HiLoConfig]:
    """Yield the configs that are worth a measurement."""
    clusters = (2, 4, 8) if shape.output is Output.ADD else (1, 2, 4)
    found: set[Int4HiLoConfig] = set()
    for groups, cluster in itertools.product(_GROUPS, clusters):
        for blocks in range(1, _most_blocks(shape, groups) + 1):
            config = _fill(shape, groups, cluster, blocks)
            if config is not None and config not in found:
                found.add(config)
                yield config


def choose_config(shape: Shape) -> Int4HiLoConfig | None:
    """Return the tile config of a GEMM; None if there is none."""
    found = read_table().get(key(shape))
    return _guess_config(shape) if found is None else Int4HiLoConfig(*found)


@cached
def _guess_config(shape: Shape) -> Int4HiLoConfig | None:
    return guess_config(
        shape,
        reversed(_GROUPS),
        lambda groups: _most_blocks(shape, groups),
        lambda groups, cluster, blocks: _fill(shape, groups, cluster, blocks),
    )


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of an SM the kernel keeps registers."""
    if groups == 4:
        return 1
    return {8: 4 - groups, 16: 2, 32: 3 - groups}[shape.tokens]


def _fill(shape: Shape, groups: int, cluster: int, blocks: int) -> Int4HiLoConfig | None:
    """Return the tile config with as many stages as let so many blocks fit an SM; None if too few do."""
    return fill_pipeline(shape, _MAX_STAGES, blocks, lambda stages: Int4HiLoConfig(groups, cluster, stages))
