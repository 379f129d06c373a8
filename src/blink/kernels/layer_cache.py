# SPDX-License-Identifier: Apache-2.0
"""LayerCache: one layer's part of the KV cache, by names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of a layer, in blocks of tokens."""

    cells: Tensor  # [2, num_blocks, block_size, kv_heads, head_dim]: keys, values

    @property
    def keys(self) -> Tensor:
        """The keys [num_blocks, block_size, kv_heads, head_dim]."""
        return self.cells[0]

    @property
    def values(self) -> Tensor:
        """The values, as the keys."""
        return self.cells[1]

    @property
    def values_offset(self) -> int:
        """How many numbers behind a key its value lies."""
        return self.cells.stride(0)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.cells.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.cells.shape[2]

    @property
    def kv_heads(self) -> int:
        """Heads of a token."""
        return self.cells.shape[3]

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.cells.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.cells.dtype

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.cells.device


KvCache = tuple[LayerCache, ...]  # of all layers
