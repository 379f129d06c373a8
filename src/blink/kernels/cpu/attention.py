# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU: rows of equally many queries attend together, over keys and values gathered from the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.batch import Batch, Header


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive rows of equally many queries, with block lists padded to the longest row's."""

    start: int  # first query
    num_rows: int
    num_queries: int  # of each row
    length: int  # keys of the longest row
    blocks: Tensor  # [num_rows * blocks per row]
    mask: Tensor | None  # [num_rows, 1, num_queries, length], added to the scores; None: every query sees every key


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """How one step's queries meet the cache; the same for every layer."""

    num_tokens: int
    groups: tuple[RowGroup, ...]


def plan_attention(batch: Batch, num_tokens: int, block_size: int, dtype: torch.dtype) -> CpuAttentionPlan:
    """Gather all decode rows in one group and give every longer row its own."""
    header = batch.header.tolist()
    num_rows, num_decode = header[Header.NUM_ROWS], header[Header.NUM_DECODE_ROWS]
    starts = batch.query_starts[: num_rows + 1].tolist()
    spans = [(0, num_decode)] if num_decode else []
    spans += [(row, row + 1) for row in range(num_decode, num_rows)]
    groups = (_plan_group(batch, first, last, starts[first : first + 2], block_size, dtype) for first, last in spans)
    return CpuAttentionPlan(num_tokens, tuple(groups))


def _plan_group(
    batch: Batch, first: int, last: int, queries: list[int], block_size: int, dtype: torch.dtype
) -> RowGroup:
    start, num_queries = queries[0], queries[1] - queries[0]
    lens = batch.context_lens[first:last]
    length = int(lens.max())
    tables = batch.block_tables.index_select(0, batch.row_slots[first:last])
    last_block = (lens.long() - 1).div_(block_size, rounding_mode="floor")
    # Short rows repeat their own last block: what lies behind a table's end is not to be read.
    columns = torch.arange(-(-length // block_size), device=lens.device).minimum(last_block[:, None])
    blocks = tables.gather(1, columns).flatten()
    visible = lens[:, None, None] - num_queries + 1 + torch.arange(num_queries, device=lens.device)[:, None]
    hidden = torch.arange(length, device=lens.device) >= visible
    mask = torch.zeros(hidden.shape, dtype=dtype, device=lens.device).masked_fill_(hidden, -torch.inf)
    return RowGroup(start, last - first, num_queries, length, blocks, mask[:, None] if bool(hidden.any()) else None)


def paged_attention(query: Tensor, kv_cache: Tensor, plan: CpuAttentionPlan) -> Tensor:
    """Gather each group's keys and values, then attend to them."""
    num_tokens, num_heads, head_dim = query.shape
    if len(plan.groups) == 1 and plan.groups[0].num_rows * plan.groups[0].num_queries == num_tokens:
        return _attend(query, kv_cache, plan.groups[0]).reshape(num_tokens, num_heads * head_dim)
    result = query.new_zeros(query.shape)
    for group in plan.groups:
        tokens = slice(group.start, group.start + group.num_rows * group.num_queries)
        result[tokens] = _attend(query[tokens], kv_cache, group)
    return result.view(num_tokens, num_heads * head_dim)


def _attend(query: Tensor, kv_cache: Tensor, group: RowGroup) -> Tensor:
    kv_heads, head_dim = kv_cache.shape[3:]
    keys, values = (
        cache.flatten(1).index_select(0, group.blocks).view(group.num_rows, -1, kv_heads, head_dim)[:, : group.length]
        for cache in kv_cache
    )
    per_row = query.view(group.num_rows, group.num_queries, -1, head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if group.num_queries == 1:
        # The query heads that share a KV head stand where queries of one head would: no key is repeated or read twice.
        shared = per_row.view(group.num_rows, kv_heads, -1, head_dim)
        mask = None if group.mask is None else group.mask.expand(-1, kv_heads, shared.shape[2], -1)
        found = functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask)
        return found.reshape(query.shape)
    found = functional.scaled_dot_product_attention(
        per_row.transpose(1, 2), keys, values, attn_mask=group.mask, enable_gqa=True
    )
    return found.transpose(1, 2).reshape(query.shape)
