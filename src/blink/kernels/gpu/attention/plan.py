# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
"""The work of one step's attention, planned on the GPU once per step: which tiles of queries meet which chunks of keys.

A tile is a few consecutive queries of one row, with all query heads that share a KV head. Where tiles alone would leave
the GPU idle, their keys are cut into chunks of one length, whose partial results are then combined. Sizes depend on the
bucket alone, so that a captured graph serves every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blink.formats.base import name_dtype
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.attention import prefill
from blink.kernels.gpu.attention.tiles import choose_tiles, fit_stages
from blink.kernels.gpu.attention.work import (
    END_KEY,
    FIRST_KEY,
    FIRST_PARTIAL,
    FIRST_POSITION,
    FIRST_TOKEN,
    ITEM_WORDS,
    NUM_CHUNKS,
    NUM_QUERIES,
    PARTIAL,
    ROW_SLOT,
    ItemHeads,
    Tile,
    WorkList,
)
from blink.kernels.gpu.device import shared_bytes
from blink.kernels.layer_cache import LayerCache
from blink.plan.site import Bucket

if TYPE_CHECKING:
    from blink.models.layers import Attention

_ITEMS_PER_PROGRAM = 16
_MAX_FIXED_CHUNKS = 512  # whose partial results there is room for: 32 MiB with 8 KV heads of 128
_PROMPT_PAIRS = 4096  # of query and query head, from which on the kernel of prompts is quicker


@dataclass(frozen=True, slots=True)
class GpuAttentionPlan:
    """How one step's queries meet the cache on the GPU; the same for every layer."""

    num_tokens: int
    batch: Batch  # whose tables tell the blocks
    work_lists: tuple[WorkList, ...]


def plan_attention(
    batch: Batch,
    num_tokens: int,
    num_rows: int,
    attentions: Sequence[Attention],
    cache: LayerCache,
    dtype: torch.dtype | None = None,
) -> GpuAttentionPlan:
    """Plan the attention of a bucket, as kernels/attention.py has it."""
    [(num_heads, group)] = {(attention.heads, attention.group) for attention in attentions}
    windows = {attention.window for attention in attentions}
    window = windows.pop() if len(windows) == 1 else 0
    dtype = dtype or cache.dtype
    narrow, wide = choose_tiles(dtype, group, num_tokens * num_heads, cache.head_dim)
    if cache.device.type == "cuda":
        row_bytes = triton.next_power_of_2(cache.head_dim) * dtype.itemsize
        narrow, wide = (fit_stages(tile, row_bytes, shared_bytes(), group) for tile in (narrow, wide))
        dtypes = name_dtype(dtype), name_dtype(cache.dtype)
        if _takes_prompt_kernel(attentions, cache.block_size, dtypes, num_tokens * num_heads):
            wide = prefill.TILE
    if num_tokens == num_rows:
        # Nearly always all rows decode, but narrow tiles serve longer rows as well.
        spans = [(narrow, 0, num_tokens)]
    else:
        spans = [(narrow, 1, num_rows), (wide, 2, num_tokens // (wide.block_m // group) + num_rows + 1)]
    heads = ItemHeads(cache.kv_heads, group, cache.head_dim, window)
    work_lists = tuple(
        plan_span(batch, (num_tokens, num_rows), heads, tile, span, max_tiles) for tile, span, max_tiles in spans
    )
    return GpuAttentionPlan(num_tokens, batch, work_lists)


def _takes_prompt_kernel(
    attentions: Sequence[Attention], block_size: int, dtypes: tuple[str, str], num_pairs: int
) -> bool:
    """Tell whether longer rows take the kernel of prompts, which all layers then do."""
    refusals = (prefill.refuses(attention, block_size, dtypes) for attention in attentions)
    return num_pairs >= _PROMPT_PAIRS and not any(refusals)


def describe(attentions: Sequence[Attention], block_size: int, dtypes: tuple[str, str], bucket: Bucket) -> str:
    """Return the tiles of a bucket's attention in all layers, in words; dtypes: of queries and of the cache."""
    pairs = bucket.tokens * attentions[0].heads
    narrow, wide = choose_tiles(getattr(torch, dtypes[0]), attentions[0].group, pairs, attentions[0].head_dim)
    shown = f"{narrow.block_m} x {narrow.block_n}"
    if bucket.tokens == bucket.rows:
        return f"{shown} (by rule)"
    if _takes_prompt_kernel(attentions, block_size, dtypes, pairs):
        wide = prefill.TILE
        return f"{shown}; prompts: {wide.block_m} x {wide.block_n} by warpgroups (by rule)"
    return f"{shown}; prompts: {wide.block_m} x {wide.block_n} (by rule)"


def plan_span(batch: Batch, size: tuple[int, int], heads: ItemHeads, tile: Tile, span: int, max_tiles: int) -> WorkList:
    """Plan some of the rows. size: tokens and rows; span: see _plan."""
    (num_tokens, num_rows), (kv_heads, group, head_dim, window) = size, heads
    # Chunks are so long that cutting adds at most `spread` items, and that at most twice as many belong to cut tiles.
    spread = triton.cdiv(tile.num_programs, kv_heads)
    max_items, max_partials = max_tiles + spread, 2 * spread
    fixed: dict[str, int] = {}
    if tile.fixed_chunks:
        fixed = {"FIXED_CHUNK": tile.min_chunk, "MAX_SPLIT_TILES": spread}
        spread = min(_MAX_FIXED_CHUNKS, max_tiles * triton.cdiv(batch.tokens.shape[1], tile.min_chunk))
        max_items, max_partials = max(max_tiles, spread), spread
    device = batch.header.device
    items = torch.empty(max_items, ITEM_WORDS.value, dtype=torch.int32, device=device)
    counters = torch.empty(max_partials, kv_heads, dtype=torch.int32, device=device)
    partials = torch.empty(max_partials, kv_heads, tile.block_m, head_dim, dtype=torch.float32, device=device)
    lses = torch.empty(max_partials, kv_heads, tile.block_m, dtype=torch.float32, device=device)
    _plan[(triton.cdiv(max_items, _ITEMS_PER_PROGRAM),)](
        batch.header,
        batch.query_starts,
        batch.context_lens,
        batch.row_slots,
        items,
        counters,
        num_tokens,
        max_items,
        spread,
        SPAN=span,
        WINDOW=window,
        TILE_QUERIES=tile.block_m // group,
        MIN_CHUNK=tile.min_chunk,
        BLOCK_N=tile.block_n,
        BLOCK_ROWS=triton.next_power_of_2(num_rows + 1),
        BLOCK_ITEMS=_ITEMS_PER_PROGRAM,
        KV_HEADS=kv_heads,
        BLOCK_HEADS=triton.next_power_of_2(kv_heads),
        num_warps=8,
        **fixed,
    )
    return WorkList(tile, items, counters, partials, lses)


_NUM_ROWS = tl.constexpr(int(Header.NUM_ROWS))
_NUM_DECODE_ROWS = tl.constexpr(int(Header.NUM_DECODE_ROWS))
_ALL_KEYS = tl.constexpr(1 << 30)


@triton.jit
def _plan(
    header, query_starts, context_lens, row_slots, items, counters, num_tokens, max_items, spread,
    SPAN: tl.constexpr, WINDOW: tl.constexpr, TILE_QUERIES: tl.constexpr, MIN_CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_ITEMS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, FIXED_CHUNK: tl.constexpr = 0, MAX_SPLIT_TILES: tl.constexpr = 0,
):  # fmt: skip
    """Write items and clear their counters. SPAN: 0 all rows and padding, 1 decode rows, 2 other rows and padding."""
    num_rows, num_decode = tl.load(header + _NUM_ROWS), tl.load(header + _NUM_DECODE_ROWS)
    first_row, end_row = num_decode if SPAN == 2 else 0, num_decode if SPAN == 1 else num_rows
    # The padding tokens stand where one row more would: without context, their result is zero.
    padding_row = -1 if SPAN == 1 else num_rows
    rows = tl.arange(0, BLOCK_ROWS)
    num_queries, context = _load_rows(query_starts, context_lens, rows, first_row, end_row, padding_row, num_tokens)
    tiles = tl.cdiv(num_queries, TILE_QUERIES)
    reach = _limit(context, WINDOW, TILE_QUERIES)
    chunk_keys = _choose_chunk(tiles, reach, spread, MIN_CHUNK, BLOCK_N, FIXED_CHUNK, MAX_SPLIT_TILES)
    chunks = tl.maximum(tl.cdiv(reach, chunk_keys), 1)
    counts = tiles * chunks
    ends = tl.cumsum(counts, 0)
    item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    before = ends[None, :] <= item[:, None]
    row = tl.sum(before.to(tl.int32), axis=1)
    first_item = tl.sum(tl.where(before, counts[None, :], 0), axis=1)
    first_partial = tl.sum(tl.where(before & (chunks > 1)[None, :], counts[None, :], 0), axis=1)
    num_queries, context = _load_rows(query_starts, context_lens, row, first_row, end_row, padding_row, num_tokens)
    first_token = tl.load(query_starts + row, mask=row <= num_rows, other=0)
    row_chunks = tl.maximum(tl.cdiv(_limit(context, WINDOW, TILE_QUERIES), chunk_keys), 1)
    # A row's last tiles, which see the most keys, go first.
    index = tl.cdiv(num_queries, TILE_QUERIES) - 1 - (item - first_item) // row_chunks
    chunk = (item - first_item) % row_chunks
    first_query = index * TILE_QUERIES
    tile_queries = tl.minimum(num_queries - first_query, TILE_QUERIES)
    position = context - num_queries + first_query
    hidden, visible = _find_keys(position, tile_queries, WINDOW)
    num_chunks = tl.maximum(tl.cdiv(visible - hidden, chunk_keys), 1)
    used = (item < tl.max(ends, axis=0)) & (chunk < num_chunks)
    first_partial += index * row_chunks
    _clear(counters + first_partial * KV_HEADS, used & (chunk == 0) & (num_chunks > 1), KV_HEADS, BLOCK_HEADS)
    target = items + item * ITEM_WORDS
    inside = item < max_items
    tl.store(target + FIRST_TOKEN, first_token + first_query, mask=inside)
    tl.store(target + NUM_QUERIES, tl.where(used, tile_queries, 0), mask=inside)
    tl.store(target + FIRST_POSITION, position, mask=inside)
    tl.store(target + FIRST_KEY, hidden + chunk * chunk_keys, mask=inside)
    tl.store(target + END_KEY, tl.minimum(hidden + (chunk + 1) * chunk_keys, visible), mask=inside)
    tl.store(target + ROW_SLOT, tl.load(row_slots + row, mask=row < num_rows, other=0), mask=inside)
    tl.store(target + PARTIAL, first_partial + chunk, mask=inside)
    tl.store(target + FIRST_PARTIAL, first_partial, mask=inside)
    tl.store(target + NUM_CHUNKS, num_chunks, mask=inside)


@triton.jit
def _choose_chunk(
    tiles, reach, spread, MIN_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, FIXED: tl.constexpr, MAX_SPLIT: tl.constexpr
):  # fmt: skip
    """Return the keys of a chunk: FIXED, or all where tiles or chunks are too many; FIXED is 0: as they fit."""
    if FIXED > 0:
        fixed = tl.sum(tiles.to(tl.int64) * tl.maximum(tl.cdiv(reach, FIXED), 1))
        is_split = (tl.sum(tiles) <= MAX_SPLIT) & (fixed <= spread)
        chunk_keys = tl.where(is_split, FIXED, _ALL_KEYS)
    else:
        wanted = tl.sum(tiles.to(tl.int64) * reach)
        chunk_keys = tl.cdiv(tl.maximum(tl.cdiv(wanted, spread), MIN_CHUNK), BLOCK_N).to(tl.int32) * BLOCK_N
    return chunk_keys


@triton.jit
def _limit(context, WINDOW: tl.constexpr, TILE_QUERIES: tl.constexpr):
    """Return how many keys a tile of each row sees at most."""
    return tl.minimum(context, WINDOW + TILE_QUERIES - 1) if WINDOW > 0 else context


@triton.jit
def _find_keys(position, num_queries, WINDOW: tl.constexpr):
    """Return the first key that tiles see, and the end of their keys; position: of the first query.

    WINDOW: of all layers; 0: they differ, or have none.
    """
    hidden = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else tl.zeros_like(position)
    return hidden, tl.maximum(position + num_queries, 0)


@triton.jit
def _clear(starts, wanted, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write LENGTH zeros from each wanted start."""
    offsets = tl.arange(0, BLOCK)
    tl.store(starts[:, None] + offsets[None, :], 0, mask=wanted[:, None] & (offsets < LENGTH)[None, :])


@triton.jit
def _load_rows(query_starts, context_lens, rows, first_row, end_row, padding_row, num_tokens):
    """Return rows' numbers of queries and keys; outside first_row .. end_row none; padding_row has no key."""
    inside = (rows >= first_row) & (rows < end_row)
    is_padding = rows == padding_row
    first = tl.load(query_starts + rows, mask=inside | is_padding, other=0)
    end = tl.load(query_starts + rows + 1, mask=inside, other=0)
    end = tl.where(is_padding, num_tokens, end)
    return end - first, tl.load(context_lens + rows, mask=inside, other=0)
