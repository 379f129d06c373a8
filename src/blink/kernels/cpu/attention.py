# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU: rows of equally many queries attend together.

With quantized GEMMs, rows of one query read the cache natively. Others attend with PyTorch to keys and values that
are gathered from it. Of a layer with a window these are the ones that some query sees: others may be freed by now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch, Header
from blink.kernels.cpu.thread_pool import find_thread_pool, is_in_use
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions
from blink.region.native import lib

NATIVE_CELLS = (torch.float32, torch.float16)  # types of a cache that native code takes with float32 queries
_SHORT_QUERIES, _SHORT_KEYS = 64, 256  # of rows that attend faster token by token, natively
LANES, MOST_HEAD_DIM = 16, 512  # floats of a head that the native code takes at a time, and at most


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive rows of equally many queries, with block lists padded to the longest row's."""

    start: int  # first query
    num_rows: int
    num_queries: int  # of each row
    length: int  # keys of the longest row
    blocks: Tensor  # [num_rows * blocks per row]
    positions: Tensor  # [num_rows, num_queries]
    mask: Tensor | None  # [num_rows, 1, num_queries, keys], added to the scores; None: every query sees every key
    cells: Tensor | None = None  # [num_rows * keys]; where the keys are that a window shows; None: all of `length`


class CpuAttentionPlan:
    """How one step's queries meet the cache; the same for every layer of a window."""

    def __init__(self, batch: Batch, num_tokens: int, block_size: int, dtype: torch.dtype, *, by_token: bool) -> None:
        self.num_tokens = num_tokens
        self._by_token = by_token
        self._batch, self._block_size, self._dtype = batch, block_size, dtype
        self._groups: dict[int, tuple[RowGroup, ...]] = {}

    def find_groups(self, window: int) -> tuple[RowGroup, ...]:
        """Gather rows that attend token by token, and give every other row its own group; window: 0 for none."""
        if window not in self._groups:
            self._groups[window] = tuple(self._plan(window))
        return self._groups[window]

    def are_all_short(self) -> bool:
        """Whether all rows attend token by token, so that there is one group of each window."""
        return all(self._list_short(self._list_starts()))

    def _list_starts(self) -> list[int]:
        return self._batch.query_starts[: int(self._batch.header[Header.NUM_ROWS]) + 1].tolist()

    def _list_short(self, starts: list[int]) -> list[bool]:
        lens = self._batch.context_lens[: len(starts) - 1].tolist()
        return [self._is_short(starts[row : row + 2], length) for row, length in enumerate(lens)]

    def _plan(self, window: int) -> Iterator[RowGroup]:
        starts = self._list_starts()
        for by_token, group in groupby(enumerate(self._list_short(starts)), lambda pair: pair[1]):
            rows = [row for row, _ in group]
            spans = [(rows[0], rows[-1] + 1)] if by_token else [(row, row + 1) for row in rows]
            for first, last in spans:
                yield self._plan_rows(first, last, starts, window, by_token=by_token)

    def _is_short(self, queries: list[int], length: int) -> bool:
        """Whether a row's tokens attend one by one. Its neighbours do not matter, so they change none of its bits."""
        count = queries[1] - queries[0]
        return count == 1 or self._by_token or (count <= _SHORT_QUERIES and length <= _SHORT_KEYS and is_in_use())

    def _plan_rows(self, first: int, last: int, starts: list[int], window: int, *, by_token: bool) -> RowGroup:
        batch, queries = self._batch, starts[first : first + 2]
        slots, lens = batch.row_slots[first:last], batch.context_lens[first:last]
        if by_token:
            queries = [starts[first], starts[first] + 1]
            if starts[last] - starts[first] > last - first:
                slots, lens = self._take_tokens(first, last, torch.arange(starts[first], starts[last]))
        return plan_group(batch.find_tables(window), slots, lens, queries, window, self._block_size, self._dtype)

    def _take_tokens(self, first: int, last: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot of each token of some rows, and how many keys it sees."""
        batch, ends = self._batch, self._batch.query_starts[first + 1 : last + 1]
        row_of = torch.searchsorted(ends, tokens.to(torch.int32), right=True) + first
        behind = batch.query_starts.index_select(0, row_of + 1) - tokens - 1
        return batch.row_slots.index_select(0, row_of), (batch.context_lens.index_select(0, row_of) - behind).int()


def plan_attention(
    batch: Batch, num_tokens: int, block_size: int, dtype: torch.dtype, *, by_token: bool = False
) -> CpuAttentionPlan:
    """Prepare one step's attention, with queries of a type; by_token: tokens of prompts attend one by one."""
    return CpuAttentionPlan(batch, num_tokens, block_size, dtype, by_token=by_token)


def plan_group(
    tables: Tensor,
    slots: Tensor,
    lens: Tensor,
    queries: list[int],
    window: int,
    block_size: int,
    dtype: torch.dtype,
) -> RowGroup:
    """Plan rows of equally many queries; slots, lens: of each row; queries: where the first row's begin and end."""
    start, num_queries = queries[0], queries[1] - queries[0]
    length = int(lens.max())
    tables = tables.index_select(0, slots)
    last_block = (lens.long() - 1).div_(block_size, rounding_mode="floor")
    # Short rows repeat their own last block: what lies behind a table's end is not to be read.
    columns = torch.arange(-(-length // block_size), device=lens.device).minimum(last_block[:, None])
    blocks = tables.gather(1, columns).flatten()
    positions = lens[:, None] - num_queries + torch.arange(num_queries, device=lens.device)
    if not window:
        mask = _hide(torch.arange(length, device=lens.device) > positions[..., None], dtype)
        return RowGroup(start, len(lens), num_queries, length, blocks, positions, mask)
    first_keys = (positions[:, :1] - window + 1).clamp_(min=0)
    keys = first_keys + torch.arange(min(length, window + num_queries - 1), device=lens.device)
    mask = _hide((keys[:, None] > positions[..., None]) | (keys[:, None] <= positions[..., None] - window), dtype)
    keys = keys.minimum(lens[:, None].long() - 1)  # short rows repeat their last key, which is hidden
    cells = tables.gather(1, keys // block_size).long() * block_size + keys % block_size
    return RowGroup(start, len(lens), num_queries, length, blocks, positions, mask, cells.flatten())


def _hide(hidden: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return what hides keys when added to the scores; hidden: [num_rows, num_queries, keys]."""
    if not bool(hidden.any()):
        return None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None]


def paged_attention(
    query: Tensor, cache: LayerCache, plan: CpuAttentionPlan, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """Gather each group's keys and values, then attend to them."""
    num_tokens, num_heads, head_dim = query.shape
    groups = plan.find_groups(options.window)
    if len(groups) == 1 and groups[0].num_rows * groups[0].num_queries == num_tokens:
        return attend_group(query, cache, groups[0], options).reshape(num_tokens, num_heads * head_dim)
    result = query.new_zeros(query.shape)
    for group in groups:
        tokens = slice(group.start, group.start + group.num_rows * group.num_queries)
        result[tokens] = attend_group(query[tokens], cache, group, options)
    return result.view(num_tokens, num_heads * head_dim)


def attend_group(query: Tensor, cache: LayerCache, group: RowGroup, options: AttentionOptions) -> Tensor:
    """Attend the fastest way that the operands permit."""
    is_native = query.dtype == torch.float32 and cache.dtype in NATIVE_CELLS and cache.cells.is_contiguous()
    is_native = is_native and query.shape[2] % LANES == 0 and query.shape[2] <= MOST_HEAD_DIM
    if group.num_queries == 1 and is_native and not options.chunk and is_in_use():
        return attend_native(query, cache, group, options)
    return attend_torch(query, cache, group, options)


def attend_native(query: Tensor, cache: LayerCache, group: RowGroup, options: AttentionOptions) -> Tensor:
    """Attend from rows of one query each, in one pass over the cache."""
    num_rows, num_heads, head_dim = query.shape
    block_size, kv_heads = cache.block_size, cache.kv_heads
    assert query.stride()[1:] == (head_dim, 1) and group.blocks.is_contiguous()
    assert group.blocks.dtype == torch.int32 and group.positions.dtype == torch.int64
    sinks = None if options.sinks is None else options.sinks.data_ptr()
    result, cells = torch.empty(num_rows, num_heads, head_dim), cache.cells
    is_half = cells.dtype == torch.float16
    lib.blink_attend_rows(
        query.data_ptr(), query.stride(0), cells.data_ptr(), is_half, cache.num_blocks * block_size,
        group.blocks.data_ptr(), group.positions.data_ptr(), sinks, result.data_ptr(), num_rows,
        group.blocks.shape[0] // num_rows, block_size, kv_heads, num_heads // kv_heads, head_dim, options.window,
        options.scale_for(head_dim), options.softcap, find_thread_pool(),
    )  # fmt: skip
    return result


def attend_torch(query: Tensor, cache: LayerCache, group: RowGroup, options: AttentionOptions) -> Tensor:
    """Attend with PyTorch, over gathered keys and values."""
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    is_fp8 = cache.dtype == FP8
    keys, values = (
        gather(cells, group) for cells in (cache.cells.view(torch.uint8) if is_fp8 else (cache.keys, cache.values))
    )
    if is_fp8:
        keys, values = keys.view(FP8).to(query.dtype), values.view(FP8).float()
        values = values.mul_(options.kv_scales.value).to(query.dtype)
    elif cache.dtype != query.dtype:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    per_row = query.view(group.num_rows, group.num_queries, -1, head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    mask = _mask_chunks(group, options.chunk, query.dtype)
    scale = options.scale_for(head_dim)
    if options.softcap or options.sinks is not None:
        return _attend_plainly(per_row, keys, values, mask, options).reshape(query.shape)
    if group.num_queries == 1:
        # The query heads that share a KV head stand where queries of one head would: no key is repeated or read twice.
        shared = per_row.view(group.num_rows, kv_heads, -1, head_dim)
        mask = None if mask is None else mask.expand(-1, kv_heads, shared.shape[2], -1)
        found = functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask, scale=scale)
        return found.reshape(query.shape)
    found = functional.scaled_dot_product_attention(
        per_row.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return found.transpose(1, 2).reshape(query.shape)


def _mask_chunks(group: RowGroup, chunk: int, dtype: torch.dtype) -> Tensor | None:
    """Return the group's mask, with the keys hidden that lie before each query's chunk; its keys begin at 0."""
    if not chunk or chunk >= group.length:
        return group.mask
    keys, positions = torch.arange(group.length, device=group.positions.device), group.positions[..., None]
    return _hide((keys > positions) | (keys < positions - positions % chunk), dtype)


def gather(part: Tensor, group: RowGroup) -> Tensor:
    """Return a group's keys or values [num_rows, keys, kv_heads, head_dim]; part: all that the cache has of them."""
    if group.cells is not None:
        return part.flatten(0, 1).index_select(0, group.cells).unflatten(0, (group.num_rows, -1))
    blocks = part.flatten(1).index_select(0, group.blocks)
    return blocks.view(group.num_rows, -1, *part.shape[2:])[:, : group.length]


def _attend_plainly(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attend with capped scores or sinks; query: [rows, queries, heads, dim], keys: [rows, kv_heads, length, dim]."""
    rows, num_queries, num_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.transpose(1, 2).reshape(rows, kv_heads, -1, head_dim)
    scores = (grouped @ keys.transpose(2, 3)).float() * options.scale_for(head_dim)
    scores = scores.view(rows, num_heads, num_queries, -1)
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(rows, -1, num_queries, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    found = weights.to(values.dtype).reshape(rows, kv_heads, -1, keys.shape[2]) @ values
    return found.view(rows, num_heads, num_queries, head_dim).transpose(1, 2)
