# SPDX-License-Identifier: Apache-2.0
# pyright: reportAssignmentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Attention of expanded rows to their first tokens, which the buffer does not hold: a program for a head and a tile.

Its queries absorb the projection of keys in the program, and what they attended to is projected to values there.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.attention.work import Tile, WorkList
from blink.kernels.gpu.latent.attend import attend_keys
from blink.kernels.gpu.latent.expanded_attend import load_dims, load_item
from blink.kernels.gpu.latent.rows import ExpandedRows
from blink.kernels.gpu.latent.store import find_stride
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import ExpandedSizes, Expansion

_LEAST = 16  # that a matrix unit takes of each dimension
_INNER = 32  # dims of a head that are multiplied at once


def attend_skipped(
    query: Tensor,
    absorbed: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    row_slots: Tensor,
    rows: ExpandedRows,
    work: WorkList,
    tile: Tile,
    expansion: Expansion,
    before: Tensor,
    result: Tensor,
    sizes: ExpandedSizes,
    scale: float,
    key_scale: float,
) -> None:
    """Write attention to tokens skipped, and to before log2 of the sum of exponentials: as attend_expanded() has them.

    tile: of this kernel, of no more pairs than the work list's.
    """
    (heads, rank, rope), nope, value = sizes
    assert query.stride()[1:] == (nope + rope, 1) and absorbed.is_contiguous() and cache.cells.is_contiguous()
    _attend_skipped[(work.items.shape[0], heads)](
        query, query.stride(0), absorbed, expansion.keys, find_stride(expansion.keys), expansion.values,
        find_stride(expansion.values), cache.cells, block_tables, block_tables.stride(0), row_slots, rows.skipped,
        work.items, before, result, scale * key_scale * math.log2(math.e), key_scale,
        HEADS=heads, NOPE=nope, ROPE=rope, RANK=rank, VALUE=value, BLOCK_SIZE=cache.block_size,
        BLOCK_RANK=max(_LEAST, triton.next_power_of_2(rank)), BLOCK_ROPE=max(_LEAST, triton.next_power_of_2(rope)),
        BLOCK_INNER=_INNER, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        PRECISION="ieee" if query.itemsize == 4 else "tf32", num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def _attend_skipped(
    query, query_stride, absorbed, key_matrices, key_stride, value_matrices, value_stride, cells, block_tables,
    table_stride, row_slots, skipped, items, before, result, scale, value_scale, HEADS: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_INNER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first_token, num_queries, _first_position, _first_key, _end_key, row, partial, first_partial = load_item(items)
    # Of a tile that was cut into chunks, the first one's program.
    if (num_queries == 0) | (partial != first_partial):
        return
    num_keys = tl.load(skipped + row)
    if num_keys == 0:
        return
    table = block_tables + tl.load(row_slots + row).to(tl.int64) * table_stride
    matrices = key_matrices + head * key_stride
    for first in range(0, num_queries, BLOCK_M):
        pairs = first + tl.arange(0, BLOCK_M)
        is_pair = pairs < num_queries
        tokens = (first_token + pairs).to(tl.int64)
        heads = tokens * HEADS + head
        source = query + tokens * query_stride + head * (NOPE + ROPE)
        folded = _absorb(source, matrices, is_pair, NOPE, RANK, BLOCK_RANK, BLOCK_INNER, BLOCK_M, PRECISION)
        turned = load_dims(absorbed + heads * (RANK + ROPE) + RANK, 0, ROPE, is_pair, BLOCK_ROPE)
        # Every query sees every one of these keys.
        attended, lse = attend_keys(
            folded, turned, cells, table, scale, value_scale, pairs * 0 + num_keys, 0, num_keys,
            RANK, ROPE, BLOCK_SIZE, BLOCK_RANK, BLOCK_ROPE, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
        tl.store(before + heads, lse, mask=is_pair)
        attended = attended.to(query.dtype.element_ty)
        for first_value in range(0, VALUE, BLOCK_INNER):
            dims = first_value + tl.arange(0, BLOCK_INNER)
            rows = value_matrices + head * value_stride + dims * RANK
            weights = load_dims(rows, 0, RANK, dims < VALUE, BLOCK_RANK)
            found = tl.dot(attended, tl.trans(weights), input_precision=PRECISION).to(result.dtype.element_ty)
            inside = is_pair[:, None] & (dims < VALUE)[None, :]
            tl.store(result + (heads * VALUE)[:, None] + dims[None, :], found, mask=inside)


@triton.jit
def _absorb(
    source, matrices, is_pair, NOPE: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_INNER: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return queries times the projection of a head's keys, in their own type."""
    total = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    for first in range(0, NOPE, BLOCK_INNER):
        inner = first + tl.arange(0, BLOCK_INNER)
        values = load_dims(source, first, NOPE, is_pair, BLOCK_INNER)
        weights = load_dims(matrices + inner * RANK, 0, RANK, inner < NOPE, BLOCK_RANK)
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    return total.to(source.dtype.element_ty)
