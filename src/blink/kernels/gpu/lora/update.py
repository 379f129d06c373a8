# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""The update of a GEMM's results by the adapters of its tokens: a kernel for x A^T (shrink), another for B (expand).

A program has a tile of tokens, and goes through the adapters in it. Each token has one adapter at most. Shrink shares
k, and expand adds the parts up. Few tokens have kernels of their own (few_tokens.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.batch import PARAM_WORDS, Batch, Param
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.lora.stack import MOST_RANK_TILE, Stack
from blink.kernels.gpu.pdl import launch_options, start_pdl

_BLOCK, _TILE = 64, 64  # tokens, and rows of a weight, of a program
_CHUNK = 512  # of k, for one program of shrink where tokens are few
_MANY_PROGRAMS = 256
_MOST_SUMMED = 8192  # parts of shrink's results that a program of expand has at once
_BLOCK_K_BYTES = 256


def mark_tokens(batch: Batch, places_of_slots: Tensor, num_tokens: int, num_rows: int) -> Tensor:
    """Return 1 + where the stacks have each token's adapter, 0 for none and for padding: int32 [num_tokens].

    places_of_slots: the same of the slots that rows name, int32 [slots].
    """
    places = torch.zeros(num_tokens, dtype=torch.int32, device=batch.params.device)
    _mark[(num_rows,)](
        places, batch.query_starts, batch.row_slots, batch.params, places_of_slots,
        PARAM_WORDS=PARAM_WORDS, COLUMN=int(Param.ADAPTER), BLOCK=128, num_warps=1,
    )  # fmt: skip
    return places


def add_update(
    result: Tensor, x: Tensor, stack: Stack, places: Tensor, factors: Tensor | None = None, *, early: bool = False
) -> None:
    """Add to result [tokens, out], in place, what the adapters of tokens change of x [tokens, in] times a weight.

    places: as mark_tokens() returns them; factors: float32 [tokens], what rows of x are to be multiplied by; early:
    the kernels before and after these are launched early, as these then are.
    """
    tokens, width = len(x), stack.down.shape[1]
    tiles, rank_tile = triton.cdiv(tokens, _BLOCK), min(stack.rank, MOST_RANK_TILE)
    tile = min(stack.tile, _TILE)
    block_k = _BLOCK_K_BYTES // x.element_size()
    most = min(_MANY_PROGRAMS // (tiles * width // rank_tile), _MOST_SUMMED // (_BLOCK * rank_tile))
    chunk, shares = _split(x.shape[1], max(most, 1), block_k)
    pdl = early and x.is_cuda and has_clusters()
    assert x.stride(1) == result.stride(1) == 1 and result.shape == (tokens, stack.up.shape[1])
    found = torch.empty(shares, tokens, width, dtype=torch.float32, device=x.device)
    _shrink[(tiles, width // rank_tile, shares)](
        x, stack.down, places, found, tokens, x.shape[1], width, x.stride(0), stack.down.stride(0), chunk,
        BLOCK=_BLOCK, BLOCK_K=block_k, RANK_TILE=rank_tile, PDL=pdl, num_warps=4, **launch_options(pdl=pdl),
    )  # fmt: skip
    _expand[(tiles, stack.up.shape[1] // tile)](
        found, factors, stack.up, stack.parts, places, result,
        tokens, shares, width, result.stride(0), stack.up.stride(0), stack.tile // tile,
        BLOCK=_BLOCK, TILE=tile, RANK=stack.rank, RANK_TILE=rank_tile,
        SPLITS=triton.next_power_of_2(shares), PDL=pdl, num_warps=4, **launch_options(pdl=pdl),
    )  # fmt: skip


def _split(size: int, most: int, block_k: int) -> tuple[int, int]:
    """Return how much of k a program of shrink takes, and how many programs share it: `most` of them at most."""
    most = min(triton.cdiv(size, _CHUNK), most)
    chunk = triton.cdiv(triton.cdiv(size, most), block_k) * block_k
    return chunk, triton.cdiv(size, chunk)


@triton.jit
def _mark(
    places, query_starts, row_slots, slot_params, places_of_slots,
    PARAM_WORDS: tl.constexpr, COLUMN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    slot = tl.load(slot_params + tl.load(row_slots + row).to(tl.int64) * PARAM_WORDS + COLUMN)
    place = tl.load(places_of_slots + slot - 1, mask=slot > 0, other=0)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        tl.store(places + token, place, mask=token < end)


@triton.jit
def find_first(place, BLOCK: tl.constexpr):
    """Return which tokens of a tile are the first of their place, where that is not 0."""
    at = tl.arange(0, BLOCK)
    repeats = (place[:, None] == place[None, :]) & (at[None, :] < at[:, None])
    return (tl.sum(repeats.to(tl.int32), axis=1) == 0) & (place > 0)


@triton.jit
def add_to_rows(result, stride, at, columns, total, rows):
    """Add a tile of sums to the rows `at` of a result, at some columns; rows: those to which they are to be added."""
    target = result + at.to(tl.int64)[:, None] * stride + columns[None, :]
    old = tl.load(target, mask=rows[:, None], other=0.0)
    tl.store(target, (old.to(tl.float32) + total).to(old.dtype), mask=rows[:, None])


@triton.jit
def find_place(place, nth, BLOCK: tl.constexpr):
    """Return the nth of the different places of a tile that are not 0, in the order of tokens; 0: there are fewer."""
    is_first = find_first(place, BLOCK)
    rank = tl.cumsum(is_first.to(tl.int32), axis=0)
    return tl.max(tl.where(is_first & (rank == nth + 1), place, 0), axis=0)


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x, down, places, found, tokens, size, width, x_stride, down_stride, chunk,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, RANK_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write x A^T over a part of k for some rows of A, of the tile's tokens that have an adapter."""
    if PDL:
        start_pdl()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * RANK_TILE + tl.arange(0, RANK_TILE)
    split, nth = tl.program_id(2), 0
    place = tl.load(places + token, mask=token < tokens, other=0)
    one = find_place(place, nth, BLOCK)
    while one > 0:
        rows = place == one
        matrix = down + (one - 1).to(tl.int64) * down_stride
        total = tl.zeros([BLOCK, RANK_TILE], tl.float32)
        for first in range(split * chunk, (split + 1) * chunk, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x_at = token.to(tl.int64)[:, None] * x_stride + k[None, :]
            left = tl.load(x + x_at, mask=rows[:, None] & (k < size)[None, :], other=0.0)
            right = tl.load(matrix + column[None, :] * size + k[:, None], mask=(k < size)[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        row = (split * tokens + token).to(tl.int64)
        tl.store(found + row[:, None] * width + column[None, :], total, mask=rows[:, None])
        nth += 1
        one = find_place(place, nth, BLOCK)


@triton.jit(do_not_specialize=["tokens", "shares"])
def _expand(
    found, factors, up, parts, places, result, tokens, shares, width, result_stride, up_stride, scale,
    BLOCK: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add what B makes of shrink's results to a tile of the weight's rows, of the tile's tokens with an adapter."""
    if PDL:
        start_pdl()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    nth = 0
    place = tl.load(places + token, mask=token < tokens, other=0)
    start = tl.load(parts + tl.program_id(1) // scale) * RANK
    one = find_place(place, nth, BLOCK)
    while one > 0:
        rows = place == one
        matrix = up + (one - 1).to(tl.int64) * up_stride
        total = tl.zeros([BLOCK, TILE], tl.float32)
        for first in range(0, RANK, RANK_TILE):
            rank = first + tl.arange(0, RANK_TILE)
            split = tl.arange(0, SPLITS)
            row = split.to(tl.int64)[:, None] * tokens + token[None, :]
            is_there = (split < shares)[:, None] & rows[None, :]
            at = row[:, :, None] * width + (start + rank)[None, None, :]
            left = tl.sum(tl.load(found + at, mask=is_there[:, :, None], other=0.0), axis=0)
            if factors is not None:
                left *= tl.load(factors + token, mask=rows, other=0.0)[:, None]
            right = tl.load(matrix + column[None, :] * RANK + rank[:, None])
            total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
        add_to_rows(result, result_stride, token, column, total, rows)
        nth += 1
        one = find_place(place, nth, BLOCK)
