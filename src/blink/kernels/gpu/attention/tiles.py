# SPDX-License-Identifier: Apache-2.0
"""The tiles of paged attention, by a step's size and the size of heads."""

from __future__ import annotations

import dataclasses

import torch
import triton

from blink.kernels.gpu.attention.work import Tile

# Pairs of query and query head, up to which larger tiles are too few to keep a GPU busy.
_SHORT_PAIRS = 32768
_MOST_STAGES = 3
_SMALL_HEAD_DIM = 128
_USUAL_HEAD_DIM = 256
_SPARE_BYTES = 16 << 10  # of shared memory, beside a tile's queries, keys and values


def choose_tiles(dtype: torch.dtype, group: int, num_pairs: int, head_dim: int) -> tuple[Tile, Tile]:
    """Return the tiles of decode rows and of longer rows, as benchmarks/kernels/attention.py found them on an H200.

    group: query heads per KV head; num_pairs: pairs of query and query head in the step.
    """
    heads = triton.next_power_of_2(group)
    if head_dim > _USUAL_HEAD_DIM:
        return _choose_large(dtype, heads)
    narrow = Tile(max(16, heads), 32, heads, 64, 264, 4, _MOST_STAGES)
    if dtype == torch.float32:
        return narrow, Tile(max(32, heads), 32, 16, 256, 264, 4, _MOST_STAGES)
    if num_pairs <= _SHORT_PAIRS:
        return narrow, Tile(max(64, heads), 64, 16, 512, 264, 4, _MOST_STAGES)
    if head_dim > _SMALL_HEAD_DIM:  # whose sums would fill the registers of 4 warps
        return narrow, Tile(max(128, heads), 64, 16, 256, 264, 8, 2)
    return narrow, Tile(max(128, heads), 32, 16, 256, 264, 4, _MOST_STAGES)


def _choose_large(dtype: torch.dtype, heads: int) -> tuple[Tile, Tile]:
    """Return the tiles of heads of up to 512, of which an SM has room for one: as many programs as it has SMs.

    Their partial results are long, so a kernel of many programs adds them up. No GPU has timed these tiles yet.
    """
    if dtype == torch.float32:
        tile = Tile(max(16, heads), 16, 1, 64, 128, 4, 1, combines=False)
        return tile, dataclasses.replace(tile, min_chunk=256, combined_pairs=4)
    narrow = Tile(max(16, heads), 32, 1, 64, 128, 4, _MOST_STAGES, combines=False)
    return narrow, Tile(max(64, heads), 32, 4, 256, 128, 8, 2, combines=False)


def fit_stages(tile: Tile, row_bytes: int, shared_memory: int, group: int = 1) -> Tile:
    """Return the tile with as many stages, of those that it asks for, as fit; if none does, with fewer pairs.

    row_bytes: of a head's query, key or value; shared_memory: bytes of an SM; group: query heads per KV head.
    """
    left = shared_memory - _SPARE_BYTES - tile.block_m * row_bytes
    stages = left // (2 * tile.block_n * row_bytes)
    fewer = tile.block_m // 2
    if stages < 1 and fewer >= max(16, group):
        return fit_stages(dataclasses.replace(tile, block_m=fewer), row_bytes, shared_memory, group)
    return dataclasses.replace(tile, num_stages=max(1, min(tile.num_stages, stages)))
