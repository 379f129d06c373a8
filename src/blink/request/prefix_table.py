# SPDX-License-Identifier: Apache-2.0
"""Which replica has computed the beginning of a prompt before: for routers, which see prompts and no cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)


class PrefixTable(Generic[Replica]):
    """Which replicas have seen which beginnings; the least recently used are forgotten."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[bytes, set[Replica]] = OrderedDict()
        self._sizes: Counter[Replica] = Counter()

    def size(self, replica: Replica) -> int:
        """Return how many beginnings a replica has."""
        return self._sizes[replica]

    def add(self, points: Iterable[bytes], replica: Replica) -> None:
        """Note that a replica computes a prompt."""
        for point in points:
            owners = self._owners.setdefault(point, set())
            self._owners.move_to_end(point)
            if replica not in owners:
                owners.add(replica)
                self._sizes[replica] += 1
        while len(self._owners) > self._capacity:
            self._sizes.subtract(self._owners.popitem(last=False)[1])

    def longest(self, points: tuple[bytes, ...], replicas: Collection[Replica]) -> tuple[set[Replica], int]:
        """Return those of some replicas that have the most of a prompt, and how many of its points that is."""
        for count in range(len(points), 0, -1):
            found = self._owners.get(points[count - 1], set[Replica]()).intersection(replicas)
            if found:
                return found, count
        return set(), 0
