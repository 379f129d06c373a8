# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportMissingParameterType=false
"""Attention whose tokens have the same bits in any step: one kernel with one tile for decode rows and prompts.

Keys are read from the cache and cut at every 256th. Each chunk has a softmax of its own, and chunks are added in their
order. The program of a tile does so, or each chunk has a program and the one that ends last adds all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.attention import heads
from blink.kernels.gpu.attention.paged import LOWEST, attend_keys
from blink.kernels.gpu.attention.plan import GpuAttentionPlan, plan_span
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
)
from blink.kernels.gpu.pdl import overlap, start_pdl
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import AttentionOptions

if TYPE_CHECKING:
    from blink.models.layers import Attention

CHUNK = 256  # keys; a part of the bits
_KEYS = 32  # of one turn; a part of the bits
_MOST_HEAD_DIM = 256
_SPLIT_PROGRAMS = 528  # up to so many, a program for each chunk: four for each SM


def refuses(head_dim: int) -> str | None:
    """Say why the kernel does not take heads of a size; None: it takes them."""
    return heads.refuses(head_dim) or (f"heads of {head_dim}" if head_dim > _MOST_HEAD_DIM else None)


def _choose_tile(group: int) -> Tile:
    """Return the tile of all steps; group: query heads per KV head."""
    pairs = max(16, triton.next_power_of_2(group))
    return Tile(pairs, _KEYS, pairs, CHUNK, _SPLIT_PROGRAMS, 4, 3, fixed_chunks=True)


def describe(group: int) -> str:
    """Return the tile in words."""
    tile = _choose_tile(group)
    return f"{tile.block_m} x {tile.block_n}, chunks of {CHUNK} keys (by rule)"


def plan_attention(
    batch: Batch, num_tokens: int, num_rows: int, attentions: Sequence[Attention], cache: LayerCache
) -> GpuAttentionPlan:
    """Plan the attention of a bucket, as kernels/attention.py has it."""
    [(_, group)] = {(attention.heads, attention.group) for attention in attentions}
    tile = _choose_tile(group)
    max_tiles = num_tokens // (tile.block_m // group) + num_rows + 1
    max_tiles = min(num_tokens, max_tiles)
    shape = ItemHeads(cache.kv_heads, group, cache.head_dim)
    work = plan_span(batch, (num_tokens, num_rows), shape, tile, 0, max_tiles)
    return GpuAttentionPlan(num_tokens, batch, (work,))


def paged_attention(query: Tensor, cache: LayerCache, plan: GpuAttentionPlan, options: AttentionOptions) -> Tensor:
    """Compute paged_attention of contiguous tensors, without windows, caps and sinks, over a cache of query's type."""
    num_tokens, num_heads, head_dim = query.shape
    assert query.is_contiguous() and cache.cells.is_contiguous() and query.dtype == cache.dtype
    assert num_tokens == plan.num_tokens and refuses(head_dim) is None
    assert not (options.window or options.chunk or options.softcap) and options.sinks is None
    result = query.new_empty(num_tokens, num_heads * head_dim)
    [work] = plan.work_lists
    tile, tables = work.tile, plan.batch.block_tables
    _attend_chunks[(cache.kv_heads, work.items.shape[0])](
        query,
        cache.cells,
        cache.values_offset,
        tables,
        tables.stride(0),
        work.items,
        work.counters,
        work.partials,
        work.lses,
        result,
        options.scale_for(head_dim) * math.log2(math.e),
        KV_HEADS=cache.kv_heads,
        GROUP=num_heads // cache.kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CHUNK_KEYS=CHUNK,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap(query, num_tokens),
    )
    return result


@triton.jit
def _attend_chunks(
    query, kv_cache, values_offset, block_tables, table_stride, items, counters, partials, lses, result, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Attend with a tile's queries to one chunk of keys, or to all chunks."""
    if PDL:
        start_pdl()
    head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM_WORDS
    num_queries = tl.load(item + NUM_QUERIES)
    if num_queries == 0:
        return
    first_key, end_key = tl.load(item + FIRST_KEY), tl.load(item + END_KEY)
    partial, first_partial = tl.load(item + PARTIAL), tl.load(item + FIRST_PARTIAL)
    num_chunks = tl.load(item + NUM_CHUNKS)
    table = block_tables + tl.load(item + ROW_SLOT).to(tl.int64) * table_stride
    pairs, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_pair = pairs < num_queries * GROUP
    inside = is_pair[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (tl.load(item + FIRST_TOKEN) + pairs // GROUP).to(tl.int64)
    offsets = ((tokens * KV_HEADS + head) * GROUP + pairs % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    heads = tl.load(query + offsets, mask=inside, other=0.0)
    positions = tl.load(item + FIRST_POSITION) + pairs // GROUP
    best = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first_key, end_key, CHUNK_KEYS):
        part, lse = attend_keys(
            heads, kv_cache + head * HEAD_DIM, values_offset, table, scale, positions, start,
            tl.minimum(start + CHUNK_KEYS, end_key), tl.full([BLOCK_M], LOWEST, tl.float32),
            tl.zeros([BLOCK_M], tl.float32), 0.0, 1.0, 0, 0, False, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_D,
            BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
        best, total, attended = _add(best, total, attended, part, lse)
    if num_chunks > 1:
        places = (partial * KV_HEADS + head) * BLOCK_M + pairs
        tl.store(lses + places, best, mask=is_pair)
        tl.store(partials + places[:, None] * HEAD_DIM + dims[None, :], attended, mask=inside)
        # All threads have stored before one of them counts with release: who counts last sees what all have stored.
        tl.debug_barrier()
        counter = counters + first_partial * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != num_chunks - 1:
            return
        tl.store(counter, 0)
        places = (first_partial * KV_HEADS + head) * BLOCK_M + pairs
        total, attended = _add_all(lses, partials, places, num_chunks, inside, dims, KV_HEADS, HEAD_DIM)
    seen = tl.where(total > 0, total, 1.0)
    tl.store(result + offsets, tl.math.div_rn(attended, tl.broadcast_to(seen[:, None], attended.shape)), mask=inside)


@triton.jit
def _add_all(lses, partials, places, num_chunks, inside, dims, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the sum of exponentials and the weighted sum of a tile's chunks, added in their order."""
    best = tl.full([inside.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([inside.shape[0]], tl.float32)
    attended = tl.zeros(inside.shape, tl.float32)
    for chunk in range(0, num_chunks, 4):  # which are on their way together
        part, lse = _load_part(lses, partials, places, chunk, num_chunks, inside, dims, KV_HEADS, HEAD_DIM)
        part1, lse1 = _load_part(lses, partials, places, chunk + 1, num_chunks, inside, dims, KV_HEADS, HEAD_DIM)
        part2, lse2 = _load_part(lses, partials, places, chunk + 2, num_chunks, inside, dims, KV_HEADS, HEAD_DIM)
        part3, lse3 = _load_part(lses, partials, places, chunk + 3, num_chunks, inside, dims, KV_HEADS, HEAD_DIM)
        best, total, attended = _add(best, total, attended, part, lse)
        best, total, attended = _add(best, total, attended, part1, lse1)
        best, total, attended = _add(best, total, attended, part2, lse2)
        best, total, attended = _add(best, total, attended, part3, lse3)
    return total, attended


@triton.jit
def _load_part(
    lses, partials, places, chunk, num_chunks, inside, dims, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Return a chunk's result; behind the last one that of a chunk without keys."""
    places += chunk * (inside.shape[0] * KV_HEADS)
    # Past the L1 cache, which does not see what other SMs write.
    is_chunk = tl.full([inside.shape[0]], 0, tl.int32) + chunk < num_chunks
    part = tl.load(
        partials + places[:, None] * HEAD_DIM + dims[None, :], mask=inside & is_chunk[:, None], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    # Pairs that no query has were not stored, and nobody reads what becomes of them.
    return part, tl.load(lses + places, mask=is_chunk, other=LOWEST, cache_modifier=".cg")


@triton.jit
def _add(best, total, attended, part, lse):
    """Add a chunk to those before it; lse: log2 of its sum of exponentials. A chunk without keys changes no bit."""
    higher = tl.maximum(best, lse)
    weight, shrink = tl.exp2(lse - higher), tl.exp2(best - higher)
    # Written as fused operations, so that the compiler has no choice: every caller gets the same bits.
    total = tl.fma(total, shrink, weight)
    weighted = part * weight[:, None]
    return higher, total, tl.fma(attended, tl.broadcast_to(shrink[:, None], attended.shape), weighted)
