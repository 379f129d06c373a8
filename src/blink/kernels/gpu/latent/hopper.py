# SPDX-License-Identifier: Apache-2.0
"""Latent attention by Hopper's warpgroup MMAs (wgmma): csrc/kernels/attention/latent.cu."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from blink.formats.base import name_dtype
from blink.kernels.gpu.attention.prefill import pack_arguments
from blink.kernels.gpu.attention.work import Tile, WorkList
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.latent.sizes import count_heads
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import LatentSizes
from blink.plan.site import first_reason

_SOURCE = "attention/latent.cu"
_RANK, _ROPE, _KEYS = 512, 64, 64  # of what a token keeps; keys of a turn
_SHARED_BYTES = 217 << 10  # latent.cu's LatentShared
# Of long rows and of rows of one token; as many programs as an H100 or H200 has SMs beside the resident scheduler's.
TILE = Tile(
    block_m=64, block_n=_KEYS, combined_pairs=1, min_chunk=512, num_programs=131, num_warps=12, num_stages=2,
    by_warpgroups=True,
)  # fmt: skip
_ROW_TILE = dataclasses.replace(TILE, min_chunk=128)
_MOST_CHUNKS = 32  # of a row, which one block adds up


def row_tile(num_rows: int) -> Tile:
    """Return the tile of so many rows of one token."""
    return dataclasses.replace(_ROW_TILE, num_programs=min(_ROW_TILE.num_programs, _MOST_CHUNKS * num_rows))


def refuses(sizes: LatentSizes, block_size: int, dtypes: tuple[str, str]) -> str | None:
    """Say why the kernel does not take what tokens keep; dtypes: of queries and of the cache. None: it takes it."""
    dtype, kv_dtype = dtypes
    return first_reason(
        {
            f"latents of {sizes.rank} and {sizes.rope}": (sizes.rank, sizes.rope) != (_RANK, _ROPE),
            f"blocks of {block_size} tokens": block_size % 8 != 0 or _KEYS % block_size != 0,
            f"queries in {dtype}": dtype != "bfloat16",
            f"a cache in {kv_dtype}": kv_dtype != dtype,
            "no Hopper": not has_warpgroups(),
        }
    )


def attend_latents(
    query: Tensor, cache: LayerCache, block_tables: Tensor, work: WorkList, result: Tensor, scale: float
) -> None:
    """Write the attention of a work list made for one of this file's tiles to result [tokens, heads, rank].

    query: [tokens, heads, rank + rope].
    """
    sizes = LatentSizes(query.shape[1], result.shape[2], query.shape[2] - result.shape[2])
    assert refuses(sizes, cache.block_size, (name_dtype(query.dtype), name_dtype(cache.dtype))) is None
    group = count_heads(sizes.heads)
    groups = sizes.heads // group
    launch(
        compile_kernel(f"blink::attend_latents<{group}, {groups}, {cache.block_size}>", _SOURCE),
        (groups, len(work.items)),
        32 * work.tile.num_warps,
        pack_arguments(query, cache, block_tables, work, result, scale),
        shared_bytes=_SHARED_BYTES,
    )
