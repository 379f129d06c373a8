# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""The update of a GEMM's results where a step has few tokens: each adapter of it has programs of its own.

The step's adapters are listed once. So a program knows its matrices before the kernel in front of it has ended, and
loads them while it waits. Shrink shares k, and expand adds the parts up in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.lora.stack import MOST_RANK_TILE, Stack
from blink.kernels.gpu.lora.update import add_to_rows, find_first
from blink.kernels.gpu.pdl import launch_options

MOST_TOKENS = 64
_MOST_WAYS = 16  # adapters that have programs; of more, a program has several
_CHUNK_BYTES = 512  # of a row, for one program of shrink
_MOST_TILE, _WIDE = 256, 8192  # rows of a weight that a program of expand has, where the weight has more than so many
_SUMMED = 8192  # numbers of shrink's parts that a program of expand has at once


def list_adapters(places: Tensor) -> Tensor:
    """Return the different places of tokens that are not 0, in the order of tokens, and zeros: int32.

    places: int32 [tokens], up to MOST_TOKENS.
    """
    assert len(places) <= MOST_TOKENS
    found = torch.zeros(MOST_TOKENS + _MOST_WAYS, dtype=torch.int32, device=places.device)
    _list[(1,)](places, found, len(places), BLOCK=MOST_TOKENS, num_warps=4)
    return found


def shrink(x: Tensor, stack: Stack, places: Tensor, adapters: Tensor, *, early: bool) -> Tensor:
    """Return x [tokens, in] times A of each token's adapter, in parts of k: float32 [parts, tokens, matrices * rank].

    What tokens without an adapter have there is undefined. early: the kernels before and after are launched early.
    """
    (tokens, size), width = x.shape, stack.down.shape[1]
    chunk, rank_tile = _CHUNK_BYTES // x.element_size(), min(stack.rank, MOST_RANK_TILE)
    shares, ways = triton.cdiv(size, chunk), count_ways(stack, tokens)
    found = torch.empty(shares, tokens, width, dtype=torch.float32, device=x.device)
    assert x.stride(1) == 1
    _shrink[(width // rank_tile, shares, ways)](
        x, stack.down, places, adapters, found, tokens, size, width, x.stride(0), stack.down.stride(0),
        WAYS=ways, BLOCK=_block(tokens), CHUNK=chunk, RANK_TILE=rank_tile, **_launch(x, early=early),
    )  # fmt: skip
    return found


def expand(
    result: Tensor,
    found: Tensor,
    stack: Stack,
    places: Tensor,
    adapters: Tensor,
    factors: Tensor | None,
    *,
    early: bool,
) -> None:
    """Add B times what shrink() found to result [tokens, out], in place; factors: float32 [tokens], or none."""
    shares, tokens, width = found.shape
    out, rank, block = stack.up.shape[1], stack.rank, _block(tokens)
    tile = _MOST_TILE if out > _WIDE and stack.tile % _MOST_TILE == 0 else min(stack.tile, MOST_RANK_TILE)
    ways, rank_tile = count_ways(stack, tokens), min(rank, MOST_RANK_TILE)
    group = max(1, min(triton.next_power_of_2(shares), _SUMMED // (block * rank_tile)))
    assert result.stride(1) == 1 and result.shape == (tokens, out)
    _expand[(out // tile, ways)](
        found, factors, stack.up, stack.parts, places, adapters, result,
        tokens, shares, width, result.stride(0), stack.up.stride(0), stack.tile // tile,
        WAYS=ways, BLOCK=block, TILE=tile, RANK=rank, RANK_TILE=rank_tile, GROUP=group, **_launch(result, early=early),
    )  # fmt: skip


def count_ways(stack: Stack, tokens: int) -> int:
    """Return how many adapters have programs of their own."""
    return min(len(stack.up), tokens, _MOST_WAYS)


def _block(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def _launch(x: Tensor, *, early: bool) -> dict[str, bool | int]:
    pdl = early and x.is_cuda and has_clusters()
    return {"PDL": pdl, "num_warps": 4, **launch_options(pdl=pdl)}


@triton.jit
def _list(places, found, tokens, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < tokens, other=0)
    is_first = find_first(place, BLOCK)
    tl.store(found + tl.cumsum(is_first.to(tl.int32), axis=0) - 1, place, mask=is_first)


@triton.jit
def _load_matrix(matrices, one, stride, at, k, size):
    """Load a tile of the matrix of place `one`, whose elements' first index is k: zeros where that is 0."""
    end = tl.where(one > 0, size, 0)
    return tl.load(matrices + (one - 1).to(tl.int64) * stride + at, mask=(k < end)[:, None], other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _shrink(
    x, down, places, adapters, found, tokens, size, width, x_stride, down_stride,
    WAYS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, RANK_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write x A^T over a part of k for some rows of A, of the tokens of one adapter."""
    if PDL:
        gdc_launch_dependents()
    token, nth = tl.arange(0, BLOCK), tl.program_id(2)
    column = tl.program_id(0) * RANK_TILE + tl.arange(0, RANK_TILE)
    k = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = tl.load(places + token, mask=token < tokens, other=0)
    one = tl.load(adapters + nth)
    matrix = column[None, :] * size + k[:, None]
    right = _load_matrix(down, one, down_stride, matrix, k, size)
    if PDL:
        gdc_wait()
    while one > 0:
        rows = place == one
        at = token.to(tl.int64)[:, None] * x_stride + k[None, :]
        left = tl.load(x + at, mask=rows[:, None] & (k < size)[None, :], other=0.0)
        total = tl.dot(left, right, input_precision="ieee")
        row = (tl.program_id(1) * tokens + token).to(tl.int64)
        tl.store(found + row[:, None] * width + column[None, :], total, mask=rows[:, None])
        nth += WAYS
        one = tl.load(adapters + nth)
        right = _load_matrix(down, one, down_stride, matrix, k, size)


@triton.jit
def _add_parts(found, columns, rows, tokens, shares, width, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return the sum of shrink's parts at some columns, of some tokens."""
    token, split = tl.arange(0, BLOCK), tl.arange(0, GROUP)
    total = tl.zeros([BLOCK, columns.shape[0]], tl.float32)
    for first in range(0, shares, GROUP):
        row = (first + split).to(tl.int64)[:, None] * tokens + token[None, :]
        is_there = ((first + split) < shares)[:, None] & rows[None, :]
        at = row[:, :, None] * width + columns[None, None, :]
        total += tl.sum(tl.load(found + at, mask=is_there[:, :, None], other=0.0), axis=0)
    return total


@triton.jit(do_not_specialize=["tokens", "shares"])
def _expand(
    found, factors, up, parts, places, adapters, result, tokens, shares, width, result_stride, up_stride, scale,
    WAYS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add what B makes of shrink's results to a tile of the weight's rows, of the tokens of one adapter."""
    if PDL:
        gdc_launch_dependents()
    token, nth, rank = tl.arange(0, BLOCK), tl.program_id(1), tl.arange(0, RANK_TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.load(places + token, mask=token < tokens, other=0)
    one = tl.load(adapters + nth)
    start = tl.load(parts + tl.program_id(0) // scale) * RANK
    matrix = column[None, :] * RANK + rank[:, None]
    right = _load_matrix(up, one, up_stride, matrix, rank, RANK)
    if PDL:
        gdc_wait()
    while one > 0:
        rows = place == one
        total = tl.zeros([BLOCK, TILE], tl.float32)
        for first in range(0, RANK, RANK_TILE):
            left = _add_parts(found, start + first + rank, rows, tokens, shares, width, BLOCK, GROUP)
            if factors is not None:
                left *= tl.load(factors + token, mask=rows, other=0.0)[:, None]
            if first > 0:
                right = _load_matrix(up, one, up_stride, matrix + first, rank, RANK)
            total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
        add_to_rows(result, result_stride, token, column, total, rows)
        nth += WAYS
        one = tl.load(adapters + nth)
        right = _load_matrix(up, one, up_stride, matrix, rank, RANK)
