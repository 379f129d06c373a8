# SPDX-License-Identifier: Apache-2.0
"""The GEMMs of decoding for any number of rows, whose rows have the same bits with any other rows.

A kernel computes tiles of tokens, of which each MMA multiplies as many. How k is split among blocks, and in which order
each adds it, is one for all sizes of step: that of the tile config measured for few rows.
"""

from __future__ import annotations

from typing import NamedTuple

from blink.formats.layouts import Matrix
from blink.formats.schemes import FP8_ROW, UNIT_BYTES, FormatId
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.gemm import decode_hi_lo
from blink.kernels.gpu.gemm.gemm_kernel import GemmKernel
from blink.kernels.gpu.gemm.pipeline_config import Shape
from blink.kernels.gpu.gemm.tile_configs import Output, choose_gemm_config, refill_gemm
from blink.plan.site import first_reason

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
            f"a matrix in {matrix.dtype} as {matrix.layout.value}": matrix.encoding is None
            or (matrix.is_packed and matrix.encoding != FP8_ROW),
            "no Hopper": not has_warpgroups(),
            f"a matrix of {matrix.n} x {matrix.k}": matrix.n % 8 != 0 or matrix.k % 8 != 0,
        }
    )
    if reason:
        return reason
    fit = all(_find_split(matrix, output, tile) for tile in _list_tiles(packed=matrix.is_packed))
    return None if fit else f"a matrix of {matrix.n} x {matrix.k}"


def describe(matrix: Matrix, output: Output, tokens: int) -> str:
    """Return the tiles in words; tokens: rows, rounded up."""
    tile = _find_tile(matrix, tokens)
    found = _find_split(matrix, output, tile)
    assert found is not None
    return f"{found.rows} x {tile} x {found.stage_k}, cluster of {found.cluster}, {found.stages} stages"


def choose_kernel(output: Output, matrix: Matrix, tokens: int, *, norm: bool, writes: FormatId | None) -> GemmKernel:
    """Return the kernel of a GEMM of so many rows, rounded up; writes: the order of hi/lo FP8 that it writes."""
    tile = _find_tile(matrix, tokens)
    found = _find_split(matrix, output, tile)
    assert found is not None
    sizes = (INSTRUCTION or tile, *found.sizes)
    name = decode_hi_lo.name_kernel(found.kind, sizes, output, norm=norm, writes=writes)
    total = -(-matrix.k // found.stage_k)
    return GemmKernel(name, found.rows, tile, found.cluster, found.threads, total, found.shared_bytes)


class _Split(NamedTuple):
    """A tile config for so many tokens, which adds as that of all others."""

    kind: str
    sizes: tuple[object, ...]  # in the kernel's name, behind INSTRUCTION
    rows: int  # of the weight, of a block
    cluster: int
    stage_k: int
    stages: int  # in shared memory
    threads: int
    shared_bytes: int


def _list_tiles(*, packed: bool) -> tuple[int, ...]:
    return tuple(tile for tile in _TILES if not packed or tile <= _MOST_PACKED)


def _find_tile(matrix: Matrix, tokens: int) -> int:
    return max(tile for tile in _list_tiles(packed=matrix.is_packed) if tokens % tile == 0)


def _find_split(matrix: Matrix, output: Output, tile: int) -> _Split | None:
    return _split_packed(matrix, output, tile) if matrix.is_packed else _split_plain(matrix, output, tile)


def _split_plain(matrix: Matrix, output: Output, tile: int) -> _Split | None:
    few = choose_gemm_config(output, _CONFIG_ROWS, matrix.n, matrix.k)
    found = refill_gemm(few, output, _CONFIG_ROWS, tile)
    if found is None:
        return None
    sizes = (tile, found.groups, found.cluster, found.stage_k, found.stages)
    rest = found.tile, found.cluster, found.stage_k, found.stages, found.threads, found.shared_bytes(output, tile)
    return _Split("gemm_in_tiles", sizes, *rest)


def _split_packed(matrix: Matrix, output: Output, tile: int) -> _Split | None:
    few, shape = (Shape.of(matrix, output, tokens) for tokens in (_CONFIG_ROWS, tile))
    config = decode_hi_lo.choose_config(few)
    found = None if config is None else decode_hi_lo.refill(config, few, shape)
    if found is None:
        return None
    sizes = ("false", tile, found.groups, found.cluster, found.boxes, found.stages)  # without scales of groups
    stage_k = found.boxes * UNIT_BYTES
    rest = found.tile, found.cluster, stage_k, found.stages, found.threads, found.shared_bytes(shape)
    return _Split("gemm_hi_lo_in_tiles", sizes, *rest)
