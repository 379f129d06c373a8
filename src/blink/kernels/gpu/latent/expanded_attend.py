# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Attention of expanded rows, each head to keys and values of its own: a program for a head and an item of the plan.

Where some of a row's tokens are not expanded, its sums begin with what skipped.py has found of them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.attention.paged import LOWEST, combine_if_last
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
from blink.kernels.gpu.latent.heads import ExpandedTokens
from blink.kernels.gpu.latent.rows import ExpandedRows
from blink.kernels.operands import ExpandedSizes

_LEAST = 16  # that a matrix unit takes of each dimension


def attend_expanded(
    query: Tensor,
    absorbed: Tensor,
    tokens: ExpandedTokens,
    rows: ExpandedRows,
    work: WorkList,
    before: Tensor,
    result: Tensor,
    sizes: ExpandedSizes,
    scale: float,
    key_scale: float,
) -> None:
    """Write attention of expanded rows to result [tokens, heads * value], which holds that to tokens they skip.

    query: [tokens, heads, nope + rope], before rotation; absorbed: [tokens, heads, rank + rope], of which the rotated
    part is read; before: float32 [tokens, heads], log2 of the sum of exponentials of the tokens skipped.
    """
    (heads, rank, rope), nope, value = sizes
    size, tile = nope + rope, work.tile
    assert query.stride()[1:] == (size, 1) and absorbed.is_contiguous() and result.is_contiguous()
    low, rest = split_dims(nope)
    _attend_expanded[(work.items.shape[0], heads)](
        query, query.stride(0), absorbed, tokens.keys, tokens.values, tokens.rotated, tokens.keys.shape[1],
        rows.starts, rows.skipped, before, work.items, work.counters, work.partials, work.lses, result,
        scale * key_scale * math.log2(math.e), key_scale,
        HEADS=heads, NOPE=nope, ROPE=rope, RANK=rank, VALUE=value, BLOCK_LOW=low, BLOCK_REST=rest,
        BLOCK_ROPE=max(_LEAST, triton.next_power_of_2(rope)),
        BLOCK_VALUE=max(_LEAST, triton.next_power_of_2(value)), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_PAIRS=tile.combined_pairs, PRECISION="ieee" if query.itemsize == 4 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def split_dims(size: int) -> tuple[int, int]:
    """Return two blocks of dims, powers of two, that hold a size with few dims to spare; the second may be 0."""
    low = max(_LEAST, 1 << (size.bit_length() - 1))
    return low, 0 if size <= low else max(_LEAST, triton.next_power_of_2(size - low))


@triton.jit
def _attend_expanded(
    query, query_stride, absorbed, keys, values, rotated, num_places, starts, skipped, before, items, counters,
    partials, lses, result, scale, value_scale, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    RANK: tl.constexpr, VALUE: tl.constexpr, BLOCK_LOW: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first_token, num_queries, first_position, first_key, end_key, row, partial, first_partial = load_item(items)
    num_chunks = tl.load(items + tl.program_id(0) * ITEM_WORDS + NUM_CHUNKS)
    if num_queries == 0:
        return
    pairs, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_VALUE)
    is_pair = pairs < num_queries
    tokens = (first_token + pairs).to(tl.int64)
    source = query + tokens * query_stride + head * (NOPE + ROPE)
    low = load_dims(source, 0, NOPE, is_pair, BLOCK_LOW)
    rest = low
    if BLOCK_REST > 0:
        rest = load_dims(source, BLOCK_LOW, NOPE, is_pair, BLOCK_REST)
    turned = load_dims(absorbed + (tokens * HEADS + head) * (RANK + ROPE) + RANK, 0, ROPE, is_pair, BLOCK_ROPE)
    targets = result + ((tokens * HEADS + head) * VALUE)[:, None] + dims[None, :]
    inside = is_pair[:, None] & (dims < VALUE)[None, :]
    has_before = (partial == first_partial) & (tl.load(skipped + row) > 0)
    attended, best, total = _begin(
        has_before, before + tokens * HEADS + head, targets, is_pair, inside, value_scale, BLOCK_M, BLOCK_VALUE
    )
    start = head.to(tl.int64) * num_places + tl.load(starts + row)
    of_keys, of_values = keys + start * NOPE, values + start * VALUE
    of_rotated = rotated + tl.load(starts + row).to(tl.int64) * ROPE
    attended, best, total = _attend_tokens(
        low, rest, turned, of_keys, of_values, of_rotated, scale, first_position, first_key, end_key, attended, best,
        total, NOPE, ROPE, VALUE, BLOCK_LOW, BLOCK_REST, BLOCK_ROPE, BLOCK_VALUE, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    attended = attended * (value_scale / total)[:, None]
    if num_chunks == 1:
        tl.store(targets, attended.to(result.dtype.element_ty), mask=inside)
        return
    places = (partial * HEADS + head) * BLOCK_M + pairs
    tl.store(lses + places, best + tl.log2(total), mask=is_pair)
    tl.store(partials + places[:, None] * VALUE + dims[None, :], attended, mask=inside)
    combine_if_last(
        partials, lses, counters, result, first_partial, num_chunks, head, first_token, num_queries,
        HEADS, 1, VALUE, BLOCK_VALUE, BLOCK_M, BLOCK_PAIRS,
    )  # fmt: skip


@triton.jit
def load_item(items):
    """Return the words of the program's item in their order, but for the last one.

    Without keys it is padding, whose row is another's: it then has no queries.
    """
    item = items + tl.program_id(0) * ITEM_WORDS
    first_key, end_key = tl.load(item + FIRST_KEY), tl.load(item + END_KEY)
    num_queries = tl.where(end_key > first_key, tl.load(item + NUM_QUERIES), 0)
    first_token, first_position = tl.load(item + FIRST_TOKEN), tl.load(item + FIRST_POSITION)
    row, partial, first_partial = tl.load(item + ROW_SLOT), tl.load(item + PARTIAL), tl.load(item + FIRST_PARTIAL)
    return first_token, num_queries, first_position, first_key, end_key, row, partial, first_partial


@triton.jit
def _begin(
    has_before, before, found, is_pair, inside, value_scale, BLOCK_M: tl.constexpr, BLOCK_VALUE: tl.constexpr
):  # fmt: skip
    """Return the sums, the largest score and the sum of exponentials to begin with: those of tokens skipped, if any."""
    best = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    if has_before:
        best = tl.load(before, mask=is_pair, other=0.0)
        total += 1.0
        attended = tl.load(found, mask=inside, other=0.0).to(tl.float32) / value_scale
    return attended, best, total


@triton.jit
def load_dims(rows, first, size, is_row, BLOCK: tl.constexpr):
    """Return some of the dims of each row, zeros where there are none."""
    dims = first + tl.arange(0, BLOCK)
    return tl.load(rows[:, None] + dims[None, :], mask=is_row[:, None] & (dims < size)[None, :], other=0.0)


@triton.jit
def _attend_tokens(
    low, rest, turned, keys, values, rotated, scale, first_position, first_key, end_key, attended, best, total,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_LOW: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add all keys first_key .. end_key up to each query's position, those that all queries see without a mask."""
    positions = first_position + tl.arange(0, BLOCK_M)
    # All queries see the keys before this one, of whole turns.
    seen = first_key + tl.maximum(tl.minimum(first_position + 1, end_key) - first_key, 0) // BLOCK_N * BLOCK_N
    attended, best, total = _attend_span(
        low, rest, turned, keys, values, rotated, scale, positions, first_key, seen,
        attended, best, total, False, NOPE, ROPE, VALUE, BLOCK_LOW, BLOCK_REST, BLOCK_ROPE, BLOCK_VALUE, BLOCK_N,
        PRECISION,
    )  # fmt: skip
    attended, best, total = _attend_span(
        low, rest, turned, keys, values, rotated, scale, positions, seen, end_key,
        attended, best, total, True, NOPE, ROPE, VALUE, BLOCK_LOW, BLOCK_REST, BLOCK_ROPE, BLOCK_VALUE, BLOCK_N,
        PRECISION,
    )  # fmt: skip
    return attended, best, total


@triton.jit
def _attend_span(
    low, rest, turned, keys, values, rotated, scale, positions, first_key, end_key, attended, best, total,
    HIDES: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_LOW: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys first_key .. end_key to what queries attend to; HIDES: those behind a query's position are hidden."""
    for start in range(first_key, end_key, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        is_key = places < end_key
        key = load_dims(keys + places * NOPE, 0, NOPE, is_key, BLOCK_LOW)
        scores = tl.dot(low, tl.trans(key), input_precision=PRECISION)
        if BLOCK_REST > 0:
            key = load_dims(keys + places * NOPE, BLOCK_LOW, NOPE, is_key, BLOCK_REST)
            scores = tl.dot(rest, tl.trans(key), scores, input_precision=PRECISION)
        key = load_dims(rotated + places * ROPE, 0, ROPE, is_key, BLOCK_ROPE)
        scores = tl.dot(turned, tl.trans(key), scores, input_precision=PRECISION) * scale
        if HIDES:
            is_seen = is_key[None, :] & (places[None, :] <= positions[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        value = load_dims(values + places * VALUE, 0, VALUE, is_key, BLOCK_VALUE)
        attended = tl.dot(weights.to(value.dtype), value, attended * shrink[:, None], input_precision=PRECISION)
        best = higher
    return attended, best, total
