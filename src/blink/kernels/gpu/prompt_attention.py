# SPDX-License-Identifier: Apache-2.0
"""Attention of rows with many queries by Hopper's warpgroup products: csrc/gpu/prompts/attention.cu."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.attention_work import Tile, WorkList
from blink.kernels.gpu.decode.launch import can_multiply_groups, compile_kernel, launch
from blink.kernels.gpu.decode.tensor_map import encode_token_groups
from blink.kernels.operands import AttentionOptions

_SOURCE = "prompts/attention.cu"
_HEAD_DIM, _KEYS = 128, 128  # of a head; of a turn
_SHARED_BYTES = 161 << 10  # tiles.cuh's PromptShared
# As many programs as an H100 or H200 has multiprocessors beside the resident scheduler's.
TILE = Tile(
    block_m=128, block_n=_KEYS, combined_pairs=16, min_chunk=512, num_programs=131, num_warps=12, num_stages=2,
    by_warpgroups=True,
)  # fmt: skip


def can_attend_prompts(kv_cache: Tensor, group: int, dtype: torch.dtype) -> bool:
    """Tell whether the kernel takes a layer's cache, so many query heads per KV head, and queries of a type."""
    block_size, _, head_dim = kv_cache.shape[2:]
    sizes = head_dim == _HEAD_DIM and block_size % 8 == 0 and _KEYS % block_size == 0 and group <= TILE.block_m
    return sizes and dtype == kv_cache.dtype == torch.bfloat16 and kv_cache.is_cuda and can_multiply_groups()


def attend_prompts(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    work: WorkList,
    result: Tensor,
    options: AttentionOptions,
) -> None:
    """Write the attention of a work list made for TILE to result [tokens, heads * head_dim].

    query: [tokens, heads, head_dim]; options: plain; the rest as in paged_attention().
    """
    _, num_heads, head_dim = query.shape
    block_size, kv_heads, _ = kv_cache.shape[2:]
    group = num_heads // kv_heads
    assert can_attend_prompts(kv_cache, group, query.dtype) and options.is_plain
    arguments = args(
        "PromptArgs",
        cells=encode_token_groups(kv_cache),
        query=query,
        block_tables=block_tables,
        items=work.items,
        counters=work.counters,
        partials=work.partials,
        lses=work.lses,
        out=result,
        scale=options.scale_for(head_dim) * math.log2(math.e),
        table_stride=block_tables.stride(0),
    )
    launch(
        compile_kernel(f"blink::attend_prompts<{group}, {kv_heads}, {block_size}>", _SOURCE),
        (kv_heads, len(work.items)),
        32 * TILE.num_warps,
        arguments,
        shared_bytes=_SHARED_BYTES,
    )
