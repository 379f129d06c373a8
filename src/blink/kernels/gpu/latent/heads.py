# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportMissingParameterType=false
# pyright: reportOperatorIssue=false
"""GEMMs with the heads' matrices, of as many tokens as a step turns out to have: expanded ones, or absorbed queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.gpu.latent.rows import ExpandedRows
from blink.kernels.gpu.latent.store import find_stride
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import ExpandedSizes, Expansion

PROGRAMS = 264  # of a launch that does not know how many tokens are expanded
_TOKENS, _COLUMNS, _INNER = 128, 64, 64  # of a tile of expanded tokens
_FEW_TOKENS, _WIDE_COLUMNS = 64, 128  # of a tile of absorbed ones


class ExpandedTokens(NamedTuple):
    """Keys and values of a layer's expanded tokens, in the order of ExpandedRows."""

    keys: Tensor  # [heads, places, nope]
    values: Tensor  # [heads, places, value]
    rotated: Tensor  # [places, rope], what all heads' keys end with; without a cache's scale, as keys and values are

    @classmethod
    def allocate(cls, sizes: ExpandedSizes, places: int, dtype: torch.dtype, device: torch.device) -> ExpandedTokens:
        """Allocate those of so many tokens; no layer needs what another has left there."""
        heads, widths = sizes.latents.heads, (sizes.nope, sizes.value)
        keys, values = (torch.empty(heads, places, width, dtype=dtype, device=device) for width in widths)
        return cls(keys, values, torch.empty(places, sizes.latents.rope, dtype=dtype, device=device))


def count_bytes(sizes: ExpandedSizes, itemsize: int) -> int:
    """Return the bytes of an expanded token."""
    return itemsize * (sizes.latents.heads * (sizes.nope + sizes.value) + sizes.latents.rope)


def expand_tokens(cache: LayerCache, rows: ExpandedRows, expansion: Expansion, tokens: ExpandedTokens) -> None:
    """Write keys and values of the expanded tokens, made of what the cache keeps of them."""
    _expand(expansion.keys, tokens.keys, tokens.rotated, cache, rows, rotates=True)
    _expand(expansion.values, tokens.values, tokens.rotated, cache, rows, rotates=False)


def _expand(
    matrices: Tensor, target: Tensor, rotated: Tensor, cache: LayerCache, rows: ExpandedRows, *, rotates: bool
) -> None:
    heads, width, rank = matrices.shape
    rope = rotated.shape[1]
    assert target.is_contiguous() and rotated.is_contiguous() and cache.cells.is_contiguous()
    assert cache.head_dim == rank + rope and target.shape == (heads, rows.sources.shape[0], width)
    _expand_tokens[(PROGRAMS,)](
        matrices, find_stride(matrices), cache.cells, rows.sources, rows.used, target, rotated, target.shape[1],
        HEADS=heads, WIDTH=width, RANK=rank, ROPE=rope, COPIES_ROTATED=rotates, BLOCK_TOKENS=_TOKENS,
        BLOCK_COLUMNS=_COLUMNS, BLOCK_INNER=_INNER, BLOCK_ROPE=triton.next_power_of_2(rope),
        PRECISION=_precision(target), num_warps=4, num_stages=3,
    )  # fmt: skip


def multiply_absorbed(x: Tensor, matrices: Tensor, target: Tensor, rows: ExpandedRows) -> None:
    """Write x times each head's matrix to target, for tokens of rows that are not expanded.

    x: [tokens, heads, k]; matrices: [heads, k, n], or a transposed view; target: [tokens, heads, n].
    """
    (tokens, heads, inner), columns = x.shape, target.shape[2]
    assert matrices.shape == (heads, inner, columns) and x.stride(2) == 1 and target.stride(2) == 1
    _multiply_absorbed[(triton.cdiv(tokens, _FEW_TOKENS), triton.cdiv(columns, _WIDE_COLUMNS), heads)](
        x, *x.stride()[:2], matrices, *matrices.stride(), target, *target.stride()[:2], rows.is_absorbed, tokens,
        INNER=inner, COLUMNS=columns, BLOCK_TOKENS=_FEW_TOKENS, BLOCK_COLUMNS=_WIDE_COLUMNS, BLOCK_INNER=_INNER,
        PRECISION=_precision(target), num_warps=4, num_stages=3,
    )  # fmt: skip


def _precision(x: Tensor) -> str:
    return "ieee" if x.itemsize == 4 else "tf32"


@triton.jit
def _expand_tokens(
    matrices, stride, cells, sources, used, target, rotated, num_places,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, COPIES_ROTATED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply tiles of latents with tiles of heads' matrices, one after the other until all tokens have theirs."""
    PARTS: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num_tiles = tl.cdiv(tl.load(used), BLOCK_TOKENS) * (PARTS * HEADS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        head, part = tile // PARTS % HEADS, tile % PARTS
        places = tile // (PARTS * HEADS) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        source = tl.load(sources + places, mask=places < num_places, other=-1).to(tl.int64)
        is_token = source >= 0
        cell = cells + source * (RANK + ROPE)
        columns = part * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        total = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
        for first in range(0, RANK, BLOCK_INNER):
            inner = first + tl.arange(0, BLOCK_INNER)
            taken = is_token[:, None] & (inner < RANK)[None, :]
            latents = tl.load(cell[:, None] + inner[None, :], mask=taken, other=0.0).to(target.dtype.element_ty)
            inside = (columns < WIDTH)[:, None] & (inner < RANK)[None, :]
            of_head = matrices + head * stride + columns[:, None] * RANK + inner[None, :]
            weights = tl.load(of_head, mask=inside, other=0.0)
            total = tl.dot(latents, tl.trans(weights), total, input_precision=PRECISION)
        row = target + (head * num_places + places).to(tl.int64) * WIDTH
        inside = is_token[:, None] & (columns < WIDTH)[None, :]
        tl.store(row[:, None] + columns[None, :], total.to(target.dtype.element_ty), mask=inside)
        if COPIES_ROTATED:  # noqa: SIM102 - known at compile time, which the other is not
            if (head == 0) & (part == 0):
                dims = tl.arange(0, BLOCK_ROPE)
                is_there = is_token[:, None] & (dims < ROPE)[None, :]
                keys = tl.load(cell[:, None] + RANK + dims[None, :], mask=is_there, other=0.0)
                copied = rotated + places.to(tl.int64)[:, None] * ROPE + dims[None, :]
                tl.store(copied, keys.to(rotated.dtype.element_ty), mask=is_there)


@triton.jit
def _multiply_absorbed(
    x, x_token_stride, x_head_stride, matrices, head_stride, inner_stride, column_stride, target, token_stride,
    target_head_stride, is_absorbed, num_tokens, INNER: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens with a tile of a head's matrix, if one of the tokens is absorbed."""
    head = tl.program_id(2)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_token = tl.load(is_absorbed + token, mask=token < num_tokens, other=0) > 0
    if tl.sum(is_token.to(tl.int32)) == 0:
        return
    total = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
    row, of_head = x + token.to(tl.int64) * x_token_stride + head * x_head_stride, matrices + head * head_stride
    for first in range(0, INNER, BLOCK_INNER):
        inner = first + tl.arange(0, BLOCK_INNER)
        is_inner = inner < INNER
        values = tl.load(row[:, None] + inner[None, :], mask=is_token[:, None] & is_inner[None, :], other=0.0)
        place = inner[:, None] * inner_stride + column[None, :] * column_stride
        weights = tl.load(of_head + place, mask=is_inner[:, None] & (column < COLUMNS)[None, :], other=0.0)
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    row = target + token.to(tl.int64) * token_stride + head * target_head_stride
    inside = is_token[:, None] & (column < COLUMNS)[None, :]
    tl.store(row[:, None] + column[None, :], total.to(target.dtype.element_ty), mask=inside)
