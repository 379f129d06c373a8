# SPDX-License-Identifier: Apache-2.0
"""Characters as the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from blink.grammar.expression import CodePoints

ByteRanges = tuple[tuple[int, int], ...]  # of each byte of a character


@lru_cache(maxsize=512)
def byte_sequences(ranges: CodePoints) -> tuple[ByteRanges, ...]:
    """Return the bytes of a class of characters, none of them a surrogate."""
    return tuple(sequence for low, high in ranges for sequence in _split(low, high))


def _split(low: int, high: int) -> Iterator[ByteRanges]:
    """Split a range of code points into sequences of byte ranges."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            yield from _split(low, last)
            yield from _split(last + 1, high)
            return
    for bits in (6, 12, 18) if high > 0x7F else ():
        mask = (1 << bits) - 1
        if low & ~mask == high & ~mask:
            continue
        if low & mask:
            yield from _split(low, low | mask)
            yield from _split((low | mask) + 1, high)
            return
        if high & mask != mask:
            yield from _split(low, (high & ~mask) - 1)
            yield from _split(high & ~mask, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
