# SPDX-License-Identifier: Apache-2.0
"""The sizes that latent attention takes, and how query heads are shared among its programs. Needs no torch."""

from __future__ import annotations

_MAX_RANK, _MAX_ROPE = 512, 64
_MAX_HEADS = 64  # of a program, whose results of a query an SM's registers must hold


def refuses(rank: int, rope: int) -> str | None:
    """Say why latent attention does not take sizes of what tokens keep; None: it takes them."""
    is_taken = rank % 16 == 0 and 16 <= rank <= _MAX_RANK and rope % 2 == 0 and 2 <= rope <= _MAX_ROPE
    return None if is_taken else f"latents of {rank} and {rope}"


def count_heads(heads: int) -> int:
    """Return how many query heads a program has: the most of those that share the heads evenly."""
    return next(count for count in range(min(heads, _MAX_HEADS), 0, -1) if heads % count == 0)
