# SPDX-License-Identifier: Apache-2.0
"""LayerCache: one layer's part of the KV cache, by names."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """Keys and values of a layer, in blocks of tokens."""

    __slots__ = (
        "block_size", "cells", "device", "dtype", "head_dim", "keys", "kv_heads", "num_blocks", "values",
        "values_offset",
    )  # fmt: skip

    def __init__(self, cells: Tensor) -> None:
        """Name the parts of cells [2, num_blocks, block_size, kv_heads, head_dim]: keys, values."""
        self.cells = cells
        self.keys, self.values = cells
        _, self.num_blocks, self.block_size, self.kv_heads, self.head_dim = cells.shape
        self.values_offset = cells.stride(0)  # how many numbers behind a key its value lies
        self.dtype, self.device = cells.dtype, cells.device


KvCache = tuple[LayerCache, ...]  # of all layers
