# SPDX-License-Identifier: Apache-2.0
"""The GEMMs of decoding for any number of rows, whose rows have the same bits with any other rows.

A kernel computes tiles of tokens, of which each MMA multiplies as many. How k is split among blocks, and in which order
each adds it, is one for all sizes of step: that of the tile config measured for few rows.
"""

from __future__ import annotations

from blink.formats.layouts import Matrix
from blink.formats.schemes import FP8_ROW, UNIT_BYTES, FormatId
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.gemm import decode_hi_lo
from blink.kernels.gpu.gemm.decode_hi_lo import HiLoGemmConfig
from blink.kernels.gpu.gemm.gemm_kernel import GemmKernel
from blink.kernels.gpu.gemm.pipeline_config import Shape
from blink.kernels.gpu.gemm.tile_configs import GemmConfig, Output, choose_gemm_config, refill_gemm
from blink.plan.site import first_reason

HAS_RUN_ON_GPU = False  # until tests/gpu/test_ordered_kernels.py and test_deterministic_gpu.py have passed there
# Tokens that an MMA multiplies; 0: all of a tile. No document says that MMAs of 16 and of 64 tokens add alike.
INSTRUCTION = 16
_CONFIG_ROWS = 16  # whose tile configs all sizes of step have
_TILES = (16, 32, 64, 128)  # tokens
_MOST_PACKED = 64  # with a packed weight


def pad(rows: int, *, packed: bool) -> int:
    """Return so many rows, rounded up to whole tiles; packed: whether one of a step's weights is."""
    tiles = _list_tiles(packed=packed)
    tile = next((tile for tile in tiles if rows <= tile), tiles[-1])
    return -(-rows // tile) * tile


def refuses(matrix: Matrix, output: Output) -> str | None:
    """Say why the kernels do not take a weight, whatever the number of rows; None: they do."""
    reason = first_reason(
        {
            "kernels that have not run on a GPU yet": not HAS_RUN_ON_GPU,
            f"a matrix in {matrix.dtype} as {matrix.layout.value}": matrix.encoding is None
            or (matrix.is_packed and matrix.encoding != FP8_ROW),
            "no Hopper": not has_warpgroups(),
            f"a matrix of {matrix.n} x {matrix.k}": matrix.n % 8 != 0 or matrix.k % 8 != 0,
        }
    )
    if reason:
        return reason
    fit = all(_find_config(matrix, output, tile) for tile in _list_tiles(packed=matrix.is_packed))
    return None if fit else f"a matrix of {matrix.n} x {matrix.k}"


def describe(matrix: Matrix, output: Output, tokens: int) -> str:
    """Return the tiles in words; tokens: rows, rounded up."""
    tile = _find_tile(matrix, tokens)
    config = _find_config(matrix, output, tile)
    assert config is not None
    k = config.boxes * UNIT_BYTES if isinstance(config, HiLoGemmConfig) else config.stage_k
    return f"{config.tile} x {tile} x {k}, cluster of {config.cluster}, {config.stages} stages"


def choose_kernel(output: Output, matrix: Matrix, tokens: int, *, norm: bool, writes: FormatId | None) -> GemmKernel:
    """Return the kernel of a GEMM of so many rows, rounded up; writes: the order of hi/lo FP8 that it writes."""
    tile = _find_tile(matrix, tokens)
    config = _find_config(matrix, output, tile)
    assert config is not None
    instruction = INSTRUCTION or tile
    if isinstance(config, HiLoGemmConfig):
        shape = Shape.of(matrix, output, tile)
        sizes = (instruction, "false", tile, config.groups, config.cluster, config.boxes, config.stages)
        kind, threads, stages = "gemm_hi_lo_in_tiles", config.threads, config.total_stages(shape)
        shared_bytes = config.shared_bytes(shape)
    else:
        sizes = (instruction, tile, config.groups, config.cluster, config.stage_k, config.stages)
        kind, threads, stages = "gemm_in_tiles", config.threads, -(-matrix.k // config.stage_k)
        shared_bytes = config.shared_bytes(output, tile)
    name = decode_hi_lo.name_kernel(kind, sizes, output, norm=norm, writes=writes)
    return GemmKernel(name, config.tile, tile, config.cluster, threads, stages, shared_bytes)


def _list_tiles(*, packed: bool) -> tuple[int, ...]:
    return tuple(tile for tile in _TILES if not packed or tile <= _MOST_PACKED)


def _find_tile(matrix: Matrix, tokens: int) -> int:
    return max(tile for tile in _list_tiles(packed=matrix.is_packed) if tokens % tile == 0)


def _find_config(matrix: Matrix, output: Output, tile: int) -> GemmConfig | HiLoGemmConfig | None:
    """Return the tile config of so many tokens, which adds as that of all others; None: there is none."""
    if not matrix.is_packed:
        config = choose_gemm_config(output, _CONFIG_ROWS, matrix.n, matrix.k)
        return refill_gemm(config, output, _CONFIG_ROWS, tile)
    few = Shape.of(matrix, output, _CONFIG_ROWS)
    config = decode_hi_lo.choose_config(few)
    return None if config is None else decode_hi_lo.refill(config, few, Shape.of(matrix, output, tile))
