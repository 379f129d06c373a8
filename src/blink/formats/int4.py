# SPDX-License-Identifier: Apache-2.0
"""Unpack the words in which checkpoints keep numbers of 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # at which place of a word each of eight columns lies


def unpack_columns(words: Tensor) -> Tensor:
    """Return uint8 [rows, 8 * columns] of int32 words [rows, columns], the lowest bits first."""
    return _unpack(words, -1).flatten(1)


def unpack_rows(words: Tensor) -> Tensor:
    """Return uint8 [8 * rows, columns] of int32 words [rows, columns], the lowest bits first."""
    return _unpack(words, 1).flatten(0, 1)


def unpack_awq(words: Tensor) -> Tensor:
    """Return uint8 [rows, 8 * columns] of AWQ's int32 words [rows, columns]."""
    return _unpack(words, -1)[..., list(_AWQ_ORDER)].flatten(1)


def _unpack(words: Tensor, dim: int) -> Tensor:
    """Return the eight numbers of each word along a new dimension."""
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in range(8)], dim)
