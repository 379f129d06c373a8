# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false
"""Which rows of a step have keys and values made of latents, and of which of their tokens; decided on the GPU.

The last tokens of a row are expanded: all of its own, and of earlier ones as many as the buffer holds. Queries meet
those before them absorbed. A row that would not be quicker is not expanded at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.batch import Batch, Header
from blink.kernels.gpu.attention.work import FIRST_TOKEN, ITEM_WORDS, NUM_QUERIES, WorkList
from blink.kernels.operands import ExpandedSizes

LEAST_ALONE = 64  # queries of a row without earlier tokens, from which on it is expanded
_MOST_ROOMS = tl.constexpr(2)  # of earlier tokens, with which a row is expanded: the kernel for those left out is slow
_PLACES = 32  # of a program
_ITEMS = 128


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """What each row's expanded tokens are; in the first tensors a row more stands for padding."""

    num_expanded: Tensor  # int32 [rows + 1]; 0: the row is not expanded
    starts: Tensor  # int32 [rows + 1]; where a row's tokens lie among the expanded ones
    skipped: Tensor  # int32 [rows + 1]; earlier tokens of an expanded row that are not
    used: Tensor  # int32 [1]; expanded tokens of all rows
    sources: Tensor  # int32 [places]; the cell of each expanded token; behind the last one -1
    is_absorbed: Tensor  # int32 [tokens]; 0: the token is of an expanded row


def count_least_queries(sizes: ExpandedSizes) -> int:
    """Return how many queries make expanding an earlier token cheaper than absorbing: by multiplications of a head.

    Its key and its value take rank * (nope + value), and each query then saves the difference of both forms.
    """
    (_, rank, rope), nope, value = sizes
    absorbed, expanded = 2 * rank + rope, nope + rope + value
    return triton.cdiv(rank * (nope + value), absorbed - expanded)


def divide_rows(batch: Batch, num_tokens: int, num_rows: int, room: int, least: int, block_size: int) -> ExpandedRows:
    """Divide the rows of a bucket. room: for earlier tokens, of all rows; least: queries of a row that has such."""
    device, places = batch.header.device, num_tokens + room
    of_rows = torch.empty(3, num_rows + 1, dtype=torch.int32, device=device)
    used, sources, is_absorbed = (
        torch.empty(count, dtype=torch.int32, device=device) for count in (1, places, num_tokens)
    )
    _divide[(triton.cdiv(places, _PLACES),)](
        batch.header,
        batch.query_starts,
        batch.context_lens,
        batch.row_slots,
        batch.block_tables,
        batch.block_tables.stride(0),
        of_rows,
        used,
        sources,
        is_absorbed,
        num_rows,
        num_tokens,
        room,
        least,
        LEAST_ALONE=LEAST_ALONE,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=triton.next_power_of_2(num_rows + 1),
        BLOCK_PLACES=_PLACES,
        num_warps=8,
    )
    return ExpandedRows(*of_rows.unbind(0), used, sources, is_absorbed)


def leave_out(work: WorkList, rows: ExpandedRows) -> None:
    """Take the queries of expanded rows out of a work list that has all of them."""
    count = work.items.shape[0]
    _leave_out[(triton.cdiv(count, _ITEMS),)](
        work.items, rows.is_absorbed, count, rows.is_absorbed.shape[0], BLOCK_ITEMS=_ITEMS, num_warps=4
    )


_NUM_ROWS = tl.constexpr(int(Header.NUM_ROWS))
_NUM_DECODE_ROWS = tl.constexpr(int(Header.NUM_DECODE_ROWS))


@triton.jit
def _divide(
    header, query_starts, context_lens, row_slots, block_tables, table_stride, of_rows, used, sources, is_absorbed,
    max_rows, num_tokens, room, least, LEAST_ALONE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
):  # fmt: skip
    """Write the source of some expanded tokens and whether some tokens are absorbed; the first program writes rows."""
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < tl.load(header + _NUM_ROWS)
    queries_end = tl.load(query_starts + rows + 1, mask=is_row, other=num_tokens)
    queries = queries_end - tl.load(query_starts + rows, mask=is_row, other=num_tokens)
    earlier = tl.load(context_lens + rows, mask=is_row, other=0) - queries
    is_long = (queries >= least) | ((earlier == 0) & (queries >= LEAST_ALONE))
    is_prompt = is_row & (rows >= tl.load(header + _NUM_DECODE_ROWS)) & is_long
    wanted = tl.where(is_prompt, earlier, 0)
    is_expanded = is_prompt & ((wanted == 0) | (tl.cumsum(wanted, 0) <= _MOST_ROOMS * room))
    wanted = tl.where(is_expanded, wanted, 0)
    left = tl.maximum(room - (tl.cumsum(wanted, 0) - wanted), 0)
    taken = tl.minimum(wanted, left)
    skipped = wanted - taken
    expanded = tl.where(is_expanded, queries + taken, 0)
    ends = tl.cumsum(expanded, 0)
    starts = ends - expanded
    if tl.program_id(0) == 0:
        target, inside = of_rows + rows, rows <= max_rows
        tl.store(target, expanded, mask=inside)
        tl.store(target + max_rows + 1, starts, mask=inside)
        tl.store(target + 2 * (max_rows + 1), skipped, mask=inside)
        tl.store(used, tl.sum(expanded))
    places = tl.program_id(0) * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    row = tl.sum((ends[None, :] <= places[:, None]).to(tl.int32), axis=1)
    is_rows = row[:, None] == rows[None, :]
    position = places + tl.sum(tl.where(is_rows, (skipped - starts)[None, :], 0), axis=1)
    is_used = places < tl.sum(expanded)
    slot = tl.load(row_slots + row, mask=is_used, other=0).to(tl.int64)
    block = tl.load(block_tables + slot * table_stride + position // BLOCK_SIZE, mask=is_used, other=0)
    source = tl.where(is_used, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(sources + places, source, mask=places < num_tokens + room)
    of_token = tl.sum((queries_end[None, :] <= places[:, None]).to(tl.int32), axis=1)
    is_of_token = is_expanded[None, :] & (of_token[:, None] == rows[None, :])
    absorbed = tl.where(tl.max(is_of_token.to(tl.int32), axis=1) == 1, 0, 1)
    tl.store(is_absorbed + places, absorbed, mask=places < num_tokens)


@triton.jit
def _leave_out(items, is_absorbed, num_items, num_tokens, BLOCK_ITEMS: tl.constexpr):
    """Set the number of queries of items to 0 whose first query is of an expanded row."""
    item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    words = items + item * ITEM_WORDS
    has_queries = (item < num_items) & (tl.load(words + NUM_QUERIES, mask=item < num_items, other=0) > 0)
    first = tl.load(words + FIRST_TOKEN, mask=has_queries, other=0)
    stays = tl.load(is_absorbed + first, mask=has_queries & (first < num_tokens), other=1)
    tl.store(words + NUM_QUERIES, 0, mask=has_queries & (stays == 0))
