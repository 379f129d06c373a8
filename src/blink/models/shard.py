# SPDX-License-Identifier: Apache-2.0
"""Shard: which part of a model one rank of a tensor-parallel group holds. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks, which together hold a model."""

    rank: int = 0
    size: int = 1

    def take(self, count: int) -> range:
        """Return this rank's part of `count` items that the size divides."""
        own = count // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def take_heads(self, count: int) -> range:
        """Return the key-value heads of this rank: fewer of them than ranks are copied."""
        if count >= self.size:
            return self.take(count)
        first = self.rank * count // self.size
        return range(first, first + 1)

    def take_rows(self, count: int) -> range:
        """Return this rank's part of a vocabulary, of which the last rank may have fewer rows."""
        own = -(-count // self.size)
        return range(min(self.rank * own, count), min((self.rank + 1) * own, count))


WHOLE = Shard()


def divides_heads(count: int, size: int) -> bool:
    """Tell whether ranks can have equally many key-value heads, or each a copy of one."""
    return count % size == 0 or size % count == 0
