# SPDX-License-Identifier: Apache-2.0
"""Activations in hi/lo FP8, and how GEMMs of FP8 weights with them are split: csrc/kernels/gemm/gemm_hi_lo.cuh.

HiLo lie in the order of the weights that they are made for: FormatId says which.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.schemes import UNIT_BYTES, FormatId
from blink.kernels.gpu.device import cached
from blink.kernels.gpu.gemm.pipeline_config import PipelineConfig, Shape, fill_pipeline, guess_config
from blink.kernels.gpu.gemm.tile_configs import Output, gemm_key, read_table, shared_bytes_of

HI_LO = 2  # csrc/kernels/common/hi_lo.cuh's kHiLo
MAX_ROWS = 64
_MAX_STAGES = 24
_ORDERS = (None, FormatId.FP8, FormatId.INT4)  # by the numbers of csrc/kernels/formats.h: without hi/lo FP8 kBf16


@dataclass(frozen=True, slots=True)
class HiLoGemmConfig(PipelineConfig):
    """See csrc/kernels/gemm/gemm_hi_lo.cuh."""

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

    def pipeline_bytes(self, shape: Shape) -> int:
        """Return the size of the pipeline."""
        return self.stages * self.boxes * (self.tile + HI_LO * shape.tokens) * UNIT_BYTES

    def shared_bytes(self, shape: Shape) -> int:
        """Return the size of HiLoGemmShared with the scales of groups behind it."""
        words = -(-self.total_stages(shape) // self.cluster) * (self.tile + 1) if shape.grouped else 0
        return self.gemm_bytes(shape) + words * 4

    def kernel_name(self, shape: Shape, *, norm: bool, writes: FormatId | None = None) -> str:
        """Return the name of a kernel of csrc/kernels/gemm/gemm_hi_lo.cuh; writes: the order of hi/lo FP8 it writes."""
        sizes = (str(shape.grouped).lower(), shape.tokens, self.groups, self.cluster, self.boxes, self.stages)
        return name_kernel("gemm_hi_lo", sizes, shape.output, norm=norm, writes=writes)

    def fits(self, shape: Shape, blocks: int) -> bool:
        """Tell whether there is such a kernel, and so many blocks of it fit an SM."""
        if (shape.grouped and self.boxes > 1) or (self.groups > 2 and shape.tokens > 32):
            return False
        return PipelineConfig.fits(
            self, shape, blocks
        )  # dataclasses with slots are made anew: super() knows the old one


def new_hi_lo(rows: int, columns: int, device: torch.device) -> Tensor:
    """Allocate hi/lo FP8 of activations [rows, columns]: uint8 [HI_LO, rows, columns]."""
    return torch.empty(HI_LO, rows, columns, dtype=torch.uint8, device=device)


def are_hi_lo(x: Tensor) -> bool:
    """Tell whether activations are hi_lo."""
    return x.dtype == torch.uint8


def order_number(hi_lo: FormatId | None) -> int:
    """Return the number that stands for hi/lo FP8 for such weights; None: bfloat16."""
    return _ORDERS.index(hi_lo)


def name_order(hi_lo: FormatId | None) -> str:
    """Return the name of hi/lo FP8 for such weights in CUDA C++."""
    return (hi_lo or FormatId.BF16).cpp


def name_kernel(kind: str, sizes: Sequence[object], output: Output, *, norm: bool, writes: FormatId | None) -> str:
    """Return the name of a GEMM's kernel in CUDA C++."""
    return f"blink::{kind}<{', '.join(map(str, sizes))}, {output.value}, {str(norm).lower()}, {name_order(writes)}>"


def new_inputs(residual: Tensor, *, hi_lo: FormatId | None) -> Tensor:
    """Allocate what the GEMM behind a residual's norm reads: rows like the residual's, or hi/lo FP8 of them."""
    return new_rows(residual, *residual.shape, hi_lo=hi_lo is not None)


def new_rows(like: Tensor, rows: int, columns: int, *, hi_lo: bool) -> Tensor:
    """Allocate activations beside others, or hi/lo FP8 of them."""
    return new_hi_lo(rows, columns, like.device) if hi_lo else like.new_empty(rows, columns)


def key(shape: Shape) -> str:
    """Return a GEMM's key in the table of measured configs."""
    return f"hi_lo {gemm_key(shape.output, shape.tokens, shape.n, shape.k)}"


def list_configs(shape: Shape) -> Iterator[HiLoGemmConfig]:
    """Yield the configs that are worth a measurement."""
    few = shape.tokens <= 16
    clusters = (2, 4, 8) if shape.output is Output.ADD else (1, 2, 4)
    found: set[HiLoGemmConfig] = set()
    for groups, cluster, boxes in itertools.product(_list_groups(shape), clusters, (1, 2) if few else (1,)):
        for blocks in range(1, _most_blocks(shape, groups) + 1):
            config = _fill(shape, groups, cluster, boxes, blocks)
            if config is not None and config not in found:
                found.add(config)
                yield config


def choose_config(shape: Shape) -> HiLoGemmConfig | None:
    """Return the tile config of a GEMM; None if there is none."""
    found = read_table().get(key(shape))
    if found is None:
        return _guess_config(shape)
    config = HiLoGemmConfig(*found)
    return _leave_room_for_groups(shape, config) if shape.grouped else config


def _leave_room_for_groups(shape: Shape, config: HiLoGemmConfig) -> HiLoGemmConfig | None:
    """Return a tile config measured without groups with fewer stages, for as many blocks of an SM if they fit."""
    alone = dataclasses.replace(shape, grouped=False)
    for blocks in range(_most_blocks(shape, config.groups), 0, -1):
        found = _fill(shape, config.groups, config.cluster, 1, blocks) if config.fits(alone, blocks) else None
        if found is not None:
            return dataclasses.replace(found, stages=min(found.stages, config.stages * config.boxes))
    return None


@cached
def _guess_config(shape: Shape) -> HiLoGemmConfig | None:
    return guess_config(
        shape,
        reversed(_list_groups(shape)),
        lambda groups: _most_blocks(shape, groups),
        lambda groups, cluster, blocks: _fill(shape, groups, cluster, 1, blocks),
    )


def refill(config: HiLoGemmConfig, of: Shape, shape: Shape) -> HiLoGemmConfig | None:
    """Return a GEMM's tile config for other tokens, with other stages; None: there is none.

    An SM holds as many blocks, if they fit.
    """
    if shape == of:
        return config
    most = min(_most_blocks(shape, config.groups), shared_bytes_of(1) // config.shared_bytes(of))
    options = (_fill(shape, config.groups, config.cluster, config.boxes, each) for each in range(most, 0, -1))
    return next((found for found in options if found is not None), None)


def _list_groups(shape: Shape) -> tuple[int, ...]:
    """Return how many groups may share activations: of 32 tokens, these are as many bytes as the weights of 96 rows."""
    return (1, 2, 4) if shape.tokens == 32 else (1, 2)


def _most_blocks(shape: Shape, groups: int) -> int:
    """Return for how many blocks of an SM the kernel keeps registers."""
    if groups == 4:
        return 1
    return {8: 4 - groups, 64: 3 - groups}.get(shape.tokens, 2)


def _fill(shape: Shape, groups: int, cluster: int, boxes: int, blocks: int) -> HiLoGemmConfig | None:
    """Return the tile config with as many stages as let so many blocks fit an SM; None if too few do."""
    return fill_pipeline(
        shape, _MAX_STAGES // boxes, blocks, lambda stages: HiLoGemmConfig(groups, cluster, boxes, stages)
    )
