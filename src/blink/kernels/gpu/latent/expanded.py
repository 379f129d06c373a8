# SPDX-License-Identifier: Apache-2.0
"""Latent attention whose long prompts have keys and values made of latents: planned once per step, then each layer's.

Rows of few queries, and decoding ones, attend absorbed as in other steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.attention.plan import plan_span
from blink.kernels.gpu.attention.tiles import fit_stages
from blink.kernels.gpu.attention.work import ItemHeads, Tile
from blink.kernels.gpu.device import shared_bytes
from blink.kernels.gpu.latent import plan
from blink.kernels.gpu.latent.attend import attend
from blink.kernels.gpu.latent.expanded_attend import attend_expanded
from blink.kernels.gpu.latent.heads import ExpandedTokens, count_bytes, expand_tokens, multiply_absorbed
from blink.kernels.gpu.latent.rows import count_least_queries, divide_rows, leave_out
from blink.kernels.gpu.latent.skipped import attend_skipped
from blink.kernels.gpu.latent.store import rotate_and_store
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LATENT_EPS, ExpandedSizes, Expansion, KvScales
from blink.plan.site import Bucket, first_reason

EXPANDED = "latent attention to expanded prompts"
LEAST_TOKENS = 1024  # of a step, by rule until it is timed: kernels of shorter ones are no longer than their launches
ROOM_BYTES = 512 << 20  # for keys and values of earlier tokens, beside those of a step's own
_MAX_HEAD = 256  # of what a head multiplies, and of its values: an SM's registers and shared memory hold a tile


def refuses(sizes: ExpandedSizes, bucket: Bucket) -> str | None:
    """Say why prompts of a bucket are not expanded; None: they are."""
    return first_reason(
        {
            "no prompts": bucket.decoding or bucket.tokens <= bucket.rows,
            f"fewer than {LEAST_TOKENS} tokens": bucket.tokens < LEAST_TOKENS,
            f"heads of {sizes.nope} and {sizes.value}": max(sizes.nope, sizes.value) > _MAX_HEAD,
            "keys and values longer than latents": sizes.nope + sizes.value >= 2 * sizes.latents.rank,
        }
    )


def describe(sizes: ExpandedSizes, block_size: int, dtypes: tuple[str, str], bucket: Bucket) -> str:
    """Return the tiles of a bucket's attention, in words; dtypes: of queries and of the cache."""
    dtype = getattr(torch, dtypes[0])
    expanded, _ = fit_tiles(sizes, dtype)
    shown = f"from {count_least_queries(sizes)} queries of a row on {expanded.block_m} x {expanded.block_n}"
    return f"{shown}; others: {plan.describe(sizes.latents, block_size, dtypes, bucket)}"


def choose_tiles(dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Return the tiles of expanded tokens and of those skipped. No GPU has timed others."""
    _, absorbed = plan.choose_tiles(dtype, 1)
    if dtype == torch.float32:
        return Tile(32, 16, 16, 256, 264, 4, 1), dataclasses.replace(absorbed, block_m=32)
    return Tile(128, 64, 16, 512, 264, 8, 2), dataclasses.replace(absorbed, num_stages=2)


def fit_tiles(sizes: ExpandedSizes, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Return choose_tiles() with as many stages as a GPU's shared memory holds."""
    (_, rank, rope), nope, value = sizes
    expanded, skipped = choose_tiles(dtype)
    widest = triton.next_power_of_2(max(nope + rope, value)) * dtype.itemsize
    whole = triton.next_power_of_2(rank + rope) * dtype.itemsize
    expanded = fit_stages(expanded, widest, shared_bytes())
    return expanded, fit_stages(skipped, whole // 2, shared_bytes())


def count_room(sizes: ExpandedSizes, itemsize: int, most_keys: int) -> int:
    """Return for how many earlier tokens there is room; most_keys: that all rows can have."""
    return min(ROOM_BYTES // count_bytes(sizes, itemsize), most_keys)


def plan_expanded(
    batch: Batch, num_tokens: int, num_rows: int, sizes: ExpandedSizes, cache: LayerCache, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor, Tensor, LayerCache, Expansion, float, KvScales], Tensor]:
    """Divide the rows of a step, and the keys of each, among programs; return what each layer calls."""
    heads, most_keys = sizes.latents.heads, num_rows * batch.block_tables.shape[1] * cache.block_size
    room, least = count_room(sizes, dtype.itemsize, most_keys), count_least_queries(sizes)
    rows = divide_rows(batch, num_tokens, num_rows, room, least, cache.block_size)
    absorbing = plan.plan_latent_attention(batch, num_tokens, num_rows, sizes.latents, cache, dtype)
    leave_out(absorbing.work_lists[-1], rows)
    tiles = choose_tiles(dtype) if cache.device.type == "cpu" else fit_tiles(sizes, dtype)
    # As if a row's first key were its first expanded one, and its slot its own number.
    own_slots = torch.arange(num_rows + 1, dtype=torch.int32, device=cache.device)
    of_rows = dataclasses.replace(batch, context_lens=rows.num_expanded, row_slots=own_slots)
    most_tiles = num_tokens // tiles[0].block_m + num_rows + 1
    work = plan_span(of_rows, (num_tokens, num_rows), ItemHeads(heads, 1, sizes.value), tiles[0], 2, most_tiles)
    tokens = ExpandedTokens.allocate(sizes, num_tokens + room, dtype, cache.device)
    before = torch.empty(num_tokens, heads, dtype=torch.float32, device=cache.device)

    def mix(
        query: Tensor,
        kept: Tensor,
        rotation: Tensor,
        kv_slots: Tensor,
        cache: LayerCache,
        expansion: Expansion,
        scale: float,
        kv_scales: KvScales,
    ) -> Tensor:
        absorbed = rotate_and_store(query, kept, rotation, kv_slots, cache, expansion, LATENT_EPS, kv_scales)
        multiply_absorbed(query[:, :, : sizes.nope], expansion.keys, absorbed[:, :, : expansion.rank], rows)
        attended = attend(absorbed, cache, absorbing, sizes.latents, scale, kv_scales)
        found = query.new_empty(num_tokens, heads, sizes.value)
        multiply_absorbed(attended, expansion.values.transpose(1, 2), found, rows)
        expand_tokens(cache, rows, expansion, tokens)
        attend_skipped(
            *(query, absorbed, cache, batch.block_tables, batch.row_slots, rows, work, tiles[1], expansion),
            *(before, found, sizes, scale, kv_scales.key),
        )
        attend_expanded(query, absorbed, tokens, rows, work, before, found, sizes, scale, kv_scales.key)
        return found.flatten(1)

    return mix
