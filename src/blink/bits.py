# SPDX-License-Identifier: Apache-2.0
"""Whole numbers by their bits."""

from __future__ import annotations


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is not less than `value`."""
    return 1 << max(value - 1, 0).bit_length()
