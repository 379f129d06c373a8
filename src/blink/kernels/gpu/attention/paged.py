# SPDX-License-Identifier: Apache-2.0
# pyright: reportAssignmentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Attention on the GPU: a program for each KV head and item of the plan.

A tile's last chunk to end adds up all its partial results, or where these are long a kernel of its own does.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.attention.heads import refuses
from blink.kernels.gpu.attention.plan import GpuAttentionPlan
from blink.kernels.gpu.attention.prefill import attend_prompts
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
    WorkList,
)
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions

# Below every score: a maximum that starts here stays finite where all keys are hidden.
LOWEST = tl.constexpr(-1e30)
_LOG2_E = tl.constexpr(math.log2(math.e))


def paged_attention(
    query: Tensor, cache: LayerCache, plan: GpuAttentionPlan, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """Compute paged_attention of contiguous tensors with a head_dim that `refuses` lets pass.

    Keys and values of FP8 become the query's type before they are multiplied.
    """
    num_tokens, num_heads, head_dim = query.shape
    assert query.is_contiguous() and cache.cells.is_contiguous()
    assert num_tokens == plan.num_tokens
    assert refuses(head_dim) is None
    result = query.new_empty(num_tokens, num_heads * head_dim)
    for work in plan.work_lists:
        attend = attend_prompts if work.tile.by_warpgroups else _launch
        attend(query, cache, plan.batch.find_tables(options.window), work, result, options)
        if not work.tile.combines:
            combine_partials(work, result, (cache.kv_heads, num_heads // cache.kv_heads, head_dim))
    return result


def _launch(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: WorkList,
    result: Tensor,
    options: AttentionOptions,
) -> None:
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    tile = work.tile
    _attend[(kv_heads, work.items.shape[0])](
        query,
        cache.cells,
        cache.values_offset,
        block_tables,
        block_tables.stride(0),
        work.items,
        work.counters,
        work.partials,
        work.lses,
        result,
        # Exponentials are powers of 2; under a cap the scores are scaled by themselves first.
        options.scale_for(head_dim) * (1.0 if options.softcap else math.log2(math.e)),
        options.softcap,
        options.kv_scales.value,
        work.lses if options.sinks is None else options.sinks,
        WINDOW=options.window,
        CHUNK=options.chunk,
        HAS_SOFTCAP=options.softcap > 0,
        HAS_SINKS=options.sinks is not None,
        KV_HEADS=kv_heads,
        GROUP=query.shape[1] // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_PAIRS=tile.combined_pairs,
        COMBINES=tile.combines,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def combine_partials(work: WorkList, result: Tensor, heads: tuple[int, int, int]) -> None:
    """Add up what a work list's chunks left. heads: of KV, query heads for each of them, and their size."""
    (kv_heads, group, head_dim), tile = heads, work.tile
    _combine_items[(kv_heads, work.items.shape[0], triton.cdiv(tile.block_m, tile.combined_pairs))](
        work.items,
        work.partials,
        work.lses,
        result,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_PAIRS=tile.combined_pairs,
        num_warps=8,
    )


@triton.jit
def _attend(
    query, kv_cache, values_offset, block_tables, table_stride, items, counters, partials, lses, result, scale,
    softcap, value_scale, sinks, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, COMBINES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM_WORDS
    num_queries = tl.load(item + NUM_QUERIES)
    first_token = tl.load(item + FIRST_TOKEN)
    first_position = tl.load(item + FIRST_POSITION)
    first_key, end_key = tl.load(item + FIRST_KEY), tl.load(item + END_KEY)
    slot = tl.load(item + ROW_SLOT)
    num_chunks = tl.load(item + NUM_CHUNKS)
    partial, first_partial = tl.load(item + PARTIAL), tl.load(item + FIRST_PARTIAL)
    if num_queries == 0:
        return
    pairs = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_pair = pairs < num_queries * GROUP
    inside = is_pair[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + pairs // GROUP).to(tl.int64)
    offsets = ((tokens * KV_HEADS + head) * GROUP + pairs % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    heads = tl.load(query + offsets, mask=inside, other=0.0)
    first_key = _skip_unseen(first_key, first_position, WINDOW, CHUNK)
    best, total = _begin(sinks + head * GROUP + pairs % GROUP, is_pair, partial == first_partial, HAS_SINKS, BLOCK_M)
    attended, lse = attend_keys(
        heads, kv_cache + head * HEAD_DIM, values_offset, block_tables + slot.to(tl.int64) * table_stride, scale,
        first_position + pairs // GROUP, first_key, end_key, best, total, softcap, value_scale,
        WINDOW, CHUNK, HAS_SOFTCAP, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    if num_chunks == 1:
        tl.store(result + offsets, attended, mask=inside)
        return
    places = (partial * KV_HEADS + head) * BLOCK_M + pairs
    tl.store(lses + places, lse, mask=is_pair)
    tl.store(partials + places[:, None] * HEAD_DIM + dims[None, :], attended, mask=inside)
    if COMBINES:
        combine_if_last(
            partials, lses, counters, result, first_partial, num_chunks, head, first_token, num_queries * GROUP,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_PAIRS,
        )  # fmt: skip


@triton.jit
def combine_if_last(
    partials, lses, counters, result, first_partial, num_chunks, head, first_token, num_pairs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Count a chunk whose partial result is stored; the program that counts a tile's last one adds up all of them."""
    # All threads have stored before one of them counts with release: who counts last sees what all have stored.
    tl.debug_barrier()
    counter = counters + first_partial * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_chunks - 1:
        tl.store(counter, 0)
        for first_pair in range(0, num_pairs, BLOCK_PAIRS):
            _combine(
                partials, lses, result, first_partial, num_chunks, head, first_token, first_pair, num_pairs,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_PAIRS,
            )  # fmt: skip


@triton.jit
def _skip_unseen(first_key, first_position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first key that a query of the tile sees; so an item may be left with no key."""
    if WINDOW > 0:
        first_key = tl.maximum(first_key, first_position - WINDOW + 1)
    if CHUNK > 0:
        first_key = tl.maximum(first_key, first_position // CHUNK * CHUNK)
    return first_key


@triton.jit
def _begin(sinks, is_pair, is_first, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the largest score and the sum of exponentials before any key: the first chunk begins with the sinks."""
    best = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - known at compile time, which the other is not
        if is_first:
            best = tl.load(sinks, mask=is_pair, other=0.0) * _LOG2_E
            total += 1.0
    return best, total


@triton.jit
def attend_keys(
    heads, keys, values_offset, table, scale, positions, first_key, end_key, best, total, softcap, value_scale,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return softmax(Q K^T) V over keys first_key .. end_key up to each position, and log2 of the exponentials' sum.

    best, total: the largest score and the sum of exponentials to begin with.
    """
    dims = tl.arange(0, BLOCK_D)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    places = first_key + tl.arange(0, BLOCK_N)
    block = tl.load(table + places // BLOCK_SIZE, mask=places < end_key, other=0)
    for start in range(first_key, end_key, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        is_key = places < end_key
        cells = keys + (block.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE) * TOKEN_STRIDE
        # One iteration ahead: loading keys does not wait for their places, and more of them can be under way.
        following = places + BLOCK_N
        block = tl.load(table + following // BLOCK_SIZE, mask=following < end_key, other=0)
        inside = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(cells[:, None] + dims[None, :], mask=inside, other=0.0).to(heads.dtype)
        scores = tl.dot(heads, tl.trans(key), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            # softcap * tanh(score / softcap), in units of log2.
            scores = (softcap - 2.0 * softcap / (tl.exp(2.0 * scores / softcap) + 1.0)) * _LOG2_E
        is_seen = is_key[None, :] & (places[None, :] <= positions[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (places[None, :] > positions[:, None] - WINDOW)
        if CHUNK > 0:
            is_seen = is_seen & (places[None, :] >= positions[:, None] // CHUNK * CHUNK)
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(cells[:, None] + values_offset + dims[None, :], mask=inside, other=0.0).to(heads.dtype)
        attended = attended * shrink[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision=PRECISION)
        best = higher
    seen = tl.where(total > 0, total, 1.0)
    return attended * (value_scale / seen)[:, None], best + tl.log2(seen)


@triton.jit
def _combine_items(
    items, partials, lses, result, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write a few pairs of a tile that was cut into chunks: the program of its first chunk does."""
    item = items + tl.program_id(1) * ITEM_WORDS
    num_pairs = tl.load(item + NUM_QUERIES) * GROUP
    num_chunks = tl.load(item + NUM_CHUNKS)
    first_partial = tl.load(item + FIRST_PARTIAL)
    first_pair = tl.program_id(2) * BLOCK_PAIRS
    if (num_chunks > 1) & (tl.load(item + PARTIAL) == first_partial) & (first_pair < num_pairs):
        _combine(
            partials, lses, result, first_partial, num_chunks, tl.program_id(0), tl.load(item + FIRST_TOKEN),
            first_pair, num_pairs, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_PAIRS,
        )  # fmt: skip


@triton.jit
def _combine(
    partials, lses, result, first_partial, num_chunks, head, first_token, first_pair, num_pairs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write the mean of a tile's partial results, weighted with their sums of exponentials, for a few pairs."""
    chunks_at_once: tl.constexpr = max(16 // BLOCK_PAIRS, 2)
    elements = tl.arange(0, BLOCK_PAIRS * BLOCK_D)
    pairs = first_pair + elements // BLOCK_D
    dims = elements % BLOCK_D
    inside = (pairs < num_pairs) & (dims < HEAD_DIM)
    best = tl.full([BLOCK_PAIRS * BLOCK_D], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_PAIRS * BLOCK_D], tl.float32)
    attended = tl.zeros([BLOCK_PAIRS * BLOCK_D], tl.float32)
    for start in range(0, num_chunks, chunks_at_once):
        chunks = start + tl.arange(0, chunks_at_once)
        present = (chunks < num_chunks)[:, None] & inside[None, :]
        places = ((first_partial + chunks) * KV_HEADS + head)[:, None] * BLOCK_M + pairs[None, :]
        # Past the L1 cache, which does not see what other SMs write.
        lse = tl.load(lses + places, mask=present, other=LOWEST, cache_modifier=".cg")
        part = tl.load(partials + places * HEAD_DIM + dims[None, :], mask=present, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(best, tl.max(lse, axis=0))
        weights = tl.exp2(lse - higher[None, :])
        shrink = tl.exp2(best - higher)
        attended = attended * shrink + tl.sum(part * weights, axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        best = higher
    tokens = (first_token + pairs // GROUP).to(tl.int64)
    offsets = ((tokens * KV_HEADS + head) * GROUP + pairs % GROUP) * HEAD_DIM + dims
    tl.store(result + offsets, attended / total, mask=inside)
