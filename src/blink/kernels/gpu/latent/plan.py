# SPDX-License-Identifier: Apache-2.0
"""The work of one step's latent attention, planned on the GPU once per step, with the tiles of each size of step."""

from __future__ import annotations

import torch
import triton

from blink.formats.base import name_dtype
from blink.kernels.batch import Batch
from blink.kernels.gpu.attention.plan import GpuAttentionPlan, plan_span
from blink.kernels.gpu.attention.tiles import fit_stages
from blink.kernels.gpu.attention.work import ItemHeads, Tile
from blink.kernels.gpu.device import shared_bytes
from blink.kernels.gpu.latent import hopper
from blink.kernels.gpu.latent.sizes import count_heads
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LatentSizes
from blink.plan.site import Bucket

_STAGES = 3
_FLOAT32_KEYS = 16


def plan_latent_attention(
    batch: Batch, num_tokens: int, num_rows: int, sizes: LatentSizes, cache: LayerCache, dtype: torch.dtype
) -> GpuAttentionPlan:
    """Plan the attention of a bucket, as kernels/latent.py has it."""
    group = count_heads(sizes.heads)
    heads = ItemHeads(sizes.heads // group, group, sizes.rank)
    narrow, wide = choose_tiles(dtype, group)
    if cache.device.type == "cuda":
        narrow, wide = find_tiles(num_rows, sizes, cache.block_size, (name_dtype(dtype), name_dtype(cache.dtype)))
    if num_tokens == num_rows:
        spans = [(narrow, 0, num_tokens)]
    else:
        spans = [(narrow, 1, num_rows), (wide, 2, num_tokens // (wide.block_m // group) + num_rows + 1)]
    lists = (plan_span(batch, (num_tokens, num_rows), heads, *span) for span in spans)
    return GpuAttentionPlan(num_tokens, batch, tuple(lists))


def find_tiles(num_rows: int, sizes: LatentSizes, block_size: int, dtypes: tuple[str, str]) -> tuple[Tile, Tile]:
    """Return the tiles of decode rows and of longer rows on the GPU; dtypes: of queries and of the cache."""
    if hopper.refuses(sizes, block_size, dtypes) is None:
        return hopper.row_tile(num_rows), hopper.TILE
    dtype, group = getattr(torch, dtypes[0]), count_heads(sizes.heads)
    row_bytes = triton.next_power_of_2(sizes.rank + sizes.rope) * dtype.itemsize
    narrow, wide = (fit_stages(tile, row_bytes // 2, shared_bytes(), group) for tile in choose_tiles(dtype, group))
    return narrow, wide


def choose_tiles(dtype: torch.dtype, group: int) -> tuple[Tile, Tile]:
    """Return the tiles of Triton's kernel for decode rows and for longer rows. No GPU has timed others.

    group: query heads of a program.
    """
    heads = max(16, triton.next_power_of_2(group))
    keys = _FLOAT32_KEYS if dtype == torch.float32 else 32
    stages = 1 if dtype == torch.float32 else _STAGES
    narrow = Tile(heads, keys, 1, 128, 132, 8, stages, combines=False)
    return narrow, Tile(max(64, heads), keys, 4, 256, 132, 8, stages, combines=False)


def describe(sizes: LatentSizes, block_size: int, dtypes: tuple[str, str], bucket: Bucket) -> str:
    """Return the tiles of a bucket's attention, in words; dtypes: of queries and of the cache."""
    narrow, wide = find_tiles(bucket.rows, sizes, block_size, dtypes)
    shown = f"{narrow.block_m} x {narrow.block_n}"
    if bucket.tokens > bucket.rows:
        shown = f"{shown}; prompts: {wide.block_m} x {wide.block_n}"
    by = " by warpgroups" if narrow.by_warpgroups else ""
    return f"{shown}{by} (by rule)"
