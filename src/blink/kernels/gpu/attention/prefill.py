# SPDX-License-Identifier: Apache-2.0
"""Attention of rows with many queries by Hopper's warpgroup MMAs (wgmma): csrc/kernels/prefill/attention.cu."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from blink.formats.base import name_dtype
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.attention.work import Tile, WorkList
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.tensor_map import encode_token_groups
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import AttentionOptions
from blink.plan.site import first_reason

if TYPE_CHECKING:
    from blink.models.layers import Attention

_SOURCE = "prefill/attention.cu"
_HEAD_DIM, _KEYS = 128, 128  # of a head; of a turn
# What stands before the kernel or behind it, and the scale.
_TAKEN_OPTIONS = ("scale", "qk_norm", "qkv_bias", "output_bias")
_SHARED_BYTES = 161 << 10  # tiles.cuh's PromptShared
# As many programs as an H100 or H200 has SMs beside the resident scheduler's.
TILE = Tile(
    block_m=128, block_n=_KEYS, combined_pairs=16, min_chunk=512, num_programs=131, num_warps=12, num_stages=2,
    by_warpgroups=True,
)  # fmt: skip


def refuses(attention: Attention, block_size: int, dtypes: tuple[str, str]) -> str | None:
    """Say why the kernel does not take a layer's attention; dtypes: of queries and of the cache. None: it takes it."""
    options = dict.fromkeys(attention.options_beyond(*_TAKEN_OPTIONS), True)
    return _refuses_sizes(attention.head_dim, attention.group, block_size, dtypes) or first_reason(options)


def _refuses_sizes(head_dim: int, group: int, block_size: int, dtypes: tuple[str, str]) -> str | None:
    """Say which size, type or device the kernel does not take; group: query heads per KV head."""
    dtype, kv_dtype = dtypes
    return first_reason(
        {
            f"heads of {head_dim}": head_dim != _HEAD_DIM,
            f"{group} query heads per KV head": group > TILE.block_m,
            f"blocks of {block_size} tokens": block_size % 8 != 0 or _KEYS % block_size != 0,
            f"queries in {dtype}": dtype != "bfloat16",
            f"a cache in {kv_dtype}": kv_dtype != dtype,
            "no Hopper": not has_warpgroups(),
        }
    )


def attend_prompts(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: WorkList,
    result: Tensor,
    options: AttentionOptions,
) -> None:
    """Write the attention of a work list made for TILE to result [tokens, heads * head_dim].

    query: [tokens, heads, head_dim]; options: no other than refuses() allows; the rest as in paged_attention().
    """
    _, num_heads, head_dim = query.shape
    block_size, kv_heads = cache.block_size, cache.kv_heads
    group = num_heads // kv_heads
    assert _refuses_sizes(head_dim, group, block_size, (name_dtype(query.dtype), name_dtype(cache.dtype))) is None
    assert not (options.window or options.softcap) and options.sinks is None
    arguments = pack_arguments(query, cache, block_tables, work, result, options.scale_for(head_dim))
    launch(
        compile_kernel(f"blink::attend_prompts<{group}, {kv_heads}, {block_size}>", _SOURCE),
        (kv_heads, len(work.items)),
        32 * TILE.num_warps,
        arguments,
        shared_bytes=_SHARED_BYTES,
    )


def pack_arguments(
    query: Tensor, cache: LayerCache, block_tables: Tensor, work: WorkList, result: Tensor, scale: float
) -> bytes:
    """Return what kernels of warpgroups take; scale: of the scores, whose exponentials are powers of 2."""
    return args(
        "PromptArgs",
        cells=encode_token_groups(cache),
        query=query,
        block_tables=block_tables,
        items=work.items,
        counters=work.counters,
        partials=work.partials,
        lses=work.lses,
        out=result,
        scale=scale * math.log2(math.e),
        table_stride=block_tables.stride(0),
    )
