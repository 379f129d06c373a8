# SPDX-License-Identifier: Apache-2.0
"""First-fit allocation in a queue pair's prompt arena; spans come back in any order."""

from __future__ import annotations

from bisect import bisect_left

_UNIT = 16


class Arena:
    """Hand out spans of [0, size) in units of 16 bytes."""

    def __init__(self, size: int) -> None:
        self.size = size // _UNIT * _UNIT
        self._starts = [0]  # of free spans, ascending, never adjacent
        self._ends = [self.size]

    @property
    def free_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of a span of at least `num_bytes`, or None if none is free."""
        need = span_bytes(num_bytes)
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= need:
                self._starts[i] = start + need
                if start + need == end:
                    del self._starts[i], self._ends[i]
                return start
        return None

    def free(self, offset: int, num_bytes: int) -> None:
        """Take back a span that allocate(num_bytes) handed out."""
        end = offset + span_bytes(num_bytes)
        i = bisect_left(self._starts, offset)
        joins_left = i > 0 and self._ends[i - 1] == offset
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = offset
        else:
            self._starts.insert(i, offset)
            self._ends.insert(i, end)


def span_bytes(num_bytes: int) -> int:
    """Round a size up to what allocate() really takes."""
    return (max(num_bytes, 1) + _UNIT - 1) // _UNIT * _UNIT
