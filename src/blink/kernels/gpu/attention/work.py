# SPDX-License-Identifier: Apache-2.0
"""What a launch of attention works on: its tiles, and the items that the plan writes on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

# Words of an item: one chunk of a tile. Items beyond the step have no queries. Partial results of a tile are adjacent.
ITEM_WORDS = tl.constexpr(16)
FIRST_TOKEN, NUM_QUERIES, FIRST_POSITION, FIRST_KEY, END_KEY, ROW_SLOT, PARTIAL, FIRST_PARTIAL, NUM_CHUNKS = map(
    tl.constexpr, range(9)
)


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program attends: its block sizes and launch options."""

    block_m: int  # pairs of query and query head
    block_n: int  # keys of one iteration
    combined_pairs: int  # pairs whose partial results are added up at once
    min_chunk: int  # keys of the shortest chunk; a multiple of block_n
    num_programs: int  # below which tiles are cut into chunks
    num_warps: int
    num_stages: int
    by_warpgroups: bool = False  # prefill.py's kernel
    fixed_chunks: bool = False  # every chunk has min_chunk keys, or a program all keys of its tile: invariant.py's
    combines: bool = True  # the program whose chunk ends last adds up a tile's partial results; else a kernel does


class ItemHeads(NamedTuple):
    """The heads that an item is for: a program for each of so many groups of query heads."""

    kv_heads: int  # groups
    group: int  # query heads of each
    size: int  # of a head's result
    window: int = 0  # of all layers; 0: they differ, or have none


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of one kernel launch, and where chunks of the same tile leave their results."""

    tile: Tile
    items: Tensor  # [max_items, ITEM_WORDS]
    counters: Tensor  # [max_partials, kv_heads]; at a tile's first partial result, how many are there
    partials: Tensor  # float32 [max_partials, kv_heads, block_m, head_dim]
    lses: Tensor  # float32 [max_partials, kv_heads, block_m]; log2 of the sum of exponentials
