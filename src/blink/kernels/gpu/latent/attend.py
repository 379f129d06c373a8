# SPDX-License-Identifier: Apache-2.0
# pyright: reportAssignmentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Latent attention on the GPU: a program for a group of query heads and an item of the plan.

It reads what a token keeps once, for the scores and as values.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.attention.paged import LOWEST, combine_partials
from blink.kernels.gpu.attention.plan import GpuAttentionPlan
from blink.kernels.gpu.attention.work import (
    END_KEY,
    FIRST_KEY,
    FIRST_POSITION,
    FIRST_TOKEN,
    ITEM_WORDS,
    NUM_CHUNKS,
    NUM_QUERIES,
    PARTIAL,
    ROW_SLOT,
    WorkList,
)
from blink.kernels.gpu.latent import hopper
from blink.kernels.gpu.latent.sizes import count_heads, refuses
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import UNSCALED, KvScales, LatentSizes

_LEAST = 16  # that a matrix unit takes of each dimension


def attend(
    query: Tensor, cache: LayerCache, plan: GpuAttentionPlan, sizes: LatentSizes, scale: float, kv_scales: KvScales
) -> Tensor:
    """Compute latent_attention of contiguous tensors, of sizes that `refuses` lets pass."""
    num_tokens, num_heads, size = query.shape
    assert query.is_contiguous() and cache.cells.is_contiguous()
    assert num_tokens == plan.num_tokens and size == sizes.rank + sizes.rope
    assert refuses(sizes.rank, sizes.rope) is None
    group = count_heads(num_heads)
    result = query.new_empty(num_tokens, num_heads, sizes.rank)
    for work in plan.work_lists:
        if work.tile.by_warpgroups:
            assert kv_scales == UNSCALED
            hopper.attend_latents(query, cache, plan.batch.block_tables, work, result, scale)
            continue
        _launch(query, cache, plan.batch.block_tables, work, result, sizes, scale, kv_scales)
        combine_partials(work, result, (num_heads // group, group, sizes.rank))
    return result


def _launch(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: WorkList,
    result: Tensor,
    sizes: LatentSizes,
    scale: float,
    kv_scales: KvScales,
) -> None:
    group, tile = count_heads(sizes.heads), work.tile
    _attend[(sizes.heads // group, work.items.shape[0])](
        query,
        cache.cells,
        block_tables,
        block_tables.stride(0),
        work.items,
        work.partials,
        work.lses,
        result,
        scale * kv_scales.key * math.log2(math.e),  # exponentials are powers of 2
        kv_scales.key,
        GROUPS=sizes.heads // group,
        GROUP=group,
        RANK=sizes.rank,
        ROPE=sizes.rope,
        BLOCK_SIZE=cache.block_size,
        BLOCK_RANK=max(_LEAST, triton.next_power_of_2(sizes.rank)),
        BLOCK_ROPE=max(_LEAST, triton.next_power_of_2(sizes.rope)),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PRECISION="ieee" if query.itemsize == 4 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _attend(
    query, cells, block_tables, table_stride, items, partials, lses, result, scale, value_scale,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM_WORDS
    num_queries, first_token = tl.load(item + NUM_QUERIES), tl.load(item + FIRST_TOKEN)
    first_position, slot = tl.load(item + FIRST_POSITION), tl.load(item + ROW_SLOT)
    first_key, end_key = tl.load(item + FIRST_KEY), tl.load(item + END_KEY)
    if num_queries == 0:
        return
    pairs = tl.arange(0, BLOCK_M)
    is_pair = pairs < num_queries * GROUP
    tokens = (first_token + pairs // GROUP).to(tl.int64)
    rows = (tokens * GROUPS + head) * GROUP + pairs % GROUP
    latents, keys = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    source = query + rows[:, None] * (RANK + ROPE)
    inside = is_pair[:, None] & (latents < RANK)[None, :]
    absorbed = tl.load(source + latents[None, :], mask=inside, other=0.0)
    rotated = tl.load(source + RANK + keys[None, :], mask=is_pair[:, None] & (keys < ROPE)[None, :], other=0.0)
    attended, lse = attend_keys(
        absorbed, rotated, cells, block_tables + slot.to(tl.int64) * table_stride, scale, value_scale,
        first_position + pairs // GROUP, first_key, end_key,
        RANK, ROPE, BLOCK_SIZE, BLOCK_RANK, BLOCK_ROPE, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    if tl.load(item + NUM_CHUNKS) == 1:
        tl.store(result + rows[:, None] * RANK + latents[None, :], attended, mask=inside)
    else:
        places = (tl.load(item + PARTIAL) * GROUPS + head) * BLOCK_M + pairs
        tl.store(lses + places, lse, mask=is_pair)
        tl.store(partials + places[:, None] * RANK + latents[None, :], attended, mask=inside)


@triton.jit
def attend_keys(
    absorbed, rotated, cells, table, scale, value_scale, positions, first_key, end_key,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return softmax(Q K^T) times the latents of keys first_key .. end_key up to each position, and log2 of the sum of
    exponentials.
    """
    latents, keys = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    attended = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    best = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    places = first_key + tl.arange(0, BLOCK_N)
    block = tl.load(table + places // BLOCK_SIZE, mask=places < end_key, other=0)
    for start in range(first_key, end_key, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        is_key = places < end_key
        cell = cells + (block.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE) * (RANK + ROPE)
        # One iteration ahead: loading keys does not wait for their places.
        following = places + BLOCK_N
        block = tl.load(table + following // BLOCK_SIZE, mask=following < end_key, other=0)
        inside = is_key[:, None] & (latents < RANK)[None, :]
        kept = tl.load(cell[:, None] + latents[None, :], mask=inside, other=0.0).to(absorbed.dtype)
        is_turned = is_key[:, None] & (keys < ROPE)[None, :]
        turned = tl.load(cell[:, None] + RANK + keys[None, :], mask=is_turned, other=0.0).to(absorbed.dtype)
        scores = tl.dot(absorbed, tl.trans(kept), input_precision=PRECISION)
        scores = tl.dot(rotated, tl.trans(turned), scores, input_precision=PRECISION) * scale
        is_seen = is_key[None, :] & (places[None, :] <= positions[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        attended = tl.dot(weights.to(kept.dtype), kept, attended * shrink[:, None], input_precision=PRECISION)
        best = higher
    seen = tl.where(total > 0, total, 1.0)
    return attended * (value_scale / seen)[:, None], best + tl.log2(seen)
