# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""The update of experts' results by the adapters of tokens: a kernel for x A^T (shrink), another for B (expand).

Of few pairs of a token and an expert, each has programs of its own. Of many, a program has a tile of an expert's pairs
and goes through the adapters in it. Both add up in an order that does not hang on other pairs' programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.formats.experts import ExpertWeights
from blink.kernels.gpu.lora.stack import MOST_RANK_TILE, Stack
from blink.kernels.gpu.lora.update import add_to_rows, find_place
from blink.kernels.gpu.moe.routing import Routes, find_tile

MOST_PAIRS = 512  # that have programs of their own
_CHUNK = 256  # of k, for one program of shrink where pairs are few
_BLOCK, _TILE = 64, 64  # pairs, and rows of a weight, of a program where they are many
_BLOCK_K_BYTES = 128


class PairUpdates:
    """The updates of a step's pairs with experts of one layer."""

    def __init__(self, stacks: Mapping[int, Stack], places: Tensor, routes: Routes, top_k: int) -> None:
        """Take the stacks of weights by identity, and each token's place in them, as mark_tokens() returns it."""
        self._stacks, self._places, self._routes, self._top_k = stacks, places, routes, top_k

    def add(self, result: Tensor, x: Tensor, weight: ExpertWeights, *, pairs_per_row: int) -> None:
        """Do what AddedPairs.add() of gpu/moe/grouped.py says."""
        stack = self._stacks.get(id(weight))
        if stack is None:
            return
        assert x.stride(1) == result.stride(1) == 1 and len(result) == len(self._places) * self._top_k
        if len(result) <= MOST_PAIRS:
            self._add_few(result, x, stack, pairs_per_row)
        else:
            self._add_many(result, x, stack, pairs_per_row)

    @cached_property
    def _experts(self) -> Tensor:
        """Each pair's expert, -1 for none: int32 [pairs]."""
        pairs, counts = self._routes.pairs, self._routes.counts
        found = torch.full((len(self._places) * self._top_k,), -1, dtype=torch.int32, device=pairs.device)
        _list_experts[(len(counts),)](pairs, counts, found, pairs.shape[1], BLOCK=128, num_warps=1)
        return found

    def _add_few(self, result: Tensor, x: Tensor, stack: Stack, pairs_per_row: int) -> None:
        (num_pairs, out), size, width = result.shape, x.shape[1], stack.down.shape[2]
        rank, rank_tile, tile = stack.rank, min(stack.rank, MOST_RANK_TILE), min(stack.tile, _TILE)
        shares = triton.cdiv(size, _CHUNK)
        found = torch.empty(shares, num_pairs, width, dtype=torch.float32, device=x.device)
        _shrink_pair[(num_pairs, width // rank_tile, shares)](
            x, stack.down, self._experts, self._places, found, num_pairs, size, width, x.stride(0),
            stack.down.stride(0),
            TOP_K=self._top_k, PAIRS_PER_ROW=pairs_per_row, CHUNK=_CHUNK, RANK_TILE=rank_tile, num_warps=4,
        )  # fmt: skip
        _expand_pair[(num_pairs, out // tile)](
            found, stack.up, stack.parts, self._experts, self._places, result, num_pairs, shares, width,
            result.stride(0), stack.up.stride(0), out, stack.tile // tile,
            TOP_K=self._top_k, TILE=tile, RANK=rank, RANK_TILE=rank_tile, num_warps=4,
        )  # fmt: skip

    def _add_many(self, result: Tensor, x: Tensor, stack: Stack, pairs_per_row: int) -> None:
        (num_pairs, out), size, width = result.shape, x.shape[1], stack.down.shape[2]
        rank, rank_tile, tile = stack.rank, min(stack.rank, MOST_RANK_TILE), min(stack.tile, _TILE)
        (experts, most), counts = self._routes.pairs.shape, self._routes.counts
        # Every expert in use may leave one tile partly filled.
        tiles = min(experts, num_pairs) + num_pairs // _BLOCK
        sizes = {"BLOCK": _BLOCK, "EXPERTS_BLOCK": triton.next_power_of_2(experts), "TOP_K": self._top_k}
        found = torch.empty(num_pairs, width, dtype=torch.float32, device=x.device)
        _shrink_tile[(tiles, width // rank_tile)](
            x, stack.down, self._routes.pairs, counts, self._places, found, most, experts, size, width, x.stride(0),
            stack.down.stride(0),
            PAIRS_PER_ROW=pairs_per_row, BLOCK_K=_BLOCK_K_BYTES // x.element_size(), RANK_TILE=rank_tile, **sizes,
            num_warps=4,
        )  # fmt: skip
        _expand_tile[(tiles, out // tile)](
            found, stack.up, stack.parts, self._routes.pairs, counts, self._places, result, most, experts, width,
            result.stride(0), stack.up.stride(0), out, stack.tile // tile,
            TILE=tile, RANK=rank, RANK_TILE=rank_tile, **sizes, num_warps=4,
        )  # fmt: skip


@triton.jit
def _list_experts(pairs, counts, found, most, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.load(counts + expert)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        pair = tl.load(pairs + expert.to(tl.int64) * most + at, mask=at < count, other=0)
        tl.store(found + pair, tl.zeros_like(pair) + expert, mask=at < count)


@triton.jit
def _shrink_pair(
    x, down, experts, places, found, num_pairs, size, width, x_stride, down_stride,
    TOP_K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, CHUNK: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """Write x A^T over a part of k for some rows of A, of one pair."""
    pair = tl.program_id(0)
    expert, place = tl.load(experts + pair), tl.load(places + pair // TOP_K)
    if (expert < 0) | (place == 0):
        return
    column = tl.program_id(1) * RANK_TILE + tl.arange(0, RANK_TILE)
    k = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    left = tl.load(x + (pair // PAIRS_PER_ROW).to(tl.int64) * x_stride + k, mask=k < size, other=0.0)
    matrix = down + (place - 1).to(tl.int64) * down_stride + expert.to(tl.int64) * width * size
    right = tl.load(matrix + column[:, None] * size + k[None, :], mask=(k < size)[None, :], other=0.0)
    total = tl.sum(right.to(tl.float32) * left.to(tl.float32)[None, :], axis=1)
    row = tl.program_id(2) * num_pairs + pair
    tl.store(found + row.to(tl.int64) * width + column, total)


@triton.jit
def _expand_pair(
    found, up, parts, experts, places, result, num_pairs, shares, width, result_stride, up_stride, out, scale,
    TOP_K: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """Add what B makes of shrink's results to a tile of the weight's rows, of one pair."""
    pair = tl.program_id(0)
    expert, place = tl.load(experts + pair), tl.load(places + pair // TOP_K)
    if (expert < 0) | (place == 0):
        return
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    start = tl.load(parts + tl.program_id(1) // scale) * RANK
    matrix = up + (place - 1).to(tl.int64) * up_stride + expert.to(tl.int64) * out * RANK
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, RANK, RANK_TILE):
        rank = first + tl.arange(0, RANK_TILE)
        left = tl.zeros([RANK_TILE], tl.float32)
        for share in range(shares):
            left += tl.load(found + (share * num_pairs + pair).to(tl.int64) * width + start + rank)
        right = tl.load(matrix + column[:, None] * RANK + rank[None, :])
        rounded = left.to(right.dtype).to(tl.float32)  # as tiles round it
        total += tl.sum(right.to(tl.float32) * rounded[None, :], axis=1)
    target = result + pair.to(tl.int64) * result_stride + column
    old = tl.load(target)
    tl.store(target, (old.to(tl.float32) + total).to(old.dtype))


@triton.jit
def _load_tile(
    pairs, counts, places, most, experts, BLOCK: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TOP_K: tl.constexpr
):
    """Return the program's expert, its pairs, and their adapters' places, 0 where a pair is none or has none."""
    expert, row, count = find_tile(counts, experts, BLOCK, EXPERTS_BLOCK)
    rows = row + tl.arange(0, BLOCK)
    is_there = rows < count
    pair = tl.load(pairs + expert.to(tl.int64) * most + rows, mask=is_there, other=0)
    return expert, pair, tl.load(places + pair // TOP_K, mask=is_there, other=0)


@triton.jit
def _shrink_tile(
    x, down, pairs, counts, places, found, most, experts, size, width, x_stride, down_stride,
    PAIRS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """Write x A^T for some rows of A, of a tile of an expert's pairs."""
    expert, pair, place = _load_tile(pairs, counts, places, most, experts, BLOCK, EXPERTS_BLOCK, TOP_K)
    column = tl.program_id(1) * RANK_TILE + tl.arange(0, RANK_TILE)
    nth = 0
    one = find_place(place, nth, BLOCK)
    while one > 0:
        rows = place == one
        matrix = down + (one - 1).to(tl.int64) * down_stride + expert.to(tl.int64) * width * size
        total = tl.zeros([BLOCK, RANK_TILE], tl.float32)
        for first in range(0, size, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            at = (pair // PAIRS_PER_ROW).to(tl.int64)[:, None] * x_stride + k[None, :]
            left = tl.load(x + at, mask=rows[:, None] & (k < size)[None, :], other=0.0)
            right = tl.load(matrix + column[None, :] * size + k[:, None], mask=(k < size)[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(found + pair.to(tl.int64)[:, None] * width + column[None, :], total, mask=rows[:, None])
        nth += 1
        one = find_place(place, nth, BLOCK)


@triton.jit
def _expand_tile(
    found, up, parts, pairs, counts, places, result, most, experts, width, result_stride, up_stride, out, scale,
    BLOCK: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """Add what B makes of shrink's results to a tile of the weight's rows, of a tile of an expert's pairs."""
    expert, pair, place = _load_tile(pairs, counts, places, most, experts, BLOCK, EXPERTS_BLOCK, TOP_K)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    start = tl.load(parts + tl.program_id(1) // scale) * RANK
    nth = 0
    one = find_place(place, nth, BLOCK)
    while one > 0:
        rows = place == one
        matrix = up + (one - 1).to(tl.int64) * up_stride + expert.to(tl.int64) * out * RANK
        total = tl.zeros([BLOCK, TILE], tl.float32)
        for first in range(0, RANK, RANK_TILE):
            rank = first + tl.arange(0, RANK_TILE)
            at = pair.to(tl.int64)[:, None] * width + (start + rank)[None, :]
            left = tl.load(found + at, mask=rows[:, None], other=0.0)
            right = tl.load(matrix + column[None, :] * RANK + rank[:, None])
            total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
        add_to_rows(result, result_stride, pair, column, total, rows)
        nth += 1
        one = find_place(place, nth, BLOCK)
