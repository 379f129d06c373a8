# SPDX-License-Identifier: Apache-2.0
"""The work of attention's kernels, as kernels/gpu/attention/plan.py writes it on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

_ITEM_WORDS = 16


def plan_items(num_tokens: int, context: int, tile_queries: int, chunk_keys: int) -> Tensor:
    """Return the items of one row, with one without queries behind them."""
    items: list[list[int]] = []
    for first in range(0, num_tokens, tile_queries):
        count = min(tile_queries, num_tokens - first)
        position = context - num_tokens + first
        starts = range(0, position + count, chunk_keys)
        first_partial = len(items)
        for start in starts:
            end = min(start + chunk_keys, position + count)
            items.append([first, count, position, start, end, 0, len(items), first_partial, len(starts)])
    return torch.tensor([item + [0] * (_ITEM_WORDS - len(item)) for item in [*items, [0] * 9]], dtype=torch.int32)
