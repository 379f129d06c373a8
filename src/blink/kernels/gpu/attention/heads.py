# SPDX-License-Identifier: Apache-2.0
"""The heads that paged attention takes, which is the kernel for all that others refuse. Needs no torch."""

from __future__ import annotations

_MAX_HEAD_DIM = 512


def refuses(head_dim: int) -> str | None:
    """Say why paged attention does not take heads of a size; None: it takes them."""
    return None if head_dim % 16 == 0 and head_dim <= _MAX_HEAD_DIM else f"heads of {head_dim}"
