# SPDX-License-Identifier: Apache-2.0
"""Orders of rows in which files have the projections of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ungroup(heads: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return each part's rows where heads lie one after the other, each with so many rows of every part."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return [part.flatten() for part in rows.split(list(sizes), dim=1)]


def untile(k_heads: int, v_heads: int) -> Tensor:
    """Return where each value head is in GGUF files that have the first one of each key head, then each second one.

    In the order of all others those of a key head follow each other.
    """
    return torch.arange(v_heads).view(-1, k_heads).T.flatten()


def widen(heads: Tensor, size: int) -> Tensor:
    """Return the rows of heads of a size."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


def separate_pairs(size: int) -> Tensor:
    """Return components of a head that are rotated in pairs (2i, 2i + 1) in the order of pairs half a head apart."""
    return torch.arange(size).view(-1, 2).T.flatten()
